"""Random networks: nothing wrong, no crash, no refusal after training (`make fuzz` checks more)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.fuzz.builder import build, inputs
from tests.helpers.fuzz.check import check
from tests.helpers.fuzz.compare import gap
from tests.helpers.fuzz.generate import FAILING, generate
from tests.helpers.fuzz.program import KINDS, Program, Step, write
from tests.helpers.fuzz.shrink import shrink

NETWORKS, CHUNKS = 150, 10


@pytest.mark.filterwarnings("ignore")  # a random network may be warned of
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_networks_hold(chunk: int) -> None:
    size = NETWORKS // CHUNKS
    failed = []
    for seed in range(chunk * size, (chunk + 1) * size):
        program = generate(seed, most=9)
        outcome = check(program, quick=True)
        if outcome.failed:
            said = f"seed {seed}: {outcome.kind} in {outcome.stage}: {outcome.detail}"
            failed.append(f"{said}\n{write(program)[0]}")
    assert not failed, "\n".join(failed)


def test_a_seed_is_a_network() -> None:
    assert write(generate(3))[0] == write(generate(3))[0] != write(generate(4))[0]


def test_every_kind_of_operation_is_drawn() -> None:
    drawn = {step.kind for seed in range(1500) for step in generate(seed).steps}
    assert set(KINDS) - set(FAILING) <= drawn


def test_kinds_that_are_left_out_exist_and_say_why() -> None:
    assert set(FAILING) <= set(KINDS) and all(FAILING.values())


def wrong_network() -> Program:
    """A convolution too many, and one step that the test below is about."""
    steps = [Step("conv", [0]), Step("activation", [1]), Step("reorder", [2]), Step("head", [3])]
    return Program(0, [("image", (3, 4, 4))], steps, [4])


def test_a_failing_network_is_made_smaller_while_it_fails() -> None:
    program = wrong_network()
    program.steps[0].choices["width"] = 12
    found = shrink(program, lambda other: any(s.kind == "reorder" for s in other.steps))
    assert [step.kind for step in found.steps] == ["reorder"]
    assert build(found)(*inputs(found, 0)).shape == (2, 3, 4, 4)


def test_a_difference_is_seen_beside_large_constants_and_infinities() -> None:
    ours = torch.tensor([1.0, -1e9, float("inf"), float("nan")])
    assert gap([ours], [ours.clone()]) == 0
    assert gap([ours], [ours + torch.tensor([0.5, 0, 0, 0])]) == 0.5
    assert gap([ours], [ours.nan_to_num(0.0)]) == float("inf")
    assert gap([ours], [ours[:3]]) == float("inf")


def test_a_wrong_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a surgery that forgets a bias does not pass."""
    import polarprune as pp

    right = pp.shrink

    def forgets(model: nn.Module, graph: object, plan: object) -> nn.Module:
        small = right(model, graph, plan)  # type: ignore[arg-type]
        layer = next(m for m in small.modules() if isinstance(m, nn.Linear))
        nn.init.zeros_(layer.bias)
        return small

    monkeypatch.setattr(pp, "shrink", forgets)
    assert check(wrong_network()).kind == "wrong"
