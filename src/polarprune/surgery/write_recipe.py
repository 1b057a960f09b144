"""Turn a plan into a recipe. Every decision about the smaller model is made here.

`apply` then carries the recipe out and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn
from torch.nn.modules import instancenorm

from ..channels.graph import Graph, Plan, stays
from ..rewriting.remove_branches import owner_of, removable_branches, without_branches
from ..rewriting.resize import resized
from ..rewriting.stored_graphs import decode, encode
from ..rewriting.symbolic_graphs import graphs_cached
from ..tracing.model_state import named_tensors
from .module_sizes import SPATIAL, describe_modules, describe_norm_without_parameters
from .recipe import Recipe, check_shapes

_Norm = nn.GroupNorm | instancenorm._InstanceNorm


def write_recipe(model: nn.Module, graph: Graph, plan: Plan) -> Recipe:
    """Return the recipe that leaves only the planned channels in `model`."""
    return recipe_for(model, graph, graph.without_unread(graph.kept_units(plan)))


def recipe_for(model: nn.Module, graph: Graph, kept_units: Tensor) -> Recipe:
    """Return the recipe that leaves only these units, which `Graph.without_unread` returned."""
    check_shapes(model, graph.shapes, "The graph belongs to another model; trace this one.")
    recipe = write_sizes(model, graph, kept_units)
    _add_rewritten_forwards(graph, kept_units, recipe)
    with graphs_cached():
        _remove_closed_branches(dict(model.named_modules(remove_duplicate=False)), graph, recipe)
    return recipe


def write_sizes(
    model: nn.Module, graph: Graph, kept_units: Tensor, only: Collection[str] | None = None
) -> Recipe:
    """Return a recipe with the slices and the attributes of modules, but without their code.

    Args:
        model: The model to cut.
        graph: What `trace` found.
        kept_units: The units that are left.
        only: The modules whose attributes are wanted; all of them by default.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted = modules if only is None else {path: modules[path] for path in only}
    recipe = Recipe(computed=list(graph.computed))
    _add_slices(model, graph, kept_units, recipe, wanted)
    describe_modules(modules, recipe)
    # A layer whose weight is read but that is never called has no output to replace.
    recipe.constants = [path for path in recipe.constants if graph.ops_in(path)]
    followed = (item for item in graph.size_attributes.items() if item[0] in wanted)
    for path, widths in followed:
        sizes = {name: graph.width(path, width, kept_units) for name, width in widths.items()}
        recipe.attributes.setdefault(path, {}).update(sizes)
    for path, module in wanted.items():
        _describe_by_activations(path, module, graph, kept_units, recipe)
    return recipe


def _add_slices(
    model: nn.Module,
    graph: Graph,
    kept_units: Tensor,
    recipe: Recipe,
    wanted: Mapping[str, nn.Module],
) -> None:
    """Add the kept indices of every axis of these modules' tensors that loses some."""
    tables = [table for one in wanted.values() for table in (one._parameters, one._buffers)]
    held = {id(tensor) for table in tables for tensor in table.values()}
    known: dict[int, list[int]] = {}  # many axes share one vector of units
    for name, tensor in ((k, x) for k, x in named_tensors(model) if id(x) in held):
        for axis, units in graph.axes.get(name, {}).items():
            if id(units) not in known:
                known[id(units)] = stays(units, kept_units).nonzero().flatten().tolist()
            if len(known[id(units)]) < len(units):
                recipe.shapes[name] = list(tensor.shape)
                recipe.slices.setdefault(name, {})[str(axis)] = known[id(units)]


def _describe_by_activations(
    path: str, module: nn.Module, graph: Graph, kept_units: Tensor, recipe: Recipe
) -> None:
    """Add what follows from the widths of a module's inputs and outputs, not from its tensors."""
    if isinstance(module, SPATIAL) and _makes_no_channel(path, graph, kept_units):
        recipe.hollow.append(path)
    elif isinstance(module, _Norm) and not module.affine:
        width = _input_width(path, module, graph, kept_units)
        if width is not None:
            describe_norm_without_parameters(path, module, width, recipe)
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and path in graph.weights:
        shape = _normalized_shape(path, module, graph, kept_units)
        recipe.attributes.setdefault(path, {})["normalized_shape"] = shape
    elif isinstance(module, nn.Unflatten):
        shape = _unflattened_size(path, module, graph, kept_units)
        if shape:
            recipe.attributes[path] = {"unflattened_size": shape}


def _makes_no_channel(path: str, graph: Graph, kept_units: Tensor) -> bool:
    """Return whether all output channels are removed in at least one call of the module."""
    for value in (out for op in graph.ops_in(path) for out in op.outs):
        layers = graph.values.get(value, [])
        if layers and not any(bool(stays(units, kept_units).any()) for units in layers):
            return True
    return False


def _input_width(path: str, module: _Norm, graph: Graph, kept_units: Tensor) -> int | None:
    """Return how many channels still reach the module, or None if none of them is prunable."""
    width = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
    for op in graph.ops_in(path):
        for value in op.inputs():
            if len(value.shape) > 1 and value.shape[1] == width:
                kept = graph.kept(value, 1, kept_units)
                if kept is not None:
                    return int(kept.sum())
    return None


def _normalized_shape(
    path: str, module: nn.LayerNorm | nn.RMSNorm, graph: Graph, kept_units: Tensor
) -> list[int]:
    """Return the trailing sizes of the module's input."""
    source = graph.ops_in(path)[0].inputs()[0]
    shape = graph.shape(source, kept_units) or source.shape
    return list(shape[len(shape) - len(module.normalized_shape) :])


def _unflattened_size(
    path: str, module: nn.Unflatten, graph: Graph, kept_units: Tensor
) -> list[int]:
    """Return the new sizes, or an empty list if none of them changes."""
    out = graph.ops_in(path)[-1].outs[0] if graph.ops_in(path) else None
    shape = graph.shape(out, kept_units) if out is not None else None
    if out is None or shape is None or shape == out.shape:
        return []
    given = tuple(module.unflattened_size)
    start = module.dim % (len(shape) - len(given) + 1)
    left = shape[start : start + len(given)]
    return [-1 if old == -1 else new for old, new in zip(given, left, strict=True)]


def _add_rewritten_forwards(graph: Graph, kept_units: Tensor, recipe: Recipe) -> None:
    """Add the forwards of modules whose code computes a weight or contains widths."""
    for path, computation in graph.forward_weights.items():
        recipe.unread += [f"{path}.{name}" for name in computation.unread]
        if path not in recipe.constants:
            recipe.rewired[path] = encode(computation.captured)
    for path in graph.rewritten:
        graphs = resized(path, graph, kept_units)
        if graphs:
            recipe.rewired[path] = graphs


def _remove_closed_branches(modules: dict[str, nn.Module], graph: Graph, recipe: Recipe) -> None:
    """Rewrite the forwards of modules that call branches whose output no longer depends on x."""
    silent = {path for path in recipe.constants if _has_outputs(path, recipe)}
    for path in dict.fromkeys(owner_of(layer, modules) for layer in sorted(silent)):
        edits = removable_branches(path, modules[path], graph, silent)
        if edits and isinstance(edits, list):
            code = None
            if path in graph.rewritten:  # whether or not the plan changes a number in it
                code = decode(recipe.rewired.get(path, encode(graph.rewritten[path])))
            code, recipe.removed[path] = without_branches(modules[path], code, edits)
            recipe.rewired[path] = encode(code)


def _has_outputs(path: str, recipe: Recipe) -> bool:
    """Return whether a layer still makes channels (which only its bias fills)."""
    sizes = recipe.attributes[path]
    return bool(sizes.get("out_channels", sizes.get("out_features")))
