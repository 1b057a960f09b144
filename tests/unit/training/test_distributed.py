"""Two processes with DistributedDataParallel, `fully_shard` or tensor parallel layers, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polarprune as pp
from tests.helpers.processes import run_module

Result = dict[str, Any]
Runs = Callable[[str], tuple[Result, Result]]
EQUAL = 1e-6

pytestmark = pytest.mark.shares_a_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the two processes wrote what they found."""
    folder = tmp_path_factory.mktemp("distributed")
    run_module("tests.helpers.distributed_runs", folder)
    return folder


@pytest.fixture
def runs(folder: Path) -> Runs:
    """Return a function that reads what both processes found in a run."""

    def found(name: str) -> tuple[Result, Result]:
        first, second = (
            torch.load(folder / f"{name}.{rank}", weights_only=False) for rank in range(2)
        )
        assert "failed" not in first, first["failed"]
        assert "failed" not in second, second["failed"]
        return first, second

    return found


def is_equal(one: object, other: object) -> bool:
    """Return whether two nested results are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[k], other[k]) for k in one)
    return one == other


def assert_alike(one: Result, other: Result) -> None:
    """Require the same plan, and the same small model up to rounding."""
    assert one["plan"] == other["plan"]
    gap = (one["outputs"] - other["outputs"]).abs().max() / one["outputs"].abs().max()
    assert gap < EQUAL
    assert one["macs"] <= 0.5 and other["macs"] <= 0.5


ALL = [
    "ddp",
    "ddp compacted",
    "ddp compacted, unused",
    "ddp compacted by hand",
    "strange hook",
    "refused in one process",
    "shard first",
    "pruner first",
    "root only",
    "hybrid",
    "sharded checkpoint",
    "full checkpoint",
    "read by one process",
    "ddp checkpoint",
    "dying",
]


@pytest.mark.parametrize("name", ALL)
def test_both_processes_have_the_same_gates_plan_and_history(runs: Runs, name: str) -> None:
    first, second = runs(name)
    assert is_equal(first["state"], second["state"])
    assert first["plan"] == second["plan"] and first["history"] == second["history"]
    weights = zip(first["weights"], second["weights"], strict=True)
    assert all(torch.equal(a, b) for a, b in weights)


@pytest.mark.parametrize("name", ALL[1:])
def test_every_way_to_distribute_a_run_gives_the_same_small_model(runs: Runs, name: str) -> None:
    assert_alike(runs("ddp")[0], runs(name)[0])
    assert runs(name)[0]["class"] == "Net"


def test_two_processes_prune_as_one_with_all_data(runs: Runs) -> None:
    assert_alike(runs("one process")[0], runs("ddp without norms")[0])


@pytest.mark.parametrize("name", ["ddp compacted", "ddp compacted, unused"])
def test_automatic_compaction_renews_the_wrapper(runs: Runs, name: str) -> None:
    assert runs(name)[0]["compactions"] >= 2


def test_compaction_by_hand_renews_the_wrapper(runs: Runs) -> None:
    assert runs("ddp compacted by hand")[0]["compactions"] == 1


def test_a_wrapper_that_cannot_be_renewed_is_left_alone_with_the_remedy(runs: Runs) -> None:
    for found in runs("strange hook"):
        assert len(found["warnings"]) == 1
        assert 'compact="auto" is turned off' in found["warnings"][0]
        assert "communication hook" in found["error"] and "del ddp" in found["error"]
        assert found["compactions"] == 1  # without the wrapper, as the remedy says


def test_a_compaction_refused_in_one_process_is_refused_in_both(runs: Runs) -> None:
    for found in runs("refused in one process"):
        assert len(found["warnings"]) == 1 and "the proof failed here" in found["warnings"][0]
        assert found["compactions"] == 0
    assert "in another process" in runs("refused in one process")[0]["warnings"][0]


def test_processes_with_other_arguments_are_refused_at_the_first_step(runs: Runs) -> None:
    for found in runs("other budgets"):
        assert "differ in the arguments of the Pruner" in found["error"]


def test_a_state_dict_of_the_wrapper_resumes(runs: Runs) -> None:
    assert_alike(runs("ddp")[0], runs("state entry")[0])


def test_wrapped_models_are_refused_with_the_remedy(runs: Runs) -> None:
    found = runs("wrapped models")[0]
    assert "DistributedDataParallel" in found["ddp"] and "model.module" in found["ddp"]
    assert "DataParallel" in found["dp"] and "wrap it afterwards" in found["dp"]
    assert "fully_shard" in found["fsdp1"]


def test_weights_are_sharded_and_the_export_is_plain(runs: Runs) -> None:
    first, second = runs("pruner first")
    assert "DTensor" in first["placements"] and first["placements"] != second["placements"]
    assert all(type(weight) is torch.Tensor for weight in first["weights"])
    assert torch.equal(first["outputs"], second["outputs"])  # statistics of norms, too


@pytest.mark.parametrize("name", ["computed weights", "tied transformer", "uniform widths"])
def test_other_layers_are_sharded_in_either_order(runs: Runs, name: str) -> None:
    found = runs(name)[0]
    for order in ("shard first", "pruner first"):
        assert found["ddp"]["plan"] == found[order]["plan"]
        ours, theirs = found[order]["outputs"], found["ddp"]["outputs"]
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()  # sums in another order
    kept = found["ddp"]["plan"].values()
    assert found["ddp"]["macs"] <= 0.7 and len(kept) >= 2


def test_widths_of_sharded_blocks_are_uniform(runs: Runs) -> None:
    plans = [found[order]["plan"] for found in runs("uniform widths") for order in found]
    for plan in plans:
        widths = {len(plan[f"inner.{number}.up"]) for number in range(3)}
        assert len(widths) == 1 and widths != {16}


def test_a_full_checkpoint_of_a_sharded_run_is_exported_in_one_process(runs: Runs) -> None:
    assert_alike(runs("shard first")[0], runs("exported in one process")[0])


@pytest.mark.parametrize("name", ["sharded checkpoint", "full checkpoint"])
def test_reading_the_state_of_an_optimizer_is_no_step(runs: Runs, name: str) -> None:
    assert runs(name)[0]["counted"] == 12


def test_compaction_of_a_sharded_model_is_given_up(runs: Runs) -> None:
    found = runs("sharded refusals")[0]
    assert "cannot be cut" in found["compact"]
    assert [text for text in found["warnings"] if "turned off" in text and "fully_shard" in text]


def test_a_wrong_order_with_fully_shard_is_refused(runs: Runs) -> None:
    found = runs("sharded refusals")[0]
    assert "build the optimizer with pruner.param_groups" in found["late"]
    assert "to parts of the model only" in found["parts"]
    assert "trace the plain model" in found["trace"]


def test_tensor_parallel_layers_are_refused(runs: Runs) -> None:
    found = runs("tensor parallel")[0]
    for when in ("first", "later", "both"):
        assert "parallelize_module" in found[when], when
        assert "parallelize the exported model" in found[when], when


def test_a_run_in_which_a_process_died_ends_as_if_it_had_not(runs: Runs) -> None:
    assert 0 < runs("dying")[0]["start"] < 24
    assert_alike(runs("ddp compacted")[0], runs("dying")[0])


def test_a_step_with_zero_rates_and_gradients_is_not_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    pruner = pp.Pruner(model, torch.randn(2, 4), macs=0.5, steps=4)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.0))
    pruner.attach(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert pruner.step_count == 0
    optimizer.zero_grad()
    optimizer.step()  # gradients may be gone, which is no sign
    assert pruner.step_count == 1
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()  # a warm-up may start with a rate of zero
    assert pruner.step_count == 2
