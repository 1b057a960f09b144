"""Cutting: a plan becomes a recipe of plain data, and a recipe is applied to a model.

The recipe says which indices of which tensors stay, which attributes of which modules change, and
what replaces modules that have nothing left to compute. It is JSON, so that a saved model can be
rebuilt from its original class without tracing it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv, instancenorm, padding, pooling

from .attention import Attention
from .blocks import Edit, owner_of, take_out, vanishing, write_down
from .computed import bake, is_gated, parametrized
from .emit import compiled, decode, encode, with_forward, with_method
from .errors import PruneError
from .groups import Graph, Plan, module_of, stays
from .inline import all_baked, expose
from .leftovers import Constant, Hollow
from .norms import Fixed, unweigh, weigh, weight_of
from .rewire import rewiring
from .settings import check_graph
from .tape import Op, copied, named_tensors

RECIPE = "polarprune_recipe"
OTHER_MODEL = (
    "The recipe belongs to another model; give a fresh instance of the class and settings that "
    "were pruned."
)


@dataclass
class Recipe:
    """Everything that has to be done to a model of the original class."""

    shapes: dict[str, list[int]] = field(default_factory=dict)  # of the tensors, before
    slices: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # tensor -> axis -> kept
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)  # layers with nothing to read or to make
    identities: list[str] = field(default_factory=list)  # norms and the like over no channels
    hollow: list[str] = field(default_factory=list)  # pools and the like over no channels
    heads: dict[str, list[int]] = field(default_factory=dict)  # of attention that lost some
    rewired: dict[str, Any] = field(default_factory=dict)  # code that bakes in widths, re-emitted
    vanished: dict[str, list[Edit]] = field(default_factory=dict)  # blocks with closed branches
    computed: list[str] = field(default_factory=list)  # weights that become plain ones
    unread: list[str] = field(default_factory=list)  # what they were computed from

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def shrink(model: nn.Module, graph: Graph, plan: Plan) -> nn.Module:
    """A copy of `model` that has only the planned channels; the model itself stays as it is.

    `plan` maps group names to the indices of the channels to keep; any method can make it.
    Groups that it does not name stay whole.
    """
    check_graph("shrink", model, graph)
    alive = graph.alive(plan)
    for name, group in graph.open.items():
        left = int(alive[group.offset : group.offset + group.size].sum())
        if left < group.minimum:
            raise PruneError(
                f"{name}: the plan keeps {left} channels, but at least {group.minimum} must stay, "
                f"or the input no longer reaches the output, or the model's code does not run: "
                f"print(graph) says why."
            )
    model = all_baked(model, graph.inline)
    return cut_copy(model, write_recipe(model, graph, plan))


def write_recipe(model: nn.Module, graph: Graph, plan: Plan) -> Recipe:
    """All decisions; `apply` has none left."""
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
    first = _first_names(modules)
    tied = [name for name, other in first.items() if other in recipe.slices]
    for path in dict.fromkeys(module_of(name) for name in (*recipe.slices, *tied)):
        _describe(path, modules[path], recipe, first)
    recipe.constants = [path for path in recipe.constants if graph.ops_in(path)]  # called, not read
    for path, places in graph.numbers.items():
        sizes = {name: graph.width(path, place, alive) for name, place in places.items()}
        recipe.attributes.setdefault(path, {}).update(sizes)
    for path, module in modules.items():
        if isinstance(module, _SPATIAL) and _meets_nothing(path, graph, alive):
            recipe.hollow.append(path)
        elif isinstance(module, (nn.GroupNorm, instancenorm._InstanceNorm)) and not module.affine:
            _describe_bare_norm(path, module, _incoming(path, graph, alive), recipe)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and path in graph.weights:
            shape = _normalised(module, graph.ops_in(path), graph, alive)
            recipe.attributes.setdefault(path, {})["normalized_shape"] = shape
        elif isinstance(module, nn.Unflatten):
            shape = _unflattened(path, module, graph, alive)
            if shape:
                recipe.attributes[path] = {"unflattened_size": shape}
    for path, one in graph.inline.items():
        recipe.unread += [f"{path}.{name}" for name in one.unread]
        if path not in recipe.constants:
            recipe.rewired[path] = encode(one.emission)
    for path in graph.rewired:
        graphs = rewiring(path, graph, alive)
        if graphs:
            recipe.rewired[path] = graphs
    _take_out_blocks(modules, graph, recipe)
    return recipe


def _first_names(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Of tensors that several modules hold: the name by which they are known."""
    names: dict[int, list[str]] = {}
    for tables in ("_parameters", "_buffers"):
        for path, module in modules.items():
            for leaf, tensor in getattr(module, tables).items():
                if tensor is not None:
                    names.setdefault(id(tensor), []).append(f"{path}.{leaf}" if path else leaf)
    return {name: mine[0] for mine in names.values() for name in mine[1:]}


def _take_out_blocks(modules: dict[str, nn.Module], graph: Graph, recipe: Recipe) -> None:
    silent = {path for path in recipe.constants if _makes_something(path, recipe)}
    for path in dict.fromkeys(owner_of(layer, modules) for layer in sorted(silent)):
        edits = vanishing(path, modules[path], graph, silent)
        if edits:
            recipe.vanished[path] = edits
            if path in graph.rewired:  # whether or not a number in it changes
                recipe.rewired.setdefault(path, encode(graph.rewired[path]))


def _makes_something(path: str, recipe: Recipe) -> bool:
    made = recipe.attributes[path]
    return bool(made.get("out_channels", made.get("out_features")))


_SPATIAL = (
    pooling._MaxPoolNd,
    pooling._AvgPoolNd,
    nn.Upsample,
    padding._ReflectionPadNd,
    padding._ReplicationPadNd,
)
_NORMS = (batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.GroupNorm, nn.PReLU)


def _describe(path: str, module: nn.Module, recipe: Recipe, first: dict[str, str]) -> None:
    """Attributes of the modules that torch has; others read the sizes of their tensors."""
    if isinstance(module, nn.MultiheadAttention):
        rows = _kept_rows(path, module, recipe)
        recipe.heads[path] = list(dict.fromkeys(row // module.head_dim for row in rows))
        return
    changed = recipe.attributes.setdefault(path, {})
    for attribute, size in _sizes(path, module, recipe, first).items():
        changed[attribute] = size
        if size == 0 and isinstance(module, (conv._ConvNd, nn.Linear)):
            recipe.constants.append(path)
        elif size == 0 and isinstance(module, _NORMS):
            recipe.identities.append(path)
    recipe.constants = list(dict.fromkeys(recipe.constants))
    recipe.identities = list(dict.fromkeys(recipe.identities))
    if not changed:
        del recipe.attributes[path]


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


def _kept_rows(path: str, module: nn.MultiheadAttention, recipe: Recipe) -> list[int]:
    """Which channels of the queries are left."""
    name = f"{path}.in_proj_weight" if module._qkv_same_embed_dim else f"{path}.q_proj_weight"
    rows = recipe.slices.get(name, {}).get("0", range(module.embed_dim))
    return [row for row in rows if row < module.embed_dim]


def _describe_bare_norm(path: str, module: nn.Module, width: int | None, recipe: Recipe) -> None:
    """A norm that has no parameters still counts its channels."""
    if width is None:
        return
    if isinstance(module, nn.GroupNorm):
        groups = width * module.num_groups // module.num_channels
        recipe.attributes[path] = {"num_channels": width, "num_groups": groups}
    else:
        recipe.attributes[path] = {"num_features": width}
    if width == 0 and path not in recipe.identities:
        recipe.identities.append(path)


def _sizes(path: str, module: nn.Module, recipe: Recipe, first: dict[str, str]) -> dict[str, Any]:
    """New values of the attributes that hold widths."""

    def kept(tensor: str, axis: int, before: int) -> list[int]:
        stem = f"{path}.{tensor}" if path else tensor
        name = first.get(stem, stem)
        return recipe.slices.get(name, {}).get(str(axis), list(range(before)))

    def now(tensor: str, axis: int, before: int) -> int:
        return len(kept(tensor, axis, before))

    if isinstance(module, conv._ConvNd):
        lead, rest = "out_channels", "in_channels"
        if isinstance(module, conv._ConvTransposeNd):
            lead, rest = rest, lead
        before, groups = getattr(module, lead), module.groups
        leading = kept("weight", 0, before)
        per_group = now("weight", 1, getattr(module, rest) // groups)
        if groups > 1:
            groups = _groups(groups, before // groups, leading)
        return {lead: len(leading), rest: per_group * groups, "groups": groups}
    if isinstance(module, nn.Linear):
        return {
            "out_features": now("weight", 0, module.out_features),
            "in_features": now("weight", 1, module.in_features),
        }
    if isinstance(module, nn.GroupNorm):
        size = now("weight", 0, module.num_channels)
        per_group = module.num_channels // module.num_groups
        return {"num_channels": size, "num_groups": max(1, size // per_group) if size else 0}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        sizes = tuple(
            now("weight", axis, size) for axis, size in enumerate(module.normalized_shape)
        )
        return {"normalized_shape": sizes}
    if isinstance(module, (batchnorm._BatchNorm, instancenorm._InstanceNorm)):
        tensor = "weight" if module.affine else "running_mean"
        return {"num_features": now(tensor, 0, module.num_features)}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": now("weight", 0, module.num_parameters)}
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return {"embedding_dim": now("weight", 1, module.embedding_dim)}
    return {}


def _groups(groups: int, width: int, kept: list[int]) -> int:
    """How many convolution groups are left: whole ones go, or the same columns of each."""
    left = set(kept)
    whole = all(
        len({index in left for index in range(g * width, (g + 1) * width)}) == 1
        for g in range(groups)
    )
    return len(kept) // width if whole else groups


def _meets_nothing(path: str, graph: Graph, alive: Tensor) -> bool:
    """True if, in one of its calls, all that this module puts out are channels that go."""
    for value in (out for op in graph.ops_in(path) for out in op.outs):
        layers = graph.values.get(value, [])
        if layers and not any(bool(stays(units, alive).any()) for units in layers):
            return True
    return False


def _incoming(path: str, graph: Graph, alive: Tensor) -> int | None:
    """How many channels still reach a module, or None if it is given no open ones."""
    for op in graph.ops_in(path):
        for value in op.inputs():
            for units in graph.values.get(value, []) if len(value.shape) > 1 else []:
                if units.dim() > 1 and units.shape[1] > 1:
                    return int(stays(units, alive).sum())
    return None


def apply(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Carry out a recipe on this model, in place."""
    bake(model, recipe.computed)
    check_shapes(model, recipe.shapes, OTHER_MODEL)
    replaced = _pieces(model, recipe)
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None and id(tensor) in replaced:
                    table[key] = replaced[id(tensor)]  # type: ignore[assignment]
    return _reform(model, recipe)


def cut_copy(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A smaller copy of a model."""
    check_shapes(model, recipe.shapes, OTHER_MODEL)
    return _reform(copied(model, dict(_pieces(model, recipe))), recipe)


def mock_copy(model: nn.Module, recipe: Recipe, *, values: bool) -> nn.Module:
    """A smaller copy to try out: what is not cut is shared, weights without values if need be."""
    memo: dict[int, Any] = {id(tensor): tensor for _, tensor in named_tensors(model)}
    memo |= _pieces(model, recipe, _sliced if values else _sized)
    for module in model.modules():  # tables of hooks, most of them empty, are slow to copy
        memo |= {id(t): type(t)() for t in vars(module).values() if isinstance(t, dict) and not t}
    return _reform(copied(model, memo), recipe)


def _pieces(
    model: nn.Module, recipe: Recipe, cut: Callable[..., Tensor] | None = None
) -> dict[int, Tensor]:
    """The id of every tensor that is cut, and what is left of it."""
    tensors, cut = dict(named_tensors(model)), cut or _sliced
    return {id(tensors[name]): cut(tensors[name], axes) for name, axes in recipe.slices.items()}


def _reform(model: nn.Module, recipe: Recipe) -> nn.Module:
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
    for path in sorted({*recipe.rewired, *recipe.vanished}, reverse=True):  # the root comes last
        _remake(model.get_submodule(path), recipe.rewired.get(path), recipe.vanished.get(path, []))
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


def _remake(module: nn.Module, graphs: dict[str, Any] | None, edits: list[Edit]) -> None:
    """Give a module a forward with other numbers, and without branches that are closed."""
    if graphs is None:
        graph = write_down(module)
        assert graph is not None, "written into the recipe, so it can be written as a graph"
        gone = take_out(graph, edits)
        with_method(module, compiled(graph))
    else:
        emission = decode(graphs)
        gone = set().union(*(take_out(graph, edits) for graph in emission.graphs.values()))
        with_forward(module, emission)
    for path in gone:
        parent, _, name = path.rpartition(".")
        delattr(module.get_submodule(parent), name)


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
    bake(expose(model, graph.inline), graph.computed)
    tensors = dict(named_tensors(model))
    weigh(model, graph, lambda units: Fixed(weight_of(spread(gates, units, 0, 1))))
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
    model = copied(model)
    bake(model, [name for name, _, _, parts in parametrized(model) if is_gated(parts)])
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
