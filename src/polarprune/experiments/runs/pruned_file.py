"""`rebuild`: a pruned network from the file that a run wrote; `widths_in`: its widths alone."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ...errors import PruneError
from ...files.model_file import load, read_card
from ...integrations.factories import make_model, of_package
from ...plain_data import JsonObject
from ..networks.table import NETWORKS, make_network
from .files import read_json

COST_NUMBERS = ("macs", "macs_share", "params", "params_share")


def original(file: Path, model: str = "") -> nn.Module:
    """Return the unpruned network of a file, with new weights.

    A file never chooses code to run: its card may name a network of polarprune, timm or
    torchvision, but a factory of the user's own has to be given.

    Args:
        file: A file that `Run` or `save` wrote.
        model: The user's own factory, as `factories.make_model` takes it.

    Raises:
        PruneError: The card names no known network, and no factory is given.
    """
    card = read_card(file)
    network, classes = card.get("network"), card.get("classes")
    if model:
        return make_model(model, classes if type(classes) is int else None)
    if not isinstance(network, str) or not (network in NETWORKS or of_package(network)):
        raise PruneError(
            f"{file}: unknown network; pass --model package.module:factory (its card names the "
            f"network {network!r}, which is not one of {', '.join(NETWORKS)})."
        )
    return make_network(network, classes if type(classes) is int else None)


def rebuild(file: Path, model: str = "") -> tuple[nn.Module, JsonObject]:
    """Return the network in a file that `Run` wrote, and its card.

    Args:
        file: The file.
        model: See `original`.

    Raises:
        PruneError: The network is not known, or the card lacks its cost.
    """
    card, unpruned = read_card(file), original(file, model)
    network = card["network"] = card.get("network") or model
    missing = [key for key in COST_NUMBERS if type(card.get(key)) not in (int, float)]
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
    return load(file, model=unpruned), card


def widths_in(file: Path) -> JsonObject:
    """Return the widths of a pruned network: group name -> width and original width.

    Args:
        file: The `card.json` of a run, or a model that `Run` wrote.

    Raises:
        PruneError: The file holds no such widths.
    """
    card = read_json(file) if file.suffix == ".json" else read_card(file)
    widths = card.get("widths")
    if not isinstance(widths, dict) or not all(map(_is_pair, widths.values())):
        raise PruneError(
            f"--shapes {file}: it holds no widths. Give the card.json or the small.safetensors of "
            f"a run that pruned this network."
        )
    return dict(widths)


def _is_pair(found: object) -> bool:
    if not isinstance(found, list) or [type(number) for number in found] != [int, int]:
        return False
    return bool(0 <= found[0] <= found[1])
