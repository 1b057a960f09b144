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
from ..errors import PruneError
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
    """Return a copy with plain weights: gates and parametrizations are folded into them.

    With `copied=False` the model itself is used up.
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
        bare: a skeleton of the original model, without gates.
        graph: the groups of that model.
        before: a mask of the units that the models to be cut have.
        after: a mask of the units that they should have.
    """

    def __init__(self, bare: nn.Module, graph: Graph, before: Tensor, after: Tensor) -> None:
        self.bare, self.graph = bare, graph
        self.before, self.after = before, graph.without_unread(after)
        self.recipe = recipe_for(bare, graph, self.after)
        self.removed: list[weakref.ref[Tensor]] = []  # parameters of layers that were removed

    @property
    def changes_nothing(self) -> bool:
        """True if the models have the wanted units already."""
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


def check_can_compact(rebuild: Rebuild) -> None:
    """Refuse a model that cannot be cut while it trains."""
    graph = rebuild.graph
    if graph.computed and not rebuild.changes_nothing:
        raise PruneError(
            f"compact: {graph.computed[0]} is computed from other parameters, which cannot be cut "
            f"while they are trained. Nothing was changed; continue training without compact()."
        )
    both = sorted(rebuild.recipe.rewired.keys() & graph.weights.keys())
    if both:
        raise PruneError(
            f"compact: {both[0] or 'the model'} has a norm with weighted statistics in a forward "
            f"that hard-codes widths. Nothing was changed; continue training without compact()."
        )


def check_optimizer_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state cannot be cut."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            known = not isinstance(value, Tensor) or value.numel() == 1
            if not known and value.shape != parameter.shape:
                raise PruneError(
                    f"compact: {type(optimizer).__name__} keeps {key} of shape "
                    f"{list(value.shape)} for a parameter of shape {list(parameter.shape)}, "
                    f"which cannot be cut. Nothing was changed; continue training without "
                    f"compact(). When you resume, load the model's state before the optimizer's."
                )


def same_shapes(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have tensors of the same names and shapes."""
    shapes = [{name: x.shape for name, x in named_tensors(model)} for model in (one, other)]
    return shapes[0] == shapes[1]


def check_copy(where: str, copy: object, model: nn.Module) -> None:
    """Refuse anything that is not a copy of the gated model."""
    if not isinstance(copy, nn.Module) or not same_shapes(copy, model):
        raise PruneError(
            f"{where}: {type(copy).__name__} is not a copy of the gated model as it is now. Copy "
            f"the model after the Pruner was built, and keep the copy in pruner.copies, so that "
            f"compact() cuts it, too. Nothing was changed."
        )


def check_held(model: nn.Module, optimizers: Iterable[Optimizer], remedy: str) -> None:
    """Refuse parameters that belong to no known optimizer: its state would keep the old shapes."""
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    loose = [name for name, parameter in trained if id(parameter) not in held]
    if loose:
        raise PruneError(
            f"compact: {loose[0]} (and {len(loose) - 1} more) is in none of the optimizers. If it "
            f"is in another one, name that too: {remedy}; if it should not be trained, call "
            f"requires_grad_(False) on it. Nothing was changed."
        )


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
                        assert tensor.numel() == 0, f"{name} comes from nowhere"
                        dtype = dtypes.get(tensor.dtype, tensor.dtype)
                        found = torch.empty_like(tensor, device=home, dtype=dtype)
                    remaining.add(id(found))
                    table[key] = found
    return remaining


def _changed_dtypes(new: nn.Module, held: Mapping[str, Tensor]) -> dict[torch.dtype, torch.dtype]:
    """Return what became of each dtype if the model was converted after its skeleton was made."""
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
    # autograd remembers the shape of a leaf while a loss of the last step is alive; changing the
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
    """Gives modules in training the structure of other modules, object by object."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.replaced = {*recipe.constants, *recipe.identities, *recipe.hollow, *recipe.heads}
        self.known: dict[int, nn.Module] = {}

    def __call__(self, old: nn.Module | None, new: nn.Module, path: str = "") -> nn.Module:
        """Return the module that stands at `path` from now on: the old one where possible."""
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
