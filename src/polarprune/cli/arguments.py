"""Arguments that several commands share: a factory for the model, and shapes of its inputs."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from ..errors import PruneError

ModelArgument = Annotated[
    str, typer.Argument(help="package.module:factory, a callable that returns the model")
]
ShapeOptions = Annotated[
    list[str],
    typer.Option("--shape", help="shape of an input: 1,3,224,224 or, with a type, 1,16:int64"),
]


def model_from(factory: str) -> nn.Module:
    """Return the model that `package.module:factory` makes.

    The current folder is searched for the module, too.

    Raises:
        PruneError: If the module cannot be imported, or the factory fails.
    """
    sys.path.insert(0, "")
    path, _, name = factory.partition(":")
    if not path or not name:
        raise PruneError(f"{factory}: give package.module:factory, as torchvision.models:resnet18.")
    try:
        model = getattr(importlib.import_module(path), name)()
    except Exception as error:  # the user's code may raise anything
        raise PruneError(
            f"{factory}: the model could not be made: {error!r}. Give package.module:factory."
        ) from error
    if not isinstance(model, nn.Module):
        raise PruneError(f"{factory}: it returned a {type(model).__name__}; give a model factory.")
    return model


def inputs_from(shapes: list[str]) -> tuple[Tensor, ...]:
    """Return an example input for each shape.

    Raises:
        PruneError: If a text is not a shape.
    """
    return tuple(_input(text) for text in shapes)


def _input(text: str) -> Tensor:
    """Return random numbers; for an integer type zeros and ones, which can serve as indices."""
    sizes, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        shape = [int(size) for size in sizes.split(",")]
        if min(shape) < 1 or not isinstance(dtype, torch.dtype):
            raise ValueError(text)
        if dtype.is_floating_point:
            return torch.randn(shape, dtype=dtype)
        return torch.randint(0, 2, shape).to(dtype)
    except (ValueError, RuntimeError) as error:
        raise PruneError(
            f"--shape {text}: give sizes, as 1,3,224,224, or with a type, as 1,16:int64."
        ) from error
