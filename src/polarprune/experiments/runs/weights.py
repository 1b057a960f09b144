"""Write state dicts to files, and load all or some of their weights into a network."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ...errors import PruneError
from ...files.writing import replacing, write_tensors


def write_weights(model: nn.Module, file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write the state dict of a model as safetensors, with notes if there are any."""
    tensors = {k: v.cpu().contiguous() for k, v in model.state_dict().items()}
    with replacing(file) as new:
        write_tensors(tensors, new, metadata)


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return the state dict in a safetensors file or a file of `torch.save`."""
    if file.suffix == ".safetensors":
        return load_file(str(file))
    found: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return found


def load_weights(model: nn.Module, file: Path) -> nn.Module:
    """Load all weights of a model from a file, and return the model."""
    try:
        model.load_state_dict(read_weights(file))
    except Exception as error:  # not a file of weights, or those of another network
        reason = str(error).splitlines()[0]
        raise PruneError(f"{file}: not the weights of this network ({reason}).") from error
    return model


def copy_weights(model: nn.Module, source: nn.Module) -> nn.Module:
    """Load all weights of a model from another one, and return the model."""
    model.load_state_dict(source.state_dict())
    return model


def load_initial_weights(model: nn.Module, file: Path) -> None:
    """Load the weights of a file whose names and shapes fit (`--start`)."""
    if not file.exists():
        raise PruneError(f"--start {file}: no such file.")
    try:
        found = read_weights(file)
    except Exception as error:  # neither safetensors nor a file of torch.save
        raise PruneError(f"--start {file}: it holds no weights ({error}).") from error
    load_matching_weights(model, found, f"--start {file}")


def load_matching_weights(model: nn.Module, found: dict[str, Tensor], source: str) -> None:
    """Load weights of the whole network, of a part of it, or of its backbone alone.

    Args:
        model: The network.
        found: A state dict; without the prefix `backbone.` if it is that of the backbone.
        source: Where it is from, for the message.

    Raises:
        PruneError: No name and shape fits.
    """
    own = model.state_dict()
    for prefix in ("", "backbone."):
        named = {prefix + key: value for key, value in found.items()}
        fits = {k: v for k, v in named.items() if k in own and own[k].shape == v.shape}
        if fits:
            model.load_state_dict(fits, strict=False)
            return
    raise PruneError(f"{source}: none of its weights fits this network by name and shape.")
