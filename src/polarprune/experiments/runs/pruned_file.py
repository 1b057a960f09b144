"""`rebuild`: a pruned network from the file that a run wrote."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ...errors import PruneError
from ...files.model_file import load, read_card
from ..networks.table import NETWORKS
from .files import Json

_NUMBERS = ("macs", "macs_share", "params", "params_share")


def rebuild(file: Path) -> tuple[nn.Module, Json]:
    """Return the network in a file that `Run` wrote, and its card.

    Raises:
        PruneError: The card names no known network, or lacks its cost.
    """
    card = read_card(file)
    network = card.get("network")
    if not isinstance(network, str) or network not in NETWORKS:
        raise PruneError(
            f"{file}: its card names the network {network!r}, which is not one of "
            f"{', '.join(NETWORKS)}. Load it with polarprune.load(file, model=...)."
        )
    missing = [key for key in _NUMBERS if type(card.get(key)) not in (int, float)]
    if missing:
        raise PruneError(
            f"{file}: its card has no number {missing[0]!r}. Load it with "
            f"polarprune.load(file, model=...), or train it again."
        )
    if network == "mobilenetv2" and card["macs"] < 1e8 * card["macs_share"]:
        raise PruneError(  # the weights of both networks have the same shapes
            f"{file}: its network is now called 'mobilenetv2_88m'. Load it with polarprune.load("
            f"file, model=polarprune.experiments.networks.small_images.mobilenetv2_88m())."
        )
    return load(file, model=NETWORKS[network]()), card
