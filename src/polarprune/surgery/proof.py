"""Prove that two models compute the same function, and check the MACs of the small one.

The gated model and the pruned model run on the same inputs, with all randomness removed, and their
outputs are compared. `export` and `compact` return a model only after this proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from ..errors import PruneError, reason_given
from ..rewriting.node_functions import OtherSizes
from ..rewriting.parametrizations import settle_weights
from ..torch_internals.fused_encoders import stop_packing
from ..torch_internals.patches import full_float32_precision
from ..tracing.generation import Answer, CannotContinue, answers, split
from ..tracing.mac_count import MISSING_FORMULAS
from ..tracing.model_state import (
    Example,
    as_call,
    restored,
    without_fused_paths,
)
from .other_inputs import ANOTHER_BATCH, OTHER_VALUES
from .repeatable_runs import repeatable


class Proof(NamedTuple):
    """What a comparison of two models found.

    Attributes:
        differences: The largest relative difference, by mode and by name of the inputs.
        skipped: Modes and inputs that were not compared, and why.
    """

    differences: dict[str, float]
    skipped: dict[str, str]


class NotEqual(PruneError):
    """Two models do not compute the same function. `fact` says by how much they differ."""

    def __init__(self, fact: str) -> None:
        super().__init__(
            f"{fact}. Nothing was exported. Please report this model, and freeze the affected part "
            f"with keep=[...]."
        )
        self.fact = fact


def outputs(model: nn.Module, example: Example, *, training: bool) -> list[Tensor]:
    """Return all output tensors of the model, computed with dropout off and a fixed seed."""
    return list(_answer(model, example, training=training, generates=False))


def _answer(model: nn.Module, example: Example, *, training: bool, generates: bool) -> Answer:
    """Return what a user reads of the output; see `generation.answers`."""
    with repeatable(model, training):
        found = answers(model, example, generates=generates)
    return Answer([x.detach() for x in found.read], [x.detach() for x in found.further])


def difference(one: nn.Module, other: nn.Module, example: Example, *, training: bool) -> float:
    """Return the largest relative difference of all outputs; infinite if their shapes differ."""
    left, right = (outputs(model, example, training=training) for model in (one, other))
    return _largest_gap(left, right)


def _largest_gap(left: list[Tensor], right: list[Tensor]) -> float:
    """Return the largest `relative_gap`; infinite if the numbers of outputs differ."""
    if len(left) != len(right):
        return float("inf")
    return max((relative_gap(a, b) for a, b in zip(left, right, strict=True)), default=0.0)


def relative_gap(a: Tensor, b: Tensor) -> float:
    """Return max |a - b| / max |a| over the elements that are not equal.

    Equal elements are left out because a large constant, such as -1e9 in masked logits, would hide
    a difference elsewhere. The result is infinite if the shapes or dtypes differ, or if the
    tensors have infinities or NaN at different positions.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    a, b = a[unequal], b[unequal]
    if not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()) or not bool(
        (a.isfinite() & b.isfinite()).all()
    ):
        return float("inf")
    return float((a - b).abs().max()) / max(float(a.abs().max()), 1e-30)


def deviation(gap: float) -> str:
    """Say by how much outputs differ, or in what if the gap is infinite."""
    return f"by {gap:.2g}" if math.isfinite(gap) else "in shape, dtype or finite elements"


def prove_equal(
    one: nn.Module,
    other: nn.Module,
    example: Example,
    tolerance: float,
    fresh: Iterable[tuple[str, Example]] = (),
) -> Proof:
    """Raise unless two models agree in every mode in which the first one runs.

    Inputs that the first model does not accept are skipped, and so are other sizes that a rewritten
    forward of the second one refuses: code that depends on a size was rewritten for that of the
    example, and refuses others instead of computing something else.

    Args:
        one: The gated model.
        other: The pruned model.
        example: The inputs that both models get.
        tolerance: The largest relative difference allowed.
        fresh: More inputs with their names, for eval mode.

    Returns:
        The differences, and what was skipped.

    Raises:
        PruneError: If the pruned model does not run, or if the difference exceeds the tolerance.
    """
    wanted, no_token = eval_answer(one, example)
    skipped = {ONE_MORE_TOKEN: no_token} if no_token else {}
    generates = not no_token
    compare = partial(_compare, other, example, generates=generates, tolerance=tolerance)
    found = compare(wanted, training=False)
    try:
        trained = _answer(one, example, training=True, generates=generates)
    except Exception as error:  # detection models need targets, batch norm needs several samples
        skipped["train"] = f"the gated model does not run: {reason_given(error)}"
    else:
        found |= compare(trained, training=True)
    sizes = [tensor.shape[:1] for tensor in wanted]
    for name, inputs in fresh:
        gap = _difference_if_it_runs(one, other, inputs, name, sizes, generates)
        if isinstance(gap, str):
            skipped[name] = gap
        else:
            found[name] = gap
            _check_gap(gap, tolerance, f"eval mode, {name}")
    return Proof(found, skipped)


def eval_answer(model: nn.Module, example: Example) -> tuple[Answer, str]:
    """Return the answer in eval mode, with one more token if there is a cache; or why it has none.

    The reason is empty if the answer has that token, or if there is no cache.
    """
    try:
        return _answer(model, example, training=False, generates=True), ""
    except CannotContinue as error:  # `trace` has frozen the channels of the cache
        return _answer(model, example, training=False, generates=False), reason_given(error)


def _compare(
    other: nn.Module,
    example: Example,
    wanted: Answer,
    *,
    training: bool,
    generates: bool,
    tolerance: float,
) -> dict[str, float]:
    """Compare the pruned model with an answer of the gated one; return the differences by name."""
    name = "train" if training else "eval"
    with _failure_explained(f"in {name} mode"):
        given = _answer(other, example, training=training, generates=generates)
    found = {name: _largest_gap(wanted.read, given.read)}
    if wanted.further:
        found[ONE_MORE_TOKEN] = _largest_gap(wanted.further, given.further)
    for key, gap in found.items():
        _check_gap(gap, tolerance, f"{key} mode" if key == name else key)
    return found


ONE_MORE_TOKEN = "one more token with the cache"


@contextmanager
def _failure_explained(when: str) -> Iterator[None]:
    """Context manager: raise a PruneError if the pruned model fails inside."""
    try:
        yield
    except Exception as error:
        raise PruneError(f"the pruned model does not run {when}: {error}") from error


def _check_gap(gap: float, tolerance: float, where: str) -> None:
    """Raise if a difference is larger than allowed, or NaN."""
    if not gap <= tolerance:
        raise NotEqual(
            f"the pruned model differs {deviation(gap)} from the gated model (relative, {where}); "
            f"at most {tolerance:.0e} is allowed"
        )


def _difference_if_it_runs(
    one: nn.Module,
    other: nn.Module,
    inputs: Example,
    name: str,
    sizes: list[torch.Size],
    generates: bool,
) -> float | str:
    """Return the largest difference in eval mode, or why these inputs cannot be compared.

    Args:
        one: The gated model. If it fails on the inputs, they are skipped.
        other: The pruned model. A rewritten forward may refuse sizes other than the example's.
        inputs: Inputs that differ from the example.
        name: The name of these inputs.
        sizes: The batch sizes of the outputs for the example. With larger pictures,
            `x.view(-1, 256)` moves pixels into the batch axis; such outputs mean nothing.
        generates: Run one more token if there is a cache.
    """
    try:
        wanted = list(_answer(one, inputs, training=False, generates=generates))
    except Exception as error:  # the model does not support these sizes
        return f"the gated model does not run: {reason_given(error)}"
    if name != ANOTHER_BATCH and [tensor.shape[:1] for tensor in wanted] != sizes:
        return "the outputs have another batch size than on the example"
    with _failure_explained(f"on {name}"):
        try:
            found = list(_answer(other, inputs, training=False, generates=generates))
        except OtherSizes as error:
            if name == OTHER_VALUES:
                raise
            return f"the pruned model refuses these sizes: {reason_given(error)}"
    return _largest_gap(wanted, found)


def prove_fused_paths(gated: nn.Module, small: nn.Module, example: Example) -> Proof:
    """Compare the models on the fused path that torch's attention takes under `torch.no_grad()`.

    torch does not take this path inside a `TorchFunctionMode`, so `prove_equal` does not cover it.
    Models that draw random numbers are skipped. Models without such a path have no entry.
    """
    fused = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
    if not any(isinstance(module, fused) for module in gated.modules()):
        return Proof({}, {})
    with _failure_explained("under torch.no_grad()"):
        found = [_fused_outputs(model, example) for model in (gated, small)]
    if found[0] is None or found[1] is None:
        return Proof({}, {_NO_GRAD: "the model draws random numbers in eval mode"})
    gap = _largest_gap(found[0], found[1])
    _check_gap(gap, _FUSED_TOLERANCE, "eval mode under torch.no_grad()")
    return Proof({_NO_GRAD: gap}, {})


_NO_GRAD = "no_grad"  # names the fused path
_FUSED_TOLERANCE = 1e-4  # fused attention adds in a different order


def _fused_outputs(model: nn.Module, example: Example) -> list[Tensor] | None:
    """Return the outputs in eval mode, or None if the model draws random numbers."""
    args, kwargs = as_call(example)
    with restored(model, False), full_float32_precision():
        settle_weights(model)
        stop_packing(model)
        before = torch.get_rng_state()
        found = [tensor.detach() for tensor in split(model(*args, **kwargs)).read]
        return found if torch.equal(before, torch.get_rng_state()) else None


def check_macs(small: nn.Module, example: Example, claimed: int) -> None:
    """Raise if torch counts more MACs in the pruned model than the cost model claims."""
    counted = count_macs(small, example)
    if counted > claimed:  # torch may count fewer: with one channel, a product can become a scaling
        raise PruneError(
            f"export: the cost model predicts {claimed} MACs, but torch counts {counted} in the "
            f"pruned model. Nothing was exported. Please report this model."
        )


def count_macs(model: nn.Module, example: Example) -> int:
    """Return the MACs of one run in eval mode, as torch counts them.

    Operations that torch does not count, such as fused attention on CPUs, are counted too.
    """
    args, kwargs = as_call(example)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # torch's counter fails on parameters with gradients that are passed to modules as arguments.
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        with (
            restored(model, training=False),
            without_fused_paths(model),
            FlopCounterMode(display=False, custom_mapping=MISSING_FORMULAS) as counter,
        ):
            model(*args, **kwargs)
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
    return int(counter.get_total_flops()) // 2


def own_copy(example: Example) -> Example:
    """Return a copy of the inputs that shares no memory with them."""
    found: Example = tree_map_only(Tensor, lambda x: x.detach().clone(), example)
    return found


def example_for(example: Example, like: Tensor, made_for: torch.dtype) -> Example:
    """Return the example on the device of a model, and in its precision if that has changed.

    Args:
        example: The inputs.
        like: A parameter of the model.
        made_for: The dtype of the model when the example was given. Tensors of this dtype are
            converted to the dtype of `like`.
    """

    def converted(x: Tensor) -> Tensor:
        return x.to(like.device, like.dtype if x.dtype == made_for else x.dtype)

    moved: Example = tree_map_only(Tensor, converted, example)
    return moved
