"""Prepare the start of a training: load initial weights, and check that network and data fit."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import PruneError
from ...integrations.factories import published_model
from ..data.task import Task, evaluating
from ..networks.imagenet import from_torchvision
from ..networks.table import BACKBONES, NETWORKS
from ..settings import Settings
from .weights import copy_weights, load_initial_weights, load_matching_weights


def load_start(model: nn.Module, settings: Settings, start: Path | None) -> bool:
    """Load the initial weights of a baseline, if there are any.

    Args:
        model: The network, which is changed.
        settings: `network` and `pretrained`.
        start: Weights of the network or of a part of it that has the same names.

    Returns:
        Whether the baseline is trained already.
    """
    network, published = settings.network, settings.pretrained
    if start is not None:
        load_initial_weights(model, start)
    elif published and network in BACKBONES:
        part = from_torchvision(BACKBONES[network], published)
        load_matching_weights(model, part.state_dict(), published)
    elif published and is_published(settings):
        copy_weights(model, from_torchvision(network, published))
        return True
    elif published:  # its head may have other classes
        load_matching_weights(model, published_model(network, published).state_dict(), published)
    return False


def is_published(settings: Settings) -> bool:
    """Return whether the baseline is a published network, which is not trained."""
    network = settings.network
    return bool(settings.pretrained) and network in NETWORKS and network not in BACKBONES


def check_network(model: nn.Module, network: str, data: Task) -> None:
    """Refuse a network of the user's own whose outputs do not fit the classes of the data.

    Args:
        model: The network.
        network: Its name; those of `NETWORKS` are not checked.
        data: The data.
    """
    if network in NETWORKS:
        return
    x = data.example()
    try:
        with evaluating(model):
            output = model(x)
    except Exception as error:  # the user's code may raise anything
        raise PruneError(
            f"{network}: it does not run on inputs of shape {tuple(x.shape)}: {error!r}. Give "
            f"data that it accepts; --set crop=SIDE sets the size of photos."
        ) from error
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(x):
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise PruneError(f"{network}: it returns {found}; return logits of shape (batch, classes).")
    if data.classes is not None and output.shape[1] != data.classes:
        raise PruneError(
            f"{network}: it has {output.shape[1]} outputs, but the data has {data.classes} "
            f"classes. Give the factory a parameter num_classes, or as many outputs as classes."
        )
    if not torch.isfinite(output).all():
        raise PruneError(f"{network}: its outputs are not finite. Check its initial weights.")
