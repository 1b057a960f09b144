"""The models that are shipped are what their cards say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polarprune as pp
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.runs.pruned_file import rebuild
from polarprune.surgery.proof import count_macs

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "zoo").glob("*.safetensors"))
OLD = ROOT / "zoo" / "mobilenetv2_88m-54.safetensors"  # written in version 1 of the format


def test_there_are_models() -> None:
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_model_is_what_its_card_says(file: Path) -> None:
    card = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    assert hashlib.sha256(file.read_bytes()).hexdigest() == card["sha256"]
    model, inside = rebuild(file)
    assert {key: inside[key] for key in inside} == {key: card[key] for key in inside}
    image = torch.zeros(1, 3, 32, 32)
    whole = count_macs(NETWORKS[card["network"]](), image)
    assert count_macs(model.eval(), image) == card["macs"] <= card["budget"]["macs"] * whole
    assert sum(p.numel() for p in model.parameters()) == card["params"]
    log = [json.loads(line) for line in (ROOT / card["log"]).read_text().splitlines()]
    last = [row for row in log if row["stage"] == "prune"][-1]
    assert last["epoch"] == last["epochs"] == card["recipe"]["epochs"]
    before, after = (row["accuracy"] for row in card["table"][1:3])
    assert after == card["accuracy"]
    assert [before, last["accuracy"]] == pytest.approx([after, after], abs=2e-4)  # GPUs round


def test_a_shipped_file_of_version_1_loads_and_is_saved_as_the_newest(tmp_path: Path) -> None:
    content = metadata(OLD)
    assert content["version"] == 1 and "sha256" not in content
    model, _ = rebuild(OLD)
    again = tmp_path / "again.safetensors"
    pp.save(model, again, card=content["card"])
    assert metadata(again)["version"] == 3 and len(metadata(again)["sha256"]) == 64
    image = torch.randn(1, 3, 32, 32)
    loaded = pp.load(again, model=NETWORKS[content["card"]["network"]]())
    assert torch.equal(loaded.eval()(image), model.eval()(image))


def metadata(file: Path) -> dict[str, Any]:
    """The JSON of a file, read without polarprune."""
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found: dict[str, Any] = json.loads(header["__metadata__"]["polarprune"])
    return found


def test_a_file_with_the_old_name_of_a_network_is_refused(tmp_path: Path) -> None:
    model, card = rebuild(OLD)
    old = tmp_path / "old.safetensors"
    pp.save(model, old, card={**card, "network": "mobilenetv2"})
    with pytest.raises(pp.PruneError, match="now called 'mobilenetv2_88m'"):
        rebuild(old)
    image = torch.randn(1, 3, 32, 32)
    again = pp.load(old, model=NETWORKS["mobilenetv2_88m"]())
    assert torch.equal(again.eval()(image), model.eval()(image))


STRANGE: list[dict[str, Any]] = [
    {"network": []},
    {"network": {"a": 1}},
    {"network": 3},
    {"network": "resnet56"},
    {"network": "resnet56", "macs": "many", "macs_share": 1, "params": 1, "params_share": 1},
]


@pytest.mark.parametrize("card", STRANGE, ids=str)
def test_a_card_of_any_form_is_refused_with_one_error(card: dict[str, Any], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = pp.trace(model, torch.zeros(1, 3))
    pp.save(pp.shrink(model, graph, {"0": [1]}), tmp_path / "small.safetensors", card=card)
    with pytest.raises(pp.PruneError, match="its card"):
        rebuild(tmp_path / "small.safetensors")
