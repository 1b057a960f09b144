"""Arguments that several commands share: the name of a model, shapes of its inputs, `--json`."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from torch import Tensor

from ..errors import PruneError
from ..integrations.factories import FORMS

ModelArgument = Annotated[str, typer.Argument(help=FORMS)]
ModelOption = Annotated[str, typer.Option(help=f"the original model, if it is your own: {FORMS}")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, and nothing else on stdout")]
ShapeOptions = Annotated[
    list[str],
    typer.Option("--shape", help="shape of an input: 1,3,224,224 or, with a type, 1,16:int64"),
]


def inputs_from(shapes: list[str]) -> tuple[Tensor, ...]:
    """Return an example input for each shape.

    Raises:
        PruneError: If a text is not a shape.
    """
    return tuple(_input(text) for text in shapes)


def _input(text: str) -> Tensor:
    """Return random numbers; for an integer type zeros and ones, which are valid indices."""
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
            f"--shape {text}: give sizes, such as 1,3,224,224, or with a type, such as 1,16:int64."
        ) from error
