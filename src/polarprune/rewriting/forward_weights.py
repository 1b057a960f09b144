"""Weights that a layer computes in its own forward: standardized, scaled, masked, of low rank.

    weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) * self.gain
    return F.conv2d(x, weight, self.bias, self.stride)

The code that computes such a weight is moved out of the forward into a parametrization, which
`parametrizations` handles like any other: gates are multiplied into the computed weight, and in a
pruned model the weight is a plain parameter. The layer computes the same as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..channels.notes import Note
from ..channels.reasons import Reason
from ..torch_internals.markers import is_weight_exposed, mark_weight_exposed
from ..tracing.copying import copy_model
from ..tracing.model_state import Example
from .capture import capture_all, reason_of
from .captured_forward import Refused, notes_of
from .installed_forward import with_forward
from .interpreter import runner
from .parametrizations import ComputedWeight, computed, make_plain, plain_copy
from .weight_graphs import ForwardWeight, own_tensors, separate_weight


class ParametrizedWeight(ComputedWeight):
    """The parametrization: computes the weight as the layer's forward did."""

    def __init__(self, layer: nn.Module, how: ForwardWeight) -> None:
        super().__init__()
        vars(self)["layer"] = layer  # the layer holds this module, so it must not be a child
        self.leaf, self.names, self.unread = how.leaf, how.names, how.unread
        self.function = runner(how.graph, owner=type(layer).__name__)

    def _held(self, name: str) -> Tensor:
        tensor: Tensor = getattr(vars(self)["layer"], name)
        return tensor

    def forward(self, weight: Tensor) -> Tensor:
        """Compute the weight from the parameter that it replaces and the layer's other tensors."""
        given = [weight if name == self.leaf else self._held(name) for name in self.names]
        found: Tensor = self.function(None, *given)
        return found

    def learns(self) -> bool:
        """Return whether a tensor besides the weight is trained."""
        return any(self._held(name).requires_grad for name in self.names if name != self.leaf)


@dataclass
class ForwardWeights:
    """The layers that compute their weight in their forward, by name.

    Attributes:
        found: How each of them computes its weight.
        refused: Layers that may compute their weight in a way that cannot be moved out.
    """

    found: dict[str, ForwardWeight] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)

    def notes(self, frozen: Collection[Reason]) -> list[Note]:
        """Return a note for each refused layer in whose code channels are frozen.

        Args:
            frozen: The reasons of all frozen groups.
        """
        mattered = {
            path: one
            for path, one in self.refused.items()
            if any(path in why.modules and why.refusal != one.reason for why in frozen)
        }
        return notes_of(mattered, "channels are not followed through its code")


def find(model: nn.Module, example: Example) -> ForwardWeights:
    """Find the layers of a model that compute their weight in their forward."""
    paths = [path for path, module in model.named_modules() if _may_compute(module)]
    result = ForwardWeights()
    if not paths:
        return result
    try:
        captures = capture_all(model, example, paths)
    except Exception as error:  # the model does not run on the example: `record` will say so
        result.refused = dict.fromkeys(paths, Refused(reason_of(error)))
        return result
    result.refused.update(captures.refused)
    holders = Counter(id(held) for one in model.modules() for held in own_tensors(one).values())
    for path, code in captures.captured.items():
        layer = model.get_submodule(path)
        weight = separate_weight(layer, code)
        if isinstance(weight, ForwardWeight) and not _is_sole_holder(layer, weight, holders):
            weight = Refused("its weight is computed from a tensor that another module shares")
        if isinstance(weight, Refused):
            result.refused[path] = weight
        elif weight is not None:
            result.found[path] = weight
    return result


def _is_sole_holder(layer: nn.Module, weight: ForwardWeight, holders: Counter[int]) -> bool:
    """Return whether no other module holds a tensor that the weight is computed from."""
    tensors = own_tensors(layer)
    return all(holders[id(tensors[name])] == 1 for name in weight.names)


def _may_compute(module: nn.Module) -> bool:
    """Return whether this is a layer without children whose forward is not torch's own."""
    own = not (getattr(type(module).forward, "__module__", None) or "").startswith("torch.")
    plain = not module._modules and "forward" not in vars(module)
    return own and plain and any(p is not None and p.dim() > 1 for p in module._parameters.values())


def expose(model: nn.Module, found: dict[str, ForwardWeight]) -> nn.Module:
    """Move the code that computes these weights into parametrizations, in place."""
    for path, one in found.items():
        layer = model.get_submodule(path)
        if not is_weight_exposed(layer):
            with_forward(layer, one.captured, path=path, integers_free=True)
            mark_weight_exposed(layer)
            part = ParametrizedWeight(layer, one)
            parametrize.register_parametrization(layer, one.leaf, part, unsafe=True)
    return model


def without_computed_weights(model: nn.Module, found: dict[str, ForwardWeight]) -> nn.Module:
    """Return a copy of the model with plain weights, or the model if it has no computed ones."""
    if not found:
        return plain_copy(model)
    model = expose(copy_model(model), found)
    return make_plain(model, computed(model))
