"""The trials of a referee: our method, thin networks and other methods, on equal terms.

All have the same data, teacher and seeds, and start from the same baseline. Each trains for as many
epochs in total as our method, or until its training has cost the same (`training_cost`). Other
methods cut after half of their epochs (`magnitude` and `random` after the first) and are fine-tuned
for the rest. Our method and `l0` already have the final widths in the second half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from ...errors import PruneError
from ...plain_data import JsonObject
from ..methods.base import Limits
from ..methods.from_scratch import FROM_SCRATCH
from ..methods.model_cost import cost_of
from ..methods.table import METHODS
from ..settings import Settings
from .files import read_json
from .prune import small_network
from .run import Run
from .training_cost import scratch_epochs, tune_epochs
from .trials import Trial

OURS = "gdp"
CONTROLS = (*FROM_SCRATCH, *METHODS)
EQUALS = ("cost", "epochs")
_UNTRAINED = ("magnitude", "random")  # which a training before the cut does not help
_LANDING = ("l0",)  # its cost follows the same path as ours, so its weights can adapt


class Entry(NamedTuple):
    """A row of the comparison.

    Attributes:
        method: "gdp" or one of `CONTROLS`.
        equal: What it has in common with ours, one of `EQUALS`; empty for ours.
    """

    method: str
    equal: str = ""

    @property
    def folder(self) -> str:
        """How the names of its folders start."""
        return "-".join(filter(None, ("ours" if self.method == OURS else self.method, self.equal)))


def entries(methods: Sequence[str], equals: Sequence[str]) -> list[Entry]:
    """Return the rows of the comparison, ours first.

    Args:
        methods: Some of `CONTROLS`.
        equals: Some of `EQUALS`.

    Raises:
        PruneError: There is no such control, or nothing to make equal.
    """
    for given, known, option in ((methods, CONTROLS, "--methods"), (equals, EQUALS, "--equal")):
        wrong = [one for one in given if one not in known]
        if wrong or not given:
            text = ",".join(wrong)
            raise PruneError(f"{option} {text}: give some of {', '.join(known)}.")
    return [Entry(OURS), *(Entry(method, equal) for method in methods for equal in equals)]


def trial_of(base: Trial, entry: Entry, seed: int, changes: JsonObject) -> Trial:
    """Return the trial of an entry and a seed, with some settings of its own."""
    out = Path(base.out, f"{entry.folder}-seed-{seed}")
    tuned = int(changes.get("tune_epochs", base.tune_epochs))
    shapes = Path(base.out, f"{Entry(OURS).folder}-seed-{seed}", "card.json")
    return replace(
        base,
        method=entry.method,
        changes={**base.changes, **changes, "seed": seed},
        out=str(out),
        tune_epochs=tuned,
        shapes=str(shapes) if entry.method == "reinit" else "",
        start="",  # it is for the baseline
    )


def control_trial(base: Trial, entry: Entry, seed: int, settings: Settings) -> Trial:
    """Return the trial of a control; our method's trial with the same seed is finished.

    Args:
        base: What all trials have in common.
        entry: The row of the control.
        seed: The seed.
        settings: The settings of our method.
    """
    ours = read_json(Path(base.folder, trial_of(base, Entry(OURS), seed, {}).out, "card.json"))
    return trial_of(base, entry, seed, epochs_of(entry, settings, base.changes, ours))


def epochs_of(
    entry: Entry, settings: Settings, given: JsonObject, ours: JsonObject, macs: int | None = None
) -> JsonObject:
    """Return the settings in which a control differs from ours.

    Args:
        entry: The row of the control.
        settings: The settings of our method.
        given: The settings that the user changed; a given rate of fine-tuning is kept.
        ours: The card of our method.
        macs: MACs of an example of the small network of the control, where they are not those of
            ours; see `macs_of_control`.
    """
    at_cost = entry.equal == "cost"
    if entry.method in FROM_SCRATCH:
        return {"scratch_epochs": scratch_epochs(ours, macs) if at_cost else 0}
    before = epochs_before_cut(entry.method, settings)
    after = settings.epochs + settings.tune_epochs - before
    if at_cost:
        after = tune_epochs(ours, before, macs)
    rate = settings.tune_lr if "tune_lr" in given else settings.lr
    return {"epochs": before, "tune_epochs": after, "tune_lr": rate}


def epochs_before_cut(method: str, settings: Settings) -> int:
    """Return the epochs that another method trains before it cuts."""
    if method in _LANDING:
        return settings.epochs
    return 1 if method in _UNTRAINED else max(1, settings.epochs // 2)


def macs_of_control(run: Run, method: str, limits: Limits) -> int | None:
    """Return the MACs of an example of the small network of a control, if they can be known.

    With a budget of MACs, they are those of ours. With another budget, they follow from the widths
    where the method alone sets these.

    Args:
        run: The run of the control.
        method: One of `CONTROLS`.
        limits: The budget.
    """
    if "macs" in limits or method not in ("thin", *_UNTRAINED):
        return None
    if method == "thin":
        small, _ = small_network(run, limits)
    else:
        small = _cut(run, method, limits)
    return run.per_example(cost_of(small, run.data.example()))["macs"]


def _cut(run: Run, method: str, limits: Limits) -> nn.Module:
    """Return what a method leaves of a network with new weights."""
    model = run.new_network()
    return METHODS[method](model, run.data.example(), run.settings, 1, limits).cut(model)


def obstacle(run: Run, method: str, limits: Limits) -> str:
    """Return why a method cannot prune this network, or an empty text.

    It prunes a network with new weights, to fail now instead of after hours of training.

    Args:
        run: The run of our method.
        method: One of `METHODS`.
        limits: The budget.
    """
    try:
        _cut(run, method, limits)
    except Exception as error:  # another library may raise anything
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
