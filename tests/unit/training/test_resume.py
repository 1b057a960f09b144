"""A resumed run is bit-equal wherever it was interrupted; a damaged state changes nothing."""

from __future__ import annotations

import copy
import io
import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import polarprune as pp
from polarprune.validation.pruner_state import check_state
from tests.helpers.made_up_clock import IMAGES, Clock, net, wound_up
from tests.helpers.nets import digits_resnet
from tests.helpers.resuming import OPTIMIZERS, STEPS, Parts, assert_same, build, learn
from tests.helpers.training import same_state, sgd, snapshot

State = dict[str, Any]


def stored(parts: tuple[Any, ...]) -> list[State]:
    """Write the states to a file and read them."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


pytestmark = pytest.mark.usefixtures("shared_traces")

# --- bit-equal ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_runs_that_compact_by_themselves_resume_bit_equal_wherever_they_are_interrupted(
    name: str,
) -> None:
    whole, parts = build(name, compact="auto"), build(name, compact="auto")
    chosen = random.Random(name).sample(range(1, STEPS), 2)
    for first, last in pairwise(sorted({0, *chosen, 19, 20, STEPS})):  # the budget is met in 20
        if first:
            states, parts = stored(parts), build(name, compact="auto")
            for part, state in zip(parts, states, strict=True):
                part.load_state_dict(state)
        for one in (whole, parts):
            learn(one, first, last)
        assert parts[0].history == whole[0].history
        assert_same(parts[0].state_dict(), whole[0].state_dict())
        assert same_state(snapshot(parts[1]), snapshot(whole[1]))
        assert_same(parts[2].state_dict(), whole[2].state_dict())
    assert whole[0].compactions >= 2


@pytest.mark.parametrize("stop", [7, 19, 30])
def test_a_run_with_a_budget_of_latency_resumes_bit_equal_if_the_clock_is_exact(
    stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wound_up(Clock(), monkeypatch)

    def parts() -> Parts:
        pruner = pp.Pruner(net(), IMAGES, latency=0.5, steps=STEPS, compact="auto")
        optimizer = sgd(pruner)
        pruner.attach(optimizer)
        return pruner, pruner.model, optimizer

    whole, first, second = parts(), parts(), parts()
    learn(whole, 0, STEPS)
    learn(first, 0, stop)
    for part, state in zip(second, stored(first), strict=True):
        part.load_state_dict(state)
    learn(second, stop, STEPS)
    assert whole[0].compactions and second[0].history == whole[0].history
    assert_same(second[0].state_dict(), whole[0].state_dict())
    assert same_state(snapshot(second[0].export()), snapshot(whole[0].export()))


def test_what_was_given_up_is_not_tried_again_after_a_break() -> None:
    first = build(compact="auto")
    learn(first, 0, 5)
    first[0]._run.compaction.gave_up = True  # as after a refusal, with a warning
    second = build(compact="auto")
    for part, state in zip(second, stored(first), strict=True):
        part.load_state_dict(state)
    learn(second, 5, STEPS)
    assert not second[0].compactions


# --- damaged states -------------------------------------------------------------------------------


def picture(parts: Parts) -> list[Any]:
    """Return everything that must not change: states, hooks, modes, classes, outputs."""
    pruner, model, optimizer = parts
    modules = list(model.modules())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        output = copy.deepcopy(model).eval()(torch.randn(2, 1, 8, 8))
    hooks = [[*m._forward_hooks, *m._forward_pre_hooks] for m in modules]
    kept = (pruner.state_dict(), model.state_dict(), optimizer.state_dict())
    identities = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    modes = [(type(m), m.training) for m in modules]
    steps = (pruner.step_count, pruner.compactions, pruner.landed, *pruner.landing.values())
    return [*copy.deepcopy(kept), output, hooks, identities, modes, list(steps)]


@contextmanager
def refused(parts: Parts, message: str) -> Iterator[None]:
    before = picture(parts)
    with pytest.raises(pp.PruneError, match=message) as error:
        yield
    assert "Nothing was changed" in str(error.value) or "torch.load" in str(error.value)
    assert_same(before, picture(parts))


@pytest.fixture(scope="module")
def whole_state() -> State:
    """Return the state of a run in the middle of which channels were removed."""
    parts = build(compact="auto")
    learn(parts, 0, 30)
    assert parts[0].compactions
    return stored(parts)[0]


@pytest.fixture(scope="module")
def fresh() -> Parts:
    """Return a run in training with nothing removed yet; the tests check that it stays so."""
    parts = build(compact="auto")
    learn(parts, 0, 4)
    return parts


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all parts of a state; of lists, to the first and the last."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        for place in {0, len(value) - 1}:
            yield from leaves(value[place], (*path, place))


def at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state


def changed(state: State, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    other = copy.deepcopy(state)
    at(other, path[:-1])[path[-1]] = new
    return other


def damages(value: Any) -> Iterator[Any]:
    """Yield what a part may be damaged to."""
    yield from (None, "text", [], {}, torch.zeros(2, 3, 4), object(), math.nan, -1, 10**400)
    if isinstance(value, Tensor):
        yield from (value[None], value.to(torch.complex64), value.to(torch.int8), value.to("meta"))
        yield value.tolist()
        if value.dim():
            yield value[:-1]
        if value.is_floating_point():
            yield torch.full_like(value, math.nan)
            yield torch.full_like(value, math.inf)
    if isinstance(value, dict):
        yield {**value, "more": 1}
        yield from ({k: v for k, v in value.items() if k != gone} for gone in value)
    if isinstance(value, list):
        yield [*value, None]
    if isinstance(value, bool):
        yield not value


def is_as_good(path: tuple[Any, ...], new: Any) -> bool:
    """Return whether a change has no effect, or gives a valid state of another run."""
    return path == ("given_up",) and isinstance(new, bool)


def test_every_damaged_part_is_refused_and_nothing_changes(
    whole_state: State, fresh: Parts
) -> None:
    pruner, count = fresh[0], 0
    before = picture(fresh)
    for path in leaves(whole_state):
        for new in damages(at(whole_state, path)):
            if is_as_good(path, new):
                continue
            with pytest.raises(pp.PruneError, match=r"^load_state_dict: "):
                pruner.load_state_dict(changed(whole_state, path, new))
            count += 1
    assert count > 500
    assert_same(before, picture(fresh))


RANGES: dict[str, tuple[Callable[[State], Any], str]] = {
    "step beyond the end": (lambda s: s.update(step=STEPS + 1), "step is 41, not between 0 and 40"),
    "step of another moment": (
        lambda s: s.update(step=29),
        "'step'. is 30, but steps must increase .* not exceed 29",
    ),
    "not landed": (lambda s: s.update(landed=False), "landed is False at step 30"),
    "share of zero": (lambda s: s.update(compacted=0.0), "compacted is 0.0, not a fraction"),
    "negative shrink rate": (lambda s: s["stepper"]["shrink"].sub_(1), "'shrink'.*out of range"),
    "negative worth": (lambda s: s["stepper"]["worth"].fill_(-1), "'worth'.*out of range"),
    "alpha of a removed channel": (
        lambda s: s["alpha"].update({k: torch.ones_like(v) for k, v in s["alpha"].items()}),
        "alpha of .* is not zero for channels that were removed",
    ),
    "nothing present": (lambda s: s["present"].zero_(), "present keeps 0 channels of .* at least"),
    "rows out of order": (
        lambda s: s["history"].reverse(),
        r"history\[1\]\['step'\] is 29, but steps must increase .* not exceed 30",
    ),
    "rows of the future": (
        lambda s: s["history"].append({**s["history"][-1], "step": 35}),
        "is 35, but steps must increase .* not exceed 30",
    ),
    "negative cost": (lambda s: s["history"][3].update(macs=-0.1), "not a non-negative number"),
    "fewer bins": (lambda s: s["history"][3]["histogram"].pop(), "not a histogram of 20 bins"),
    "other steps": (
        lambda s: s["settings"].update(steps=7),
        "from a run with settings .*'steps': 7",
    ),
    "other schedule": (lambda s: s["schedule"].update(done=0.7), "from a run with schedule"),
    "tensors for settings": (
        lambda s: s["settings"].update(steps=torch.zeros(3)),
        "from a run with settings",
    ),
}


@pytest.mark.parametrize("case", RANGES)
def test_numbers_that_no_run_can_have_are_refused(
    case: str, whole_state: State, fresh: Parts
) -> None:
    damage, message = RANGES[case]
    state = copy.deepcopy(whole_state)
    damage(state)
    with refused(fresh, message):
        fresh[0].load_state_dict(state)


@pytest.mark.parametrize("state", [None, 3, "state.pt", [], torch.zeros(3)], ids=repr)
def test_what_is_no_state_is_refused(state: Any, fresh: Parts) -> None:
    with refused(fresh, r"load_state_dict: .*Pass the dict that pruner.state_dict\(\) returned"):
        fresh[0].load_state_dict(state)


def test_the_states_of_other_parts_are_refused(fresh: Parts) -> None:
    for other in fresh[1:]:
        with refused(fresh, "the state has no"):
            fresh[0].load_state_dict(other.state_dict())


def test_states_of_other_models_and_runs_are_refused(fresh: Parts) -> None:
    example = torch.zeros(2, 1, 8, 8)
    wider = pp.Pruner(digits_resnet(12), example, macs=0.3, steps=STEPS)
    with refused(fresh, "the groups of the state differ from those of this model"):
        fresh[0].load_state_dict(wider.state_dict())
    finer = pp.Pruner(digits_resnet(8).double(), example.double(), macs=0.3, steps=STEPS)
    with refused(fresh, "has the dtype torch.float64 instead of torch.float32"):
        fresh[0].load_state_dict(finer.state_dict())


def test_channels_that_were_removed_do_not_come_back(whole_state: State) -> None:
    later = build(compact="auto")
    later[0].load_state_dict(whole_state)
    earlier = build(compact="auto")
    message = (
        r"channels that compact\(\) has removed from this model\. Build the model and the Pruner"
    )
    with refused(later, message):
        later[0].load_state_dict(stored(earlier)[0])


def test_a_model_of_the_latency_is_checked_too(fresh: Parts) -> None:
    fitted = {
        "whole": 1e6,
        "steps": torch.ones(3),
        "coefs": torch.ones(3, 3),
        "scale": torch.ones(()),
    }
    pruner, latency = fresh[0], {"model": fitted, "last": 0.9}
    own = {**pruner.state_dict(), "latency": latency}
    check_state(own, own, pruner.graph, 20)
    for path in leaves(latency, ("latency",)):
        for new in damages(at(own, path)):
            with pytest.raises(pp.PruneError, match=r"^load_state_dict: .*latency"):
                check_state(changed(own, path, new), own, pruner.graph, 20)
    with pytest.raises(pp.PruneError, match="has the unknown key 'latency'"):
        pruner.load_state_dict(own)


def test_an_optimizer_whose_state_cannot_be_cut_is_refused_before_anything_changes(
    whole_state: State,
) -> None:
    parts = build()
    learn(parts, 0, 2)
    weight = next(p for p in parts[1].parameters() if p.dim() == 4)
    parts[2].state[weight]["rows"] = torch.zeros(3)
    with refused(parts, re.escape("keeps rows of shape [3]")):
        parts[0].load_state_dict(whole_state)
