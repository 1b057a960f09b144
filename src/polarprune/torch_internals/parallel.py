"""What torch's wrappers for several processes (DDP, FSDP2) do not offer and polarprune needs.

`DistributedDataParallel` (DDP) does not notice that parameters changed their shape, and a module
cannot leave `fully_shard` (FSDP2) or be parametrized after it. The functions below add this. FSDP2
takes a second to import, so this module uses it only after the user has imported it.
"""

from __future__ import annotations

import copy
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from .class_swaps import set_class

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

_FSDP = "torch.distributed.fsdp"
_SIMPLE_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_KEPT = ("__dict__", "__weakref__", "__doc__", "__module__")
Hooks = TypeVar("Hooks", bound=dict[int, Callable[..., object]])


def in_group() -> bool:
    """Return whether this process is in a process group, even as its only member."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def several_processes() -> bool:
    """Return whether this process is in a process group with other processes."""
    return in_group() and torch.distributed.get_world_size() > 1


def only_makes_state(optimizer: Optimizer) -> bool:
    """Return whether a step moved nothing, because all rates and all gradients are zero.

    `torch.distributed.checkpoint` takes such a step before it reads or loads an optimizer's state.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    if any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates) or any(rates):
        return False
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return all(p.grad is not None and not bool(p.grad.any()) for p in held)


# --- DistributedDataParallel ----------------------------------------------------------------------


def wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP modules that hold this model.

    The model does not know its wrapper, so all objects are searched: a tenth of a second.
    """
    if not in_group():
        return []
    found = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    return [one for one in found if any(inner is model for inner in one.modules())]


def why_not_rewrapped(wrapper: DistributedDataParallel) -> str | None:
    """Return why `rewrap` cannot be used with a wrapper, or None if it can."""
    if wrapper.mixed_precision is not None:
        return "it has mixed_precision"
    if getattr(wrapper, "_use_python_reducer", False) or wrapper._delay_all_reduce_params:
        return "it does not reduce gradients in the usual way"
    for hook, _ in wrapper._comm_hooks:
        simple = getattr(hook, "__module__", "") == _SIMPLE_HOOKS
        if not simple or "<locals>" in getattr(hook, "__qualname__", ""):  # wraps another
            return "its communication hook may keep buffers of the old shapes"
    return None


def rewrap(wrapper: DistributedDataParallel) -> None:
    """Let a DDP module reduce the gradients of parameters whose shapes have changed, in place.

    The buckets for gradients live in its reducer, which is built as after unpickling.
    """
    state = dict(vars(wrapper))
    for key in ("reducer", "logger"):
        del state[key]
        delattr(wrapper, key)  # which removes the old reducer's hooks on the gradients
    ignored = wrapper.parameters_to_ignore
    named = wrapper.module.named_parameters()
    state["_module_parameters"] = [one for name, one in named if name not in ignored]
    state["_has_rebuilt_buckets"] = False
    state["_static_graph_delay_allreduce_enqueued"] = False  # the graph has changed
    wrapper.__setstate__(state)
    for hook, given in wrapper._comm_hooks:
        cast(Any, torch.distributed)._register_comm_hook(wrapper.reducer, given, hook)


# --- DTensor and fully_shard ----------------------------------------------------------------------


def is_distributed(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is spread over several processes."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(tensor: DTensor) -> bool:
    """Return whether `fully_shard` may have spread a tensor: it cuts along the last mesh axis."""
    *before, last = tensor.placements
    return last.is_shard() and len(before) < 2 and all(one.is_replicate() for one in before)


def fsdp() -> ModuleType | None:
    """Return the module that has `fully_shard`, or None if it cannot have been called."""
    return sys.modules.get(_FSDP)


def is_wrapped_by_fsdp1(model: nn.Module) -> bool:
    """Return whether a model is in the older wrapper, `FullyShardedDataParallel`."""
    module = fsdp()
    return module is not None and isinstance(model, module.FullyShardedDataParallel)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of a model to which `fully_shard` was applied."""
    module = fsdp()
    return (
        [] if module is None else [m for m in model.modules() if isinstance(m, module.FSDPModule)]
    )


def skip_in_fully_shard(module: nn.Module) -> None:
    """Let later calls of `fully_shard` on a parent leave this module alone.

    Many layers share one gate, and FSDP2 refuses a parameter that is in several of its groups. It
    leaves out modules that are marked as handled by `replicate`, as done here.
    """
    contract = importlib.import_module("torch.distributed._composable.contract")
    vars(module).setdefault(contract.REGISTRY_KEY, {})["replicate"] = None


def shard_together(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Apply `fully_shard` to modules that `skip_in_fully_shard` was called for, as one group."""
    contract = importlib.import_module("torch.distributed._composable.contract")
    for module in modules:
        vars(module).get(contract.REGISTRY_KEY, {}).pop("replicate", None)
    sys.modules[_FSDP].fully_shard(list(modules), mesh=mesh, reshard_after_forward=False)


def has_root(module: FSDPModule) -> bool:
    """Return whether the module has an FSDP2 root: a parent with `fully_shard` that has run."""
    return module._get_fsdp_state()._is_root is False


def follow_parametrizations(model: nn.Module) -> None:
    """Tell FSDP2 where to find weights that were parametrized after `fully_shard`.

    FSDP2 replaces a parameter by module and name, and `register_parametrization` moves it.
    """
    for module in sharded_modules(model):
        state = module._get_fsdp_state()
        one = getattr(state, "_fsdp_param_group", None)  # the only one in older versions of torch
        for group in getattr(state, "_fsdp_param_groups", [one] if one else []):
            for param in group.fsdp_params:
                info = param._module_info
                info.module, info.param_name = _moved(info.module, info.param_name)
                both = [
                    _moved(*one)
                    for one in zip(info.shared_modules, info.shared_param_names, strict=True)
                ]
                info.shared_modules = [one for one, _ in both]
                info.shared_param_names = [name for _, name in both]


def _moved(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return where a parameter of a module is now, after a parametrization."""
    if name in module._parameters or not parametrize.is_parametrized(module, name):
        return module, name
    return cast(ParametrizationList, cast(nn.ModuleDict, module.parametrizations)[name]), "original"


@contextmanager
def without_fully_shard(model: nn.Module) -> Iterator[None]:
    """Context manager: give the modules their own classes back, without FSDP2's hooks.

    Inside, they can be copied, which FSDP2 forbids. Parameters stay sharded.
    """
    before = [(module, type(module), dict(vars(module))) for module in model.modules()]
    try:
        for module, family, own in before:
            set_class(module, _own_class(family))
            vars(module).update({k: _unhooked(own[k]) for k in own if k.endswith("_hooks")})
            for key in [key for key in own if key.startswith(_MARKS)]:
                del vars(module)[key]
        yield
    finally:
        for module, family, own in before:
            set_class(module, family)
            vars(module).clear()
            vars(module).update(own)


_MARKS = ("__composable_api_", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


def _own_class(family: type[nn.Module]) -> type[nn.Module]:
    """Return the class without FSDP2's methods; the class of parametrizations may be above it."""
    base = cast(ModuleType, fsdp()).FSDPModule
    if not issubclass(family, base):
        return family
    if family.__bases__[0] is base:
        return family.__bases__[1]
    members = {key: value for key, value in vars(family).items() if key not in _KEPT}
    members.setdefault("__deepcopy__", _deepcopy)  # FSDP2 replaced the one of parametrized modules
    return type(family.__name__, tuple(map(_own_class, family.__bases__)), members)


def _deepcopy(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    new = type(module).__new__(type(module))
    memo[id(module)] = new
    vars(new).update(copy.deepcopy(vars(module), memo))
    return new


def _unhooked(table: Hooks) -> Hooks:
    """Return a copy of a table of hooks without those of FSDP2."""
    kept = [(key, value) for key, value in table.items() if not _is_of_fsdp(value)]
    return table if len(kept) == len(table) else type(table)(kept)


def _is_of_fsdp(hook: Callable[..., object]) -> bool:
    inner = getattr(hook, "hook", hook)  # hooks on state dicts are wrapped
    return (getattr(inner, "__module__", None) or "").startswith(_FSDP) and callable(inner)
