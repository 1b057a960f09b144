"""Check models and example inputs before a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..errors import PruneError
from ..torch_internals.markers import is_compiled, is_offloaded
from ..torch_internals.parallel import (
    is_distributed,
    is_sharded,
    is_wrapped_by_fsdp1,
    sharded_modules,
)


def check_model(model: object, has_gates: Callable[[nn.Module], bool]) -> None:
    """Refuse models that cannot be traced: wrapped, compiled, lazy and gated ones.

    Args:
        model: What the user gave.
        has_gates: Returns True for a model that has gates already.

    Raises:
        PruneError: The message says what to pass instead.
    """
    check_is_model(model)
    assert isinstance(model, nn.Module)
    if torch.is_inference_mode_enabled():
        raise PruneError(
            "torch.inference_mode() is on, in which no operation can be followed: call this "
            "outside of it."
        )
    _check_not_wrapped(model)
    if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise PruneError(
            "the model has lazy modules without weights: run it once on an example first."
        )
    if has_gates(model):
        raise PruneError(
            "the model has gates already: use the Pruner that put them there, or start from a "
            "fresh model."
        )


def check_is_model(model: object) -> None:
    """Refuse anything that is not a module."""
    if not isinstance(model, nn.Module):
        raise PruneError(f"the model is a {type(model).__name__}; give a torch.nn.Module.")


def _check_not_wrapped(model: nn.Module) -> None:
    """Refuse compiled and parallel models: gates are installed first, wrappers come after."""
    name = type(model).__name__
    compiled = [path for path, module in model.named_modules() if is_compiled(module)]
    if compiled:
        raise PruneError(
            f"{compiled[0] or 'the model'} is compiled: give polarprune the plain model first, and "
            f"call torch.compile on it afterwards."
        )
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise PruneError(
            f"the model is wrapped in {name}: give polarprune the plain model (model.module) "
            f"first, and wrap it afterwards."
        )
    if is_wrapped_by_fsdp1(model):
        raise PruneError(
            f"the model is wrapped in {name}: use torch.distributed.fsdp.fully_shard (FSDP2) "
            f"instead, before or after the Pruner is built."
        )
    check_not_tensor_parallel(model)
    _check_one_device(model)
    if sharded_modules(model):
        raise PruneError(
            "the model is sharded by fully_shard: trace the plain model before that. (A Pruner "
            "accepts a sharded model.)"
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise PruneError(f"the model is a {name}, compiled to TorchScript: give the plain model.")


def _check_one_device(model: nn.Module) -> None:
    """Refuse weights that accelerate loads while a module runs, and weights on several devices."""
    for path, module in model.named_modules():
        if is_offloaded(module):
            raise PruneError(
                f"the weights of {path or 'the model'} are offloaded by accelerate, which loads "
                f"them only while the module runs: no gate can reach them. Load the model onto one "
                f"device, for example with device_map={{'': 0}}, without offloading."
            )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise PruneError(
            f"the model is spread over {', '.join(devices)}: load it onto one device, for "
            f"example with device_map={{'': 0}}; for several GPUs, use "
            f"fully_shard or DistributedDataParallel."
        )


def check_not_tensor_parallel(model: nn.Module) -> None:
    """Refuse weights that something other than `fully_shard` spreads over processes."""
    for path, module in model.named_modules():
        for leaf, tensor in module._parameters.items():
            if tensor is not None and is_distributed(tensor) and not is_sharded(tensor):
                raise PruneError(
                    f"{path}.{leaf} is spread over processes as {tensor.placements}, not by "
                    f"fully_shard alone. Channels of tensor-parallel layers (parallelize_module) "
                    f"cannot be pruned: train with DistributedDataParallel or fully_shard, and "
                    f"parallelize the exported model."
                )
    spread = [name for name, one in model.named_parameters() if is_distributed(one)]
    if spread and not sharded_modules(model):
        raise PruneError(
            f"{spread[0]} is spread over processes, but fully_shard was not applied to this model: "
            f"give the Pruner the model that fully_shard was applied to. Tensor-parallel layers "
            f"(parallelize_module) cannot be pruned; parallelize the exported model instead."
        )


def check_example(arguments: Iterable[object], device: torch.device | None) -> None:
    """Refuse example inputs that are empty or not on the model's device.

    Args:
        arguments: The arguments of the call; only tensors among them are checked.
        device: The device of the model, or None if it has no tensors.

    Raises:
        PruneError: The message says what to do.
    """
    for value in arguments:
        if isinstance(value, Tensor) and not value.numel():
            raise PruneError("the example inputs are empty: give at least one example of each.")
        if isinstance(value, Tensor) and device is not None and value.device != device:
            raise PruneError(
                f"the example inputs are on {value.device}, the model is on {device}: move the "
                f"example to the model's device."
            )
