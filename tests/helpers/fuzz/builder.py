"""Makes a model from a program, and inputs of the example's size and of other sizes."""

from __future__ import annotations

import linecache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import Program, Shape, write

Inputs = tuple[Tensor, ...]


def build(program: Program) -> nn.Module:
    return make(write(program)[0], program.seed)


def make(source: str, seed: int = 0) -> nn.Module:
    """Return an instance of the source's `Net` in float64, with weights that hide no error."""
    name = f"<network {seed}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "__name__": "network"}
    exec(compile(source, name, "exec"), space)
    torch.manual_seed(seed)
    model: nn.Module = space["Net"]()
    return lively(model).double()


def lively(model: nn.Module) -> nn.Module:
    """Move biases, norms and running statistics away from 0 and 1, so that a missing mask shows."""
    for module in model.modules():
        if isinstance(
            module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
        ):
            for key, low, high in (
                ("weight", 0.5, 1.5),
                ("bias", -0.5, 0.5),
                ("running_mean", -0.5, 0.5),
                ("running_var", 0.5, 1.5),
            ):
                if getattr(module, key, None) is not None:
                    nn.init.uniform_(getattr(module, key), low, high)
        elif isinstance(getattr(module, "bias", None), nn.Parameter):
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model


def inputs(program: Program, seed: int, batch: int = 0, more: int = 0) -> Inputs:
    """Return random inputs; `more` is added to heights, widths and lengths."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        _draw(layout, shape, batch or program.batch, more, generator)
        for layout, shape in program.inputs
    )


def _draw(layout: str, shape: Shape, batch: int, more: int, generator: torch.Generator) -> Tensor:
    if layout == "ints":
        return torch.randint(7, (batch, shape[0] + more), generator=generator)
    if layout in ("image", "line"):
        shape = (shape[0], *(size + more for size in shape[1:]))
    elif layout == "seq":
        shape = (shape[0] + more, shape[1])
    return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
