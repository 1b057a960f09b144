"""Cutting: a plan becomes a recipe of plain data, and a recipe is applied to a model.

The recipe says which indices of which tensors stay, which attributes of which modules change, and
what replaces modules that have nothing left to compute. It is JSON, so that a saved model can be
rebuilt from its original class without tracing it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import instancenorm

from ..channels.graph import Graph, Plan, module_of, stays
from ..errors import PruneError
from ..rewriting.captured_forward import with_forward
from ..rewriting.forward_weights import expose, without_computed_weights
from ..rewriting.parametrizations import is_gated, make_plain, parametrized
from ..rewriting.remove_branches import owner_of, vanishing, without_branches
from ..rewriting.resize import resized
from ..rewriting.stored_graphs import decode, encode
from ..rewriting.weighted_norms import Fixed, open_encoders, unweigh, weigh, weight_of
from ..tracing.copying import copy_model
from ..tracing.model_state import named_tensors
from ..tracing.tape import Op
from ..validation.arguments import check_graph
from .attention import Attention
from .recipe import (
    OTHER_MODEL,
    RECIPE,
    SPATIAL,
    Recipe,
    describe_bare_norm,
    describe_modules,
)
from .replacement_layers import Constant, Hollow


def shrink(model: nn.Module, graph: Graph, plan: Plan) -> nn.Module:
    """A copy of `model` that has only the planned channels; the model itself stays as it is.

    `plan` maps group names to the indices of the channels to keep; any method can make it.
    Groups that it does not name stay whole.
    """
    check_graph("shrink", model, graph, Graph)
    alive = graph.alive(plan)
    for name, group in graph.prunable.items():
        left = int(alive[group.offset : group.offset + group.size].sum())
        if left < group.minimum:
            raise PruneError(
                f"{name}: the plan keeps {left} channels, but at least {group.minimum} must stay, "
                f"or the input no longer reaches the output, or the model's code does not run: "
                f"print(graph) says why."
            )
    warn_of_hooks(model)
    model = without_computed_weights(model, graph.forward_weights)
    return cut_copy(model, write_recipe(model, graph, plan))


def warn_of_hooks(model: nn.Module) -> None:
    """torch copies no hooks of parameters, and ours might not fit tensors that were cut."""
    tables = ("_backward_hooks", "_post_accumulate_grad_hooks")
    names = [name for name, p in model.named_parameters() if any(getattr(p, t, 0) for t in tables)]
    if names:
        warnings.warn(
            f"{names[0]} (and {len(names) - 1} more) has hooks on its gradient, which the small "
            f"model does not have. Register them there if it is to be trained.",
            stacklevel=3,
        )


def write_recipe(model: nn.Module, graph: Graph, plan: Plan) -> Recipe:
    """All decisions; `cut_copy` has none left."""
    check_shapes(model, graph.shapes, "The graph belongs to another model; trace this one.")
    alive = graph.settle(graph.alive(plan))
    recipe = Recipe(computed=list(graph.computed))
    known: dict[int, list[int]] = {}  # many axes share their units
    for name, tensor in named_tensors(model):
        for axis, units in graph.axes.get(name, {}).items():
            if id(units) not in known:
                known[id(units)] = stays(units, alive).nonzero().flatten().tolist()
            if len(known[id(units)]) < len(units):
                recipe.shapes[name] = list(tensor.shape)
                recipe.slices.setdefault(name, {})[str(axis)] = known[id(units)]
    modules = dict(model.named_modules(remove_duplicate=False))
    describe_modules(modules, recipe)
    recipe.constants = [path for path in recipe.constants if graph.ops_in(path)]  # called, not read
    for path, places in graph.size_attributes.items():
        sizes = {name: graph.width(path, place, alive) for name, place in places.items()}
        recipe.attributes.setdefault(path, {}).update(sizes)
    for path, module in modules.items():
        if isinstance(module, SPATIAL) and _meets_nothing(path, graph, alive):
            recipe.hollow.append(path)
        elif isinstance(module, (nn.GroupNorm, instancenorm._InstanceNorm)) and not module.affine:
            width = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
            describe_bare_norm(path, module, _incoming(path, width, graph, alive), recipe)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and path in graph.weights:
            shape = _normalised(module, graph.ops_in(path), graph, alive)
            recipe.attributes.setdefault(path, {})["normalized_shape"] = shape
        elif isinstance(module, nn.Unflatten):
            shape = _unflattened(path, module, graph, alive)
            if shape:
                recipe.attributes[path] = {"unflattened_size": shape}
    for path, one in graph.forward_weights.items():
        recipe.unread += [f"{path}.{name}" for name in one.unread]
        if path not in recipe.constants:
            recipe.rewired[path] = encode(one.captured)
    for path in graph.rewritten:
        graphs = resized(path, graph, alive)
        if graphs:
            recipe.rewired[path] = graphs
    _take_out_blocks(modules, graph, recipe)
    return recipe


def _take_out_blocks(modules: dict[str, nn.Module], graph: Graph, recipe: Recipe) -> None:
    silent = {path for path in recipe.constants if _makes_something(path, recipe)}
    for path in dict.fromkeys(owner_of(layer, modules) for layer in sorted(silent)):
        edits = vanishing(path, modules[path], graph, silent)
        if edits:
            code = None
            if path in graph.rewritten:  # whether or not a number in it changes
                code = decode(recipe.rewired.get(path, encode(graph.rewritten[path])))
            code, recipe.removed[path] = without_branches(modules[path], code, edits)
            recipe.rewired[path] = encode(code)


def _makes_something(path: str, recipe: Recipe) -> bool:
    made = recipe.attributes[path]
    return bool(made.get("out_channels", made.get("out_features")))


def _normalised(
    module: nn.LayerNorm | nn.RMSNorm, ops: list[Op], graph: Graph, alive: Tensor
) -> list[int]:
    """The shape that is normalised, as wide as what the module is still given."""
    source = ops[0].inputs()[0]
    shape = graph.shape(source, alive) or source.shape
    return list(shape[len(shape) - len(module.normalized_shape) :])


def _unflattened(path: str, module: nn.Unflatten, graph: Graph, alive: Tensor) -> list[int]:
    """The sizes that are left; empty if none of them changes."""
    out = graph.ops_in(path)[-1].outs[0] if graph.ops_in(path) else None
    shape = graph.shape(out, alive) if out is not None else None
    if out is None or shape is None or shape == out.shape:
        return []
    given = tuple(module.unflattened_size)
    start = module.dim % (len(shape) - len(given) + 1)
    left = shape[start : start + len(given)]
    return [-1 if old == -1 else new for old, new in zip(given, left, strict=True)]


def _meets_nothing(path: str, graph: Graph, alive: Tensor) -> bool:
    """True if, in one of its calls, all that this module puts out are channels that go."""
    for value in (out for op in graph.ops_in(path) for out in op.outs):
        layers = graph.values.get(value, [])
        if layers and not any(bool(stays(units, alive).any()) for units in layers):
            return True
    return False


def _incoming(path: str, width: int, graph: Graph, alive: Tensor) -> int | None:
    """How many of its channels still reach a module, or None if it is given no open ones."""
    for op in graph.ops_in(path):
        for value in op.inputs():
            if len(value.shape) > 1 and value.shape[1] == width:
                kept = graph.kept(value, 1, alive)
                if kept is not None:
                    return int(kept.sum())
    return None


def cut_copy(model: nn.Module, recipe: Recipe, *, from_file: bool = False) -> nn.Module:
    """A smaller copy of a model."""
    check_shapes(model, recipe.shapes, OTHER_MODEL)
    return _reform(copy_model(model, dict(_pieces(model, recipe))), recipe, from_file=from_file)


def mock_copy(model: nn.Module, recipe: Recipe, *, values: bool) -> nn.Module:
    """A smaller copy to try out: what is not cut is shared, weights without values if need be."""
    memo: dict[int, Any] = {id(tensor): tensor for _, tensor in named_tensors(model)}
    memo |= _pieces(model, recipe, _sliced if values else _sized)
    for module in model.modules():  # tables of hooks, most of them empty, are slow to copy
        memo |= {id(t): type(t)() for t in vars(module).values() if isinstance(t, dict) and not t}
    return _reform(copy_model(model, memo), recipe)


def _pieces(
    model: nn.Module, recipe: Recipe, cut: Callable[..., Tensor] | None = None
) -> dict[int, Tensor]:
    """The id of every tensor that is cut, and what is left of it."""
    tensors, cut = dict(named_tensors(model)), cut or _sliced
    return {id(tensors[name]): cut(tensors[name], axes) for name, axes in recipe.slices.items()}


def _reform(model: nn.Module, recipe: Recipe, *, from_file: bool = False) -> nn.Module:
    """Everything in a recipe but the slices, in place."""
    unweigh(model)
    for name in recipe.unread:
        owner, leaf = model.get_submodule(module_of(name)), name.rpartition(".")[2]
        if hasattr(owner, leaf):
            delattr(owner, leaf)
    for path, attributes in recipe.attributes.items():
        for key, value in attributes.items():
            value = tuple(value) if isinstance(value, list) else value
            setattr(model.get_submodule(path), key, value)
    _replace(model, recipe.heads, lambda old, path: Attention(old, recipe.heads[path]))
    _replace(model, recipe.constants, lambda old, _: Constant(old))
    _replace(model, recipe.identities, lambda *_: nn.Identity())
    _replace(model, recipe.hollow, lambda old, _: Hollow(old))
    for path in sorted(recipe.rewired, reverse=True):  # the root comes last
        module = with_forward(
            model.get_submodule(path), decode(recipe.rewired[path]), from_file=from_file
        )
        for child in recipe.removed.get(path, []):
            parent, _, name = child.rpartition(".")
            delattr(module.get_submodule(parent), name)
    _leave_fused_path(model)
    setattr(model, RECIPE, recipe.to_json())
    return model


def _leave_fused_path(model: nn.Module) -> None:
    """torch's encoders have one for eval mode, which wants its own modules inside."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            parts = (module.linear1, module.linear2)
            ours = not isinstance(module.self_attn, nn.MultiheadAttention)
            if ours or any(isinstance(part, Constant) for part in parts):
                module.activation_relu_or_gelu = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            layers = [x for x in module.layers if isinstance(x, nn.TransformerEncoderLayer)]
            if not all(layer.activation_relu_or_gelu for layer in layers):
                module.use_nested_tensor = False


def check_shapes(model: nn.Module, shapes: Mapping[str, Sequence[int]], remedy: str) -> None:
    tensors = dict(named_tensors(model))
    for name, shape in shapes.items():
        found = list(tensors[name].shape) if name in tensors else "missing"
        if found != list(shape):
            raise PruneError(f"{name}: expected shape {list(shape)}, found {found}. {remedy}")


def _sliced(tensor: Tensor, axes: dict[str, list[int]]) -> Tensor:
    kept = {int(axis): torch.tensor(left, dtype=torch.long) for axis, left in axes.items()}
    data = selected(tensor.detach(), kept)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, tensor.requires_grad)
    return data


def selected(data: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    """A copy of what stays, laid out in memory as it was: convolutions go by it."""
    form = _layout(data)
    for axis, places in kept.items():
        data = data.index_select(axis, places.to(data.device))
    return data.clone(memory_format=form)


def _layout(data: Tensor) -> torch.memory_format:
    """By the strides: a 1 x 1 kernel counts as contiguous in both, but only one is taken for it."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(data.dim())
    if form is None:
        return torch.contiguous_format
    last = torch.empty(data.shape, device="meta", memory_format=form).stride()
    return form if data.stride() == last else torch.contiguous_format


def _sized(tensor: Tensor, axes: dict[str, list[int]]) -> Tensor:
    """As wide as what is left; numbers that may be indices are kept."""
    if not (tensor.is_floating_point() and tensor.is_contiguous()):
        return _sliced(tensor, axes)
    shape = [len(axes.get(str(axis), range(size))) for axis, size in enumerate(tensor.shape)]
    data = tensor.detach().new_empty(shape)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _replace(model: nn.Module, paths: Iterable[str], make: Callable[[Any, str], nn.Module]) -> None:
    """Put other modules in place of those at `paths`, wherever the model holds them."""
    made: dict[nn.Module | None, nn.Module] = {}
    for path in paths:
        old = model.get_submodule(path)
        made[old] = make(old, path).train(old.training)
    for module in list(model.modules()) if made else []:
        for key, child in module._modules.items():
            if child in made:
                module._modules[key] = made[child]


def fold(model: nn.Module, graph: Graph, gates: Tensor) -> None:
    """Multiply gate values into the weights that read the gated channels, in place.

    Norms over gated channels take them as weights.
    """
    make_plain(expose(model, graph.forward_weights), graph.computed)
    tensors = dict(named_tensors(model))
    weigh(model, graph, lambda units: Fixed(weight_of(spread(gates, units, 0, 1))))
    open_encoders(model)
    with torch.no_grad():
        for name, axes in graph.sites.items():
            tensor = tensors[name]
            for axis, units in axes.items():
                tensor.mul_(spread(gates, units, axis, tensor.dim()).to(tensor))


def spread(gates: Tensor, units: Tensor, axis: int, dim: int) -> Tensor:
    """Gate values laid along one axis of a tensor; channels without a gate get 1."""
    shape = [1] * dim
    shape[axis] = -1
    values = torch.cat([gates, gates.new_ones(1)])
    return values[units.to(gates.device)].reshape(shape)


def plain(model: nn.Module) -> nn.Module:
    """A copy without gates: they are multiplied into the weights."""
    model = copy_model(model)
    make_plain(model, [name for name, _, _, parts in parametrized(model) if is_gated(parts)])
    unweigh(model)
    drop_hooks(model)
    return model


def drop_hooks(model: nn.Module) -> None:
    """Take away what gates do when the model is called."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "is_gate", False)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
