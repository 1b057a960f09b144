"""The checksum of a file: finds damage, but not forgery, because it has no key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

BLANK = "0" * 64  # stands in the metadata while the checksum is computed


def signed(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the metadata with the checksum in place of the first `BLANK`."""
    return text.replace(BLANK, _checksum(text, tensors), 1)


def is_intact(text: str, stated: object, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the stated checksum is that of the metadata and the tensors."""
    if type(stated) is not str or len(stated) != len(BLANK):
        return False
    return _checksum(text.replace(stated, BLANK, 1), tensors) == stated


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Hash the metadata and the names, types, shapes and bytes of all tensors."""
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
