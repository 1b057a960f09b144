"""The state of a pruner as one tensor of bytes, so that it fits among the tensors of a model.

The bytes are those of a safetensors file: the tensors of the state, and everything else as JSON in
the metadata. They are joined on the device, so that encoding a state does not wait for a GPU.
"""

from __future__ import annotations

import json

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..errors import PruneError
from ..validation.pruner_state import State

_NAME = "polarprune"  # of the plain data in the metadata
_TENSOR = "tensor"  # in the plain data, {"tensor": "3"} stands for the tensor of this name
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def encode(state: State, device: torch.device, least: int = 0) -> Tensor:
    """Return a state as a vector of bytes on a device, with a header of at least `least` bytes."""
    tensors: list[Tensor] = []
    plain = json.dumps(_without_tensors(state, tensors), separators=(",", ":"))
    header: dict[str, object] = {"__metadata__": {_NAME: plain}}
    start = 0
    for name, tensor in enumerate(tensors):
        end = start + tensor.numel() * tensor.element_size()
        form = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[str(name)] = {**form, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode().ljust(least)
    text += b" " * (-len(text) % 8)
    head = torch.frombuffer(
        bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8
    ).to(device)
    data = [tensor.detach().reshape(-1).view(torch.uint8).to(device) for tensor in tensors]
    return torch.cat([head, *data])


def size_of_header(state: State, rows: int) -> int:
    """Return how many bytes the header of a state has at most, at any step of the run."""
    tensors: list[Tensor] = []
    _without_tensors({**state, "history": []}, tensors)
    names = sum(map(len, state["alpha"]))
    fixed = json.dumps([state["settings"], state["schedule"]])
    return len(fixed) + 2 * names + _TENSOR_BYTES * len(tensors) + _ROW_BYTES * rows + _OTHER_BYTES


_TENSOR_BYTES, _ROW_BYTES, _OTHER_BYTES = 160, 768, 4096  # generous, in JSON inside of JSON


def _without_tensors(value: object, tensors: list[Tensor]) -> object:
    """Return plain data with a reference in place of every tensor; append those to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_TENSOR: str(len(tensors) - 1)}
    if isinstance(value, dict):
        return {key: _without_tensors(inner, tensors) for key, inner in value.items()}
    return value


def decode(entry: object) -> object:
    """Return the state that `encode` turned into bytes.

    Raises:
        PruneError: If these are not such bytes.
    """
    if not isinstance(entry, Tensor) or entry.dtype != torch.uint8 or entry.is_meta:
        raise _damaged(f"it is {getattr(entry, 'dtype', type(entry).__name__)}, not bytes")
    try:
        data = bytes(entry.flatten().tolist())
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return _with_tensors(json.loads(header["__metadata__"][_NAME]), load(data))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(repr(error)) from error


def _with_tensors(value: object, tensors: dict[str, Tensor]) -> object:
    """Undo `_without_tensors`."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TENSOR} and isinstance(value[_TENSOR], str):
        return tensors[value[_TENSOR]]
    return {key: _with_tensors(inner, tensors) for key, inner in value.items()}


def _damaged(problem: str) -> PruneError:
    return PruneError(
        f"load_state_dict: the pruner's state in the model's state is damaged: {problem}. Load "
        f"the state dict as model.state_dict() returned it. Nothing was changed."
    )
