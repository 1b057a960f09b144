"""Check models and example inputs before a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..errors import PruneError


def check_model(model: object, has_gates: Callable[[nn.Module], bool]) -> None:
    """Refuse what cannot be traced: wrapped, compiled, lazy and gated models.

    Args:
        model: What the user gave.
        has_gates: Returns True for a model that has gates already.

    Raises:
        PruneError: The message says what to pass instead.
    """
    if not isinstance(model, nn.Module):
        raise PruneError(f"the model is a {type(model).__name__}; give a torch.nn.Module.")
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


def _check_not_wrapped(model: nn.Module) -> None:
    """Refuse compiled and parallel models: gates are installed first, wrappers come after."""
    name = type(model).__name__
    compiled = [path for path, module in model.named_modules() if _is_compiled(module)]
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
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise PruneError(f"the model is a {name}, compiled to TorchScript: give the plain model.")


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


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
