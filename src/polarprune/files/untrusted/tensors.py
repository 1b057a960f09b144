"""Check the tensors of a file: their amount before they are read, and their fit afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import PruneError

_SPARE_NAMES, _SPARE_BYTES = 100, 2**30  # allowed for any model, however small
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_REMEDY = "Give a fresh instance of the class that was pruned."


def check_file_size(path: Path, names: int, model: nn.Module) -> None:
    """Refuse a file that has far more tensors or bytes than a small version of the model."""
    own = [tensor for tensor in model.state_dict().values() if isinstance(tensor, Tensor)]
    most_bytes = _SPARE_BYTES + 64 * sum(tensor.nbytes for tensor in own)
    if names > _SPARE_NAMES + 2 * len(own) or path.stat().st_size > most_bytes:
        raise PruneError(f"load: {path} is far too large for this model. {_REMEDY}")


def check_fit(
    tensors: Mapping[str, Tensor], expected: Mapping[str, object], path: str | Path
) -> None:
    """Check names, shapes and types against the state dict of the small model."""
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if not _fits(tensors[name], expected.get(name))]
    if missing or unexpected:
        raise PruneError(
            f"load: {path} does not fit this model: missing {missing[:3]}, unexpected "
            f"{unexpected[:3]}. {_REMEDY}"
        )


def _fits(found: Tensor, expected: object) -> bool:
    """Return whether a tensor fits the model; only the precision of floats may differ."""
    if not isinstance(expected, Tensor) or found.shape != expected.shape:
        return False
    floats = found.dtype in _FLOATS and expected.dtype in _FLOATS
    return floats or found.dtype == expected.dtype
