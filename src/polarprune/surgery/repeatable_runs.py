"""Run a model so that the outputs of two models can be compared: without randomness or TF32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..rewriting.parametrizations import settle_weights
from ..torch_internals.patches import full_float32_precision
from ..torch_internals.process_settings import seed_generators
from ..tracing.model_state import Args, Kwargs, named_tensors, restored

TorchFunction = Callable[..., object]


class _NoRandomness(TorchFunctionMode):
    """Switch dropout off, and replace random tensors by constants.

    A fixed seed is not enough: the number of values that dropout and noise draw depends on the
    widths, so the two models would see different random numbers.
    """

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run one function of torch without randomness."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        # A generator of the model's own usually makes a constant, such as a fixed projection.
        if func in _NOISE and kwargs.get("generator") is None:
            return cast(Tensor, func(*args, **kwargs)).fill_(_NOISE[func])
        if func is torch.nn.functional.multi_head_attention_forward:
            kwargs = {**kwargs, "training": False}  # this mode does not see the dropout inside
        if func is torch.nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})}
        return func(*args, **kwargs)


_DROPOUTS: set[TorchFunction] = {
    getattr(space, name)
    for space in (torch.nn.functional, torch)
    for name in (
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "dropout_",
        "feature_alpha_dropout",
        "feature_dropout",
        "native_dropout",
    )
    if hasattr(space, name)
}


_NOISE: dict[TorchFunction, float] = {
    getattr(space, name): value
    for name, value in {
        "rand": 0.75,
        "rand_like": 0.75,
        "uniform_": 0.75,
        "randn": 0.5,
        "randn_like": 0.5,
        "normal_": 0.5,
        "bernoulli": 1.0,
        "bernoulli_": 1.0,
        "exponential_": 0.75,
    }.items()
    for space in (torch, torch.Tensor)
    if hasattr(space, name)
}


@contextmanager
def repeatable(model: nn.Module, training: bool) -> Iterator[None]:
    """Context manager: run the model in one mode, without randomness and in full precision."""
    no_autocast = [torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda")]
    with (
        restored(model, training),
        _NoRandomness(),
        full_float32_precision(),
        no_autocast[0],
        no_autocast[1],
    ):
        seed_generators(0, (x.device for _, x in named_tensors(model) if x.is_cuda))
        settle_weights(model)
        yield
