"""Every adapter trains to the budget, resumes after an interruption, and exports an equal model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.adapters import EXAMPLE, STEPS, TRAININGS, Training
from tests.helpers.training import same_state, share, snapshot

SETTINGS: dict[str, dict[str, Any]] = {
    "gated": {"macs": 0.5},
    "compacted": {"macs": 0.3, "compact": "auto"},
}

pytestmark = [
    pytest.mark.usefixtures("quick_collections", "shared_traces"),
    # Advice of the frameworks about workers, loggers and devices.
    pytest.mark.filterwarnings("ignore"),
]


def trained(kind: type[Training], folder: Path, settings: dict[str, Any], until: int) -> Training:
    folder.mkdir(exist_ok=True)
    training = kind(folder, **settings)
    training.train(until)
    return training


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", TRAININGS.values(), ids=TRAININGS)
def test_an_adapter_trains_to_the_budget_resumes_and_exports_an_equal_model(
    kind: type[Training], settings: dict[str, Any], tmp_path: Path
) -> None:
    whole = trained(kind, tmp_path / "whole", settings, 5)
    assert whole.pruner.step_count == whole.pruner.steps == STEPS
    assert share(whole.pruner)["macs"] <= settings["macs"]
    assert whole.pruner.compactions > 0 or "compact" not in settings

    small = whole.export()
    gated = whole.outputs(whole.pruner.model, EXAMPLE)
    assert torch.allclose(whole.outputs(small, EXAMPLE), gated, rtol=1e-5, atol=1e-6)
    assert sum(p.numel() for p in small.parameters()) == whole.pruner.cost()["params"]

    stopped = tmp_path / "stopped"
    trained(kind, stopped, settings, 2)
    for until in (4, 5):  # from before the budget is met, and from after
        resumed = kind(stopped, seed=2, **settings)  # nothing of it stays
        resumed.train(until, resume=True)
    assert same_state(snapshot(resumed.pruner.model), snapshot(whole.pruner.model))
    assert resumed.pruner.history == whole.pruner.history
