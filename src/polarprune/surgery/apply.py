"""`shrink`: carry out a recipe on a copy of a model, so that its layers become narrower.

Nothing is decided here: `write_recipe` has made every decision. A Conv2d becomes narrower in two
steps: its weight is copied with the kept indices only, and its attributes are set to the new
numbers of channels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ..channels.graph import Graph, Plan, module_of
from ..rewriting.forward_weights import without_computed_weights
from ..rewriting.installed_forward import with_forward
from ..rewriting.stored_graphs import decode
from ..rewriting.weighted_norms import unweigh
from ..torch_internals.fused_encoders import may_fuse, set_packing, stop_fused_kernel
from ..torch_internals.markers import attach_recipe
from ..tracing.copying import copy_model
from ..tracing.model_state import named_tensors
from ..validation.run import check_graph, check_minimum
from .config_proof import update_config
from .recipe import OTHER_MODEL, Recipe, check_shapes
from .replacement_layers import Constant, PrunedAttention, ZeroChannelSafe
from .write_recipe import write_recipe

Axes = Mapping[str, list[int]]  # axis, as a string -> kept indices


def shrink(model: nn.Module, graph: Graph, plan: Plan) -> nn.Module:
    """Return a smaller copy of `model` that has only the planned channels.

    `model` itself is not changed. Any method may choose the channels. Nothing is compared: choose
    channels whose removal the model tolerates, or use `Pruner`, which learns which ones to remove
    and proves its result equal to the trained model.

    Args:
        model: The model to cut, not wrapped in `DataParallel` or compiled.
        graph: What `polarprune.trace(model, example)` returned for this model.
        plan: Group name -> indices of the channels to keep, in any order. Groups that the plan
            does not name keep all their channels. `graph.prunable` lists the groups.

    Returns:
        A copy of `model`, of the same class, with smaller layers. Layers that have nothing left to
        compute are replaced; `polarprune.save` stores the copy.

    Raises:
        PruneError: If `graph` belongs to another model, if `plan` names an unknown group or an
            index out of range, or if it keeps fewer channels of a group than `group.minimum`.

    Example:
        >>> import torch
        >>> import polarprune as pp
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        ... )
        >>> graph = pp.trace(model, torch.randn(1, 4))
        >>> pp.shrink(model, graph, {"0": [1, 5, 6]})
        Sequential(
          (0): Linear(in_features=4, out_features=3, bias=True)
          (1): ReLU()
          (2): Linear(in_features=3, out_features=2, bias=True)
        )
    """
    check_graph("shrink", model, graph, Graph)
    check_minimum(graph, graph.kept_units(plan))
    warn_of_hooks(model)
    model = without_computed_weights(model, graph.forward_weights)
    small = cut_copy(model, write_recipe(model, graph, plan))
    update_config(small, None)
    return small


def warn_of_hooks(model: nn.Module) -> None:
    """Warn about hooks on parameters: torch does not copy them, and they may not fit the copy."""
    tables = ("_backward_hooks", "_post_accumulate_grad_hooks")
    names = [name for name, p in model.named_parameters() if any(getattr(p, t, 0) for t in tables)]
    if names:
        warnings.warn(
            f"{names[0]} (and {len(names) - 1} more) has hooks on its gradient, which the smaller "
            f"model does not have. Register them there before you train it.",
            stacklevel=3,
        )


def cut_copy(model: nn.Module, recipe: Recipe, *, from_file: bool = False) -> nn.Module:
    """Return the smaller copy of `model` that the recipe describes.

    `from_file`: the code in the recipe was read from a file, so it runs with limits on memory.
    """
    check_shapes(model, recipe.shapes, OTHER_MODEL)
    small = copy_model(model, dict(_cut_tensors(model, recipe, _sliced)))
    return _change_modules(small, recipe, from_file=from_file)


def mock_copy(model: nn.Module, recipe: Recipe, *, values: bool) -> nn.Module:
    """Return a smaller copy for a trial: it shares all tensors that are not cut.

    Without `values`, the tensors that are cut have the right shape and arbitrary values.
    """
    memo: dict[int, object] = {id(tensor): tensor for _, tensor in named_tensors(model)}
    memo |= _cut_tensors(model, recipe, _sliced if values else _sized)
    return _change_modules(copy_model(model, memo), recipe)


def select_kept(data: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    """Return a copy with the kept indices of each axis, in the memory format of `data`.

    Convolutions choose their output's memory format by that of their weight.
    """
    form = _memory_format(data)
    for axis, indices in kept.items():
        data = data.index_select(axis, indices.to(data.device))
    return data.clone(memory_format=form)


def _cut_tensors(
    model: nn.Module, recipe: Recipe, cut: Callable[[Tensor, Axes], Tensor]
) -> dict[int, Tensor]:
    """Map the id of every tensor with slices to the smaller tensor, as a memo for `deepcopy`."""
    tensors = dict(named_tensors(model))
    return {id(tensors[name]): cut(tensors[name], axes) for name, axes in recipe.slices.items()}


def _sliced(tensor: Tensor, axes: Axes) -> Tensor:
    """Return the kept part of a tensor; a parameter gives a parameter."""
    kept = {int(axis): torch.tensor(left, dtype=torch.long) for axis, left in axes.items()}
    return _like(tensor, select_kept(tensor.detach(), kept))


def _sized(tensor: Tensor, axes: Axes) -> Tensor:
    """Return an uninitialised tensor of the new shape; integers are copied, as they may index."""
    if not (tensor.is_floating_point() and tensor.is_contiguous()):
        return _sliced(tensor, axes)
    shape = [len(axes.get(str(axis), range(size))) for axis, size in enumerate(tensor.shape)]
    return _like(tensor, tensor.detach().new_empty(shape))


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    """Wrap `data` in a parameter if `tensor` is one."""
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _memory_format(data: Tensor) -> torch.memory_format:
    """Return the memory format, according to the strides.

    `is_contiguous` cannot tell, because a 1 x 1 kernel is contiguous in both formats.
    """
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(data.dim())
    if form is None:
        return torch.contiguous_format
    last = torch.empty(data.shape, device="meta", memory_format=form).stride()
    return form if data.stride() == last else torch.contiguous_format


def _change_modules(model: nn.Module, recipe: Recipe, *, from_file: bool = False) -> nn.Module:
    """Carry out everything in a recipe except the slices, in place."""
    unweigh(model)
    _delete_unread(model, recipe)
    for path, attributes in recipe.attributes.items():
        for key, value in attributes.items():  # JSON has lists where torch has tuples
            new = tuple(value) if isinstance(value, list) else value
            # Not by setattr, which a module with a rewritten forward refuses.
            vars(model.get_submodule(path))[key] = new
    _replace(model, recipe.heads, lambda old, path: PrunedAttention(old, recipe.heads[path]))
    _replace(model, recipe.constants, lambda old, _: Constant(old))
    _replace(model, recipe.identities, lambda *_: nn.Identity())
    _replace(model, recipe.hollow, lambda old, _: ZeroChannelSafe(old))
    _install_rewritten_forwards(model, recipe, from_file)
    leave_fused_path(model)
    attach_recipe(model, recipe.to_json())
    return model


def _delete_unread(model: nn.Module, recipe: Recipe) -> None:
    """Delete the tensors from which layers computed their weights."""
    for name in recipe.unread:
        owner, leaf = model.get_submodule(module_of(name)), name.rpartition(".")[2]
        if hasattr(owner, leaf):
            delattr(owner, leaf)


def _replace(
    model: nn.Module, paths: Iterable[str], make: Callable[[nn.Module, str], nn.Module]
) -> None:
    """Put `make(old module, path)` in every place where the model holds the module at a path."""
    made: dict[nn.Module | None, nn.Module] = {}
    for path in paths:
        old = model.get_submodule(path)
        made[old] = make(old, path).train(old.training)
    for module in list(model.modules()) if made else []:
        for key, child in module._modules.items():
            if child in made:
                module._modules[key] = made[child]


def _install_rewritten_forwards(model: nn.Module, recipe: Recipe, from_file: bool) -> None:
    """Install rewritten forwards and delete the child modules that they no longer call."""
    for path in sorted(recipe.rewired, reverse=True):  # children first, the root last
        code = decode(recipe.rewired[path])
        module = with_forward(model.get_submodule(path), code, path=path, from_file=from_file)
        for child in recipe.removed.get(path, []):
            parent, _, name = child.rpartition(".")
            delattr(module.get_submodule(parent), name)


def leave_fused_path(model: nn.Module) -> None:
    """Turn off the fused path of torch's encoders (eval mode) where it meets replaced modules."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            parts = (module.linear1, module.linear2)
            ours = not isinstance(module.self_attn, nn.MultiheadAttention)
            if ours or any(isinstance(part, Constant) for part in parts):
                stop_fused_kernel(module)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            layers = [x for x in module.layers if isinstance(x, nn.TransformerEncoderLayer)]
            if not all(map(may_fuse, layers)):
                set_packing(module, False)
