"""Build models from configs without memory for their weights, or with those of another model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..torch_internals.markers import class_origin
from ..tracing.model_state import Args, Kwargs
from .repeatable_runs import TorchFunction

Config = Any  # an object of another library


# By name, because transformers replaces the functions of `torch.nn.init` while it builds a model.
_INITIALIZERS = {name for name in dir(nn.init) if name.endswith("_") and name[0] != "_"} | {
    "fill_",
    "zero_",
}


class _WithoutWeights(TorchFunctionMode):
    """Allocate no memory for weights, which layers create with `torch.empty`, unlike constants."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run one function of torch; `torch.empty` on the meta device, and no initializers there.

        torch takes long to draw random numbers on the meta device.
        """
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _INITIALIZERS:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
        return func(*args, **({**kwargs, "device": "meta"} if func is torch.empty else kwargs))


def plain_class(model: nn.Module) -> type[nn.Module]:
    """Return the user's class of a model, also if its forward was rewritten."""
    return next(family for family in type(model).__mro__ if class_origin(family) is None)


def without_weights(family: type[nn.Module], config: Config) -> nn.Module:
    """Build a model from a config, with its constants but without memory for its weights."""
    with torch.random.fork_rng(devices=[]), _WithoutWeights():
        return family(config)


def with_weights_of(model: nn.Module, config: Config) -> nn.Module:
    """Build a model of the same class from another config; it shares the tensors of `model`.

    Raises:
        RuntimeError: If the tensors do not fit.
    """
    new = without_weights(plain_class(model), config)
    new.load_state_dict(model.state_dict(), assign=True)
    convert_constants(new, model)
    return new.train(model.training)


def convert_constants(model: nn.Module, like: nn.Module) -> None:
    """Convert the buffers of a model to the devices and dtypes of those of another one, in place.

    `like.to(torch.bfloat16)` converts them, but a model that is built again has the original
    dtypes.
    """
    twins = dict(like.named_buffers())
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            twin = twins.get(f"{path}.{name}" if path else name)
            if buffer is not None and twin is not None:
                module._buffers[name] = buffer.to(twin.device, twin.dtype)
