"""Cut a model to other widths while it trains, in place.

A small model is cut from a skeleton: a copy of the original without memory for its weights. The
model in training then takes over its structure. Modules that remain stay the same objects, with
their hooks, and so do parameters, because an optimizer knows them by identity. Gradients and the
optimizer's state are cut in the same way.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..channels.graph import Graph, stays
from ..gates.folding import plain
from ..gates.gate import Gate
from ..gates.install import insert_gates
from ..rewriting.forward_weights import without_computed_weights
from ..rewriting.parametrizations import is_gated
from ..surgery.apply import cut_copy, leave_fused_path, select_kept
from ..surgery.recipe import Recipe
from ..surgery.write_recipe import recipe_for
from ..torch_internals.class_swaps import set_class
from ..torch_internals.markers import attach_recipe, is_gate_part
from ..tracing.copying import copy_model
from ..tracing.model_state import named_tensors


def ungated(model: nn.Module, graph: Graph, *, copied: bool = True) -> nn.Module:
    """Return a model with plain weights, into which gates and parametrizations are folded.

    Args:
        model: A gated model.
        graph: The groups of its channels.
        copied: Whether to return a copy. With False the given model itself is changed and returned.
    """
    return without_computed_weights(plain(model, copied=copied), graph.forward_weights)


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of the model without memory for its weights."""
    memo: dict[int, object] = {}
    for _, tensor in named_tensors(model):
        bare = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            bare = nn.Parameter(bare, tensor.requires_grad)
        memo[id(tensor)] = bare
    return copy_model(model, memo)


class Rebuild:
    """Cuts models that have the units `before` to the units `after`.

    This is the only way in which `Pruner` cuts a model, in `compact` and in `export`.

    Args:
        bare: A skeleton of the original model, without gates.
        graph: The groups of that model.
        before: A mask of the units that the models to be cut have.
        after: A mask of the units that they should have.
    """

    def __init__(self, bare: nn.Module, graph: Graph, before: Tensor, after: Tensor) -> None:
        self.bare, self.graph = bare, graph
        self.before, self.after = before, graph.without_unread(after)
        self.recipe = recipe_for(bare, graph, self.after)
        self.removed: list[weakref.ref[Tensor]] = []  # parameters of layers that were removed

    @property
    def changes_nothing(self) -> bool:
        """Whether the models have the wanted units already."""
        return torch.equal(self.after, self.before)

    def __call__(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        """Cut a model without gates, in place, with the state of its optimizers."""
        new = cut_copy(self.bare, self.recipe)
        held = dict(_tensors(model))
        for name, axes in self.graph.axes.items():
            if name in held:
                cut_tensor(held[name], self._kept(axes), optimizers)
        remaining = _fill(new, held)
        gone = [tensor for tensor in held.values() if id(tensor) not in remaining]
        self.removed += map(weakref.ref, gone)
        for optimizer in optimizers:
            drop_parameters(optimizer, {id(tensor) for tensor in gone})
        _Takeover(self.recipe)(model, new)
        leave_fused_path(model)
        attach_recipe(model, self.recipe.to_json())

    def gated(
        self, model: nn.Module, gates: Mapping[str, Gate], optimizers: Sequence[Optimizer] = ()
    ) -> None:
        """Cut a model with gates, in place; the gates are cut and inserted again."""
        for name, group in self.graph.prunable.items():
            mine = slice(group.offset, group.offset + group.size)
            kept = self._kept({0: torch.arange(len(self.after))[mine]})
            cut_tensor(gates[name].alpha, kept, optimizers)
        self(model, optimizers)
        insert_gates(model, self.graph, dict(gates), self.after)

    def _kept(self, axes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the indices to keep along each axis, counted among those still present."""
        found = {}
        for axis, units in axes.items():
            kept = stays(units, self.after)[stays(units, self.before)]
            if not bool(kept.all()):
                found[axis] = kept.nonzero().flatten()
        return found


def same_shapes(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have tensors of the same names and shapes."""
    shapes = [{name: x.shape for name, x in named_tensors(model)} for model in (one, other)]
    return shapes[0] == shapes[1]


def gates_in(model: nn.Module, original: nn.Module, gates: Mapping[str, Gate]) -> dict[str, Gate]:
    """Return the gates of a copy of a gated model."""
    paths = {id(module): path for path, module in original.named_modules()}
    found = {}
    for name, gate in gates.items():
        mine = model.get_submodule(paths[id(gate)]) if id(gate) in paths else copy.deepcopy(gate)
        assert isinstance(mine, Gate)
        found[name] = mine
    return found


def _fill(new: nn.Module, held: Mapping[str, Tensor]) -> set[int]:
    """Put the tensors of a model into its cut skeleton; return the ids of those that remain."""
    home = next(tensor.device for tensor in held.values())
    dtypes = _changed_dtypes(new, held)
    remaining = set()
    for path, module in new.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    found = held.get(name)
                    if found is None or found.shape != tensor.shape:  # an empty one holds a dtype
                        assert tensor.numel() == 0, f"{name} is not in the model"
                        dtype = dtypes.get(tensor.dtype, tensor.dtype)
                        found = torch.empty_like(tensor, device=home, dtype=dtype)
                    remaining.add(id(found))
                    table[key] = found
    return remaining


def _changed_dtypes(new: nn.Module, held: Mapping[str, Tensor]) -> dict[torch.dtype, torch.dtype]:
    """Return the present dtype for each dtype of the skeleton; the model may be converted since."""
    pairs = [
        (tensor.dtype, held[name].dtype) for name, tensor in named_tensors(new) if name in held
    ]
    return dict(pairs)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors under all their names, as if there were no gates."""
    for path, module in model.named_modules(remove_duplicate=False):
        if is_gate_part(module):
            continue
        stem, found, leaf = f".{path}".rpartition(".parametrizations.")
        gated = found and "." not in leaf and is_gated(module)
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    name = f"{stem}.{leaf}" if gated and key == "original" else f".{path}.{key}"
                    yield name.lstrip("."), tensor


def cut_tensor(tensor: Tensor, kept: Mapping[int, Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Cut a tensor in place, with its gradient and the state that optimizers keep for it."""
    if not kept:
        return
    before = tensor.shape
    gradient = tensor.grad if tensor.is_leaf else None
    tensor.grad = None
    new = select_kept(tensor.data, kept)
    # autograd remembers the shape of a leaf while a loss of the last step exists; changing the
    # dtype clears that
    tensor.data = new.to(torch.float16 if new.dtype != torch.float16 else torch.float32)
    tensor.data = new
    if gradient is not None:
        tensor.grad = select_kept(gradient, kept)
    for state in [optimizer.state.get(tensor, {}) for optimizer in optimizers]:
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == before:
                state[key] = select_kept(value, kept)


def drop_parameters(optimizer: Optimizer, gone: set[int]) -> None:
    """Remove the parameters of layers that were removed from an optimizer."""
    for group in optimizer.param_groups:
        for parameter in [p for p in group["params"] if id(p) in gone]:
            optimizer.state.pop(parameter, None)
        group["params"] = [p for p in group["params"] if id(p) not in gone]


class _Takeover:
    """Gives the modules of a model the structure of the modules of a smaller one."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.replaced = {*recipe.constants, *recipe.identities, *recipe.hollow, *recipe.heads}
        self.known: dict[int, nn.Module] = {}

    def __call__(self, old: nn.Module | None, new: nn.Module, path: str = "") -> nn.Module:
        """Return the module to use at `path`: the old one, unless it has to be replaced."""
        if id(new) in self.known:
            return self.known[id(new)]
        kept = old if path not in self.replaced else None
        target = new if kept is None else kept
        self.known[id(new)] = target
        if old is not None:
            new.training = old.training
        children: Iterable[tuple[str, nn.Module | None]] = new._modules.items()
        merged = {}
        for key, child in children:
            before = None if old is None else old._modules.get(key)
            inner = f"{path}.{key}" if path else key
            merged[key] = child if child is None else self(before, child, inner)
        if kept is not None:
            set_class(kept, type(new))
            for table in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                vars(kept)[table] = vars(new)[table]
            if path in self.recipe.rewired:
                vars(kept).pop("forward", None)  # set by the module itself
            for key in self.recipe.attributes.get(path, {}):
                vars(kept)[key] = getattr(new, key)
        vars(target)["_modules"] = merged
        return target
