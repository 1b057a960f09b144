"""The cost of training in MACs: counted for every method in the same way.

A training step costs three forward passes of the network at its present widths (one forward, and
twice as much backward) and one forward pass of the teacher, for every example of its batch. The
cost of a run is the sum over all steps of all stages that its result needs:

- the baseline, if its weights are pruned or if it is the teacher;
- the pruning, where the cost falls only if `compact` removes channels during the training;
- the fine-tuning; or the training from scratch of `thin` and `reinit`.

The cost of training the weights that a run started from (`--start`) is stored as "start" if their
file states it. It is not part of the sum: that was another training, on other data.

Not counted: scores on test data, statistics of batch norms that are estimated again, traces, and
operations without products (activations, norms, gates, the optimizer).
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from ...files.model_file import read_card
from ...plain_data import JsonObject
from ...surgery.proof import count_macs

PASSES = 3  # forward passes that a forward and a backward pass cost together
_KEY = "training_macs"
_BEFORE = ("start", "baseline")
_OTHER_DATA = ("start", "scratch_start")
Costs = dict[str, int]  # stage -> MACs


def macs_of_an_example(model: nn.Module, teacher: nn.Module | None, example: Tensor) -> int:
    """Return the MACs of a training step, for one example of its batch.

    Args:
        model: The network that learns, with gates or without.
        teacher: Its teacher, if it has one.
        example: A batch of inputs.
    """
    taught = 0 if teacher is None else count_macs(teacher, example)
    return (PASSES * count_macs(model, example) + taught) // len(example)


def with_total(costs: Costs, *, needs_baseline: bool) -> Costs:
    """Return the costs of the stages that a result needs, and the sum for this data as "total".

    Args:
        costs: The cost of every stage so far.
        needs_baseline: Whether the baseline is pruned, or is the teacher.
    """
    found = {k: v for k, v in costs.items() if needs_baseline or k not in _BEFORE}
    return {**found, "total": sum(v for k, v in found.items() if k not in _OTHER_DATA)}


def metadata(costs: Costs) -> dict[str, str]:
    """Return the costs of a baseline as the metadata of its file."""
    return {_KEY: json.dumps({k: v for k, v in costs.items() if k in _BEFORE})}


def costs_of_file(file: Path) -> Costs:
    """Return what the training of the weights in a file cost; nothing if the file does not say it.

    Args:
        file: A baseline, or a small network that a run wrote, which counts as one stage.
    """
    if file.suffix != ".safetensors":
        return {}
    try:
        with safe_open(str(file), framework="pt") as opened:
            stored = (opened.metadata() or {}).get(_KEY)
        found = json.loads(stored) if stored else read_card(file).get(_KEY)
    except Exception:  # the file may hold anything, and whoever loads its weights says so
        return {}
    if not isinstance(found, dict) or not all(type(value) is int for value in found.values()):
        return {}
    if "total" in found:
        return {"baseline": sum(found.values()) - found["total"]}
    return {stage: found[stage] for stage in _BEFORE if stage in found}


# --- equal cost -----------------------------------------------------------------------------------


def scratch_epochs(card: JsonObject, macs: int | None = None) -> int:
    """Return the epochs in which `thin` or `reinit` costs as much as a finished run.

    Args:
        card: The card of a run that pruned a network to the same budget.
        macs: MACs of an example of the other small network; by default as many as that run has.
    """
    before = _baseline(card) if card["recipe"]["distill"] else 0
    return max(1, round((int(card[_KEY]["total"]) - before) / _epoch_of_small(card, macs)))


def tune_epochs(card: JsonObject, epochs: int, macs: int | None = None) -> int:
    """Return the epochs of fine-tuning with which another method costs as much as a finished run.

    Args:
        card: The card of a run that pruned a network to the same budget.
        epochs: Epochs of the other method at the original widths.
        macs: As for `scratch_epochs`.
    """
    original = int(card["table"][0]["macs"])
    spent = _baseline(card) + epochs * _epoch(card, original)
    return max(0, round((int(card[_KEY]["total"]) - spent) / _epoch_of_small(card, macs)))


def _baseline(card: JsonObject) -> int:
    return int(card[_KEY].get("baseline", 0))


def _epoch_of_small(card: JsonObject, macs: int | None) -> int:
    return _epoch(card, int(card["macs"]) if macs is None else macs)


def _epoch(card: JsonObject, macs: int) -> int:
    """Return the cost of an epoch of a network with these MACs, with the teacher of a run."""
    teacher = int(card["table"][0]["macs"]) if card["recipe"]["distill"] else 0
    return int(card["epoch_examples"] * (PASSES * macs + teacher))
