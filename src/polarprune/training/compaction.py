"""Taking what is closed out of a model while it trains, in place.

A small model is cut from a skeleton of the original that takes no memory, and the model in training
takes over its form. Modules that are still there stay the objects they were, with their hooks, and
so do parameters: an optimizer knows them by identity. Its state is cut in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..channels.graph import Graph, plan_of, stays
from ..errors import PruneError
from ..gates.gate import Gate
from ..gates.install import insert_gates
from ..rewriting.parametrizations import is_gated
from ..surgery.apply import cut_copy, selected, write_recipe
from ..surgery.recipe import RECIPE, Recipe
from ..tracing.copying import copy_model
from ..tracing.model_state import named_tensors


def skeleton(model: nn.Module) -> nn.Module:
    """The model as it is now, without the memory for its weights."""
    memo: dict[int, Any] = {}
    for _, tensor in named_tensors(model):
        bare = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            bare = nn.Parameter(bare, tensor.requires_grad)
        memo[id(tensor)] = bare
    return copy_model(model, memo)


class Rebuild:
    """Brings models from the units `before` to the units `after`; gates have to be put in anew."""

    def __init__(self, bare: nn.Module, graph: Graph, before: Tensor, after: Tensor) -> None:
        self.bare, self.graph = bare, graph
        self.before, self.after = before, graph.settle(after)
        self.recipe = write_recipe(bare, graph, plan_of(graph, self.after))
        if self.graph.computed and not torch.equal(self.after, self.before):
            raise PruneError(
                f"compact: {graph.computed[0]} is computed from other parameters, which cannot be "
                f"cut while they learn. Nothing was changed; train on without compact()."
            )
        both = sorted(self.recipe.rewired.keys() & graph.weights.keys())
        if both:
            raise PruneError(
                f"compact: {both[0] or 'the model'} has a norm with weighted statistics in code "
                f"that bakes in widths. Nothing was changed; train on without compact()."
            )

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer whose state cannot be cut."""
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                known = not isinstance(value, Tensor) or value.numel() == 1
                if not known and value.shape != parameter.shape:
                    raise PruneError(
                        f"compact: {type(optimizer).__name__} keeps {key} of shape "
                        f"{list(value.shape)} for a parameter of shape {list(parameter.shape)}, "
                        f"which cannot be cut. Nothing was changed; train on without compact()."
                    )

    def __call__(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        new = cut_copy(self.bare, self.recipe)
        held = dict(_tensors(model))
        for name, axes in self.graph.axes.items():
            if name in held:
                cut(held[name], self._kept(axes), optimizers)
        home = next(tensor.device for tensor in held.values())
        left = set()
        for path, module in new.named_modules(remove_duplicate=False):
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        name = f"{path}.{key}" if path else key
                        found = held.get(name)
                        if found is None or found.shape != tensor.shape:  # empty: it knows types
                            assert tensor.numel() == 0, f"{name} comes from nowhere"
                            found = torch.empty_like(tensor, device=home)
                        left.add(id(found))
                        table[key] = found
        for optimizer in optimizers:
            _drop_parameters(optimizer, {id(tensor) for tensor in held.values()} - left)
        _Takeover(self.recipe)(model, new)
        setattr(model, RECIPE, self.recipe.to_json())

    def gated(
        self, model: nn.Module, gates: dict[str, Gate], optimizers: Sequence[Optimizer] = ()
    ) -> None:
        """The same for a model with gates, which are cut and put back in."""
        for name, group in self.graph.prunable.items():
            mine = slice(group.offset, group.offset + group.size)
            kept = self._kept({0: torch.arange(len(self.after))[mine]})
            cut(gates[name].alpha, kept, optimizers)
        self(model, optimizers)
        insert_gates(model, self.graph, gates, self.after)

    def check_copy(self, copy: nn.Module, model: nn.Module) -> None:
        """Refuse what is no copy of the gated model."""
        shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (copy, model)]
        if shapes[0] != shapes[1]:
            raise PruneError(
                f"compact: one of the copies ({type(copy).__name__}) is not a copy of the gated "
                f"model as it is now: copy the model after the Pruner was built, and keep the copy "
                f"in pruner.copies. Nothing was changed."
            )

    def _kept(self, axes: dict[int, Tensor]) -> dict[int, Tensor]:
        """For every axis the places that stay, counted among those that are still there."""
        found = {}
        for axis, units in axes.items():
            kept = stays(units, self.after)[stays(units, self.before)]
            if not bool(kept.all()):
                found[axis] = kept.nonzero().flatten()
        return found


def check_held(model: nn.Module, optimizers: Iterable[Optimizer], remedy: str) -> None:
    """An optimizer that is not known would go on with the state of the old shapes."""
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    learned = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    loose = [name for name, parameter in learned if id(parameter) not in held]
    if loose:
        raise PruneError(
            f"compact: {loose[0]} (and {len(loose) - 1} more) is in none of the optimizers. If it "
            f"is in another one, name that too: {remedy}; if it is not to learn, call "
            f"requires_grad_(False) on it. Nothing was changed."
        )


def gates_in(model: nn.Module, original: nn.Module, gates: dict[str, Gate]) -> dict[str, Gate]:
    """The gates of a copy of a gated model."""
    paths = {id(module): path for path, module in original.named_modules()}
    found = {}
    for name, gate in gates.items():
        mine = model.get_submodule(paths[id(gate)]) if id(gate) in paths else copy.deepcopy(gate)
        assert isinstance(mine, Gate)
        found[name] = mine
    return found


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors by all their names, as if there were no gates."""
    for path, module in model.named_modules(remove_duplicate=False):
        if getattr(module, "is_gate", False):
            continue
        stem, found, leaf = f".{path}".rpartition(".parametrizations.")
        gated = found and "." not in leaf and is_gated(module)
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    name = f"{stem}.{leaf}" if gated and key == "original" else f".{path}.{key}"
                    yield name.lstrip("."), tensor


def cut(tensor: Tensor, kept: dict[int, Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Cut a tensor in place, with its gradient and with what optimizers keep for it."""
    if not kept:
        return
    before = tensor.shape
    gradient = tensor.grad if tensor.is_leaf else None
    tensor.grad = None
    new = selected(tensor.data, kept)
    # autograd remembers the shape of a leaf as long as a loss of the step before is alive; a change
    # of type makes it forget
    tensor.data = new.to(torch.float16 if new.dtype != torch.float16 else torch.float32)
    tensor.data = new
    if gradient is not None:
        tensor.grad = selected(gradient, kept)
    for state in [optimizer.state.get(tensor, {}) for optimizer in optimizers]:
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == before:
                state[key] = selected(value, kept)


def _drop_parameters(optimizer: Optimizer, gone: set[int]) -> None:
    """Layers that were taken out have nothing left to learn."""
    for group in optimizer.param_groups:
        for parameter in [p for p in group["params"] if id(p) in gone]:
            optimizer.state.pop(parameter, None)
        group["params"] = [p for p in group["params"] if id(p) not in gone]


class _Takeover:
    """Gives modules in training the form of other ones, object by object."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.replaced = {*recipe.constants, *recipe.identities, *recipe.hollow, *recipe.heads}
        self.known: dict[int, nn.Module] = {}

    def __call__(self, old: nn.Module | None, new: nn.Module, path: str = "") -> nn.Module:
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
            kept.__class__ = type(new)
            for table in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                vars(kept)[table] = vars(new)[table]
            if path in self.recipe.rewired:
                vars(kept).pop("forward", None)  # a method that it chose
            for key in self.recipe.attributes.get(path, {}):
                vars(kept)[key] = getattr(new, key)
        vars(target)["_modules"] = merged
        return target
