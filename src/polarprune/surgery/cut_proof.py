"""Prove that a pruned model equals the gated one, in a precision that tells rounding from mistakes.

`proof` compares two models; here they are brought to the precision in which they are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import PruneError
from ..tracing.model_state import Example, named_tensors
from .other_inputs import fresh_inputs
from .precision import (
    StaysWide,
    WidensOnReading,
    check_rounded,
    computes_in_double,
    in_precision,
    is_low,
)
from .proof import Proof, outputs, prove_equal, prove_fused_paths

_DOUBLE = 1e-10  # the largest relative difference allowed in float64
CutModel = Callable[[nn.Module, bool], nn.Module]


def prove_cut(
    gated: nn.Module,
    small: nn.Module,
    example: Example,
    cut: CutModel,
    tolerance: float = 1e-5,
) -> Proof:
    """Raise unless the pruned model equals the gated model.

    The models are compared in their own precision first. If that is bfloat16 or float16, a pruned
    model in float32 is compared with the gated one, whose weights are converted whenever an
    operation reads them; and if all outputs are single numbers, such as a loss, copies in float64
    are. If they differ there, rounding may be the cause, so the gated model is converted to
    float64, pruned again and compared once more. The limit is 1e-10 in float64, unless the model
    computes a part in float32 even so.

    Args:
        gated: The model with gates.
        small: The pruned model.
        example: The inputs that both models get.
        cut: Makes the pruned model from a gated one, of which it makes a copy or not.
        tolerance: The largest relative difference allowed in float32.

    Returns:
        The largest relative differences, by mode and by name of the inputs, and what was skipped.

    Raises:
        PruneError: If the models differ in float64 too.
    """
    if _answers_with_scalars(gated, example):
        return _proved_wide(gated, small, example, cut, torch.float64, tolerance)
    if is_low(gated):
        try:
            return _proved_on_reading(gated, small, example, cut, tolerance)
        except PruneError:  # some code reads weights in another way
            return _proved_wide(gated, small, example, cut, torch.float32, tolerance)
    first = next(tensor for _, tensor in named_tensors(gated) if tensor.is_floating_point())
    close = _DOUBLE if first.dtype == torch.float64 else tolerance
    fused = prove_fused_paths(gated, small, example)
    try:
        found = prove_equal(gated, small, example, close, fresh_inputs(example))
    except PruneError:
        found = _proved_wide(gated, small, example, cut, torch.float64, tolerance)
    return _together(found, fused)


def _together(one: Proof, other: Proof) -> Proof:
    return Proof(one.differences | other.differences, one.skipped | other.skipped)


def _answers_with_scalars(model: nn.Module, example: Example) -> bool:
    """Return whether every output is one number, such as a loss.

    A mean over a batch hides differences: only float64 distinguishes a small one from rounding.
    """
    return all(tensor.numel() == 1 for tensor in outputs(model, example, training=False))


def _proved_on_reading(
    gated: nn.Module, small: nn.Module, example: Example, cut: CutModel, tolerance: float
) -> Proof:
    """Compare a model of low precision, computed in float32, with one that is pruned in float32.

    The float32 copy of the gated model is used up for the pruned one, so that both together take
    the memory of one copy. The gated model itself is not converted.
    """
    exact, inputs = in_precision(gated, example, torch.float32)
    again = cut(exact, False)
    del exact
    with WidensOnReading(torch.float32):
        found = prove_equal(gated, again, inputs, tolerance, fresh_inputs(inputs))
    check_rounded(small, again)
    with WidensOnReading(torch.float32):
        found = _together(found, prove_fused_paths(gated, again, inputs))
    return _named_in(found, torch.float32)


def _named_in(found: Proof, wide: torch.dtype) -> Proof:
    """Return a proof whose differences are named for the precision, too."""
    precision = str(wide).removeprefix("torch.")
    named = {f"{name}, in {precision}": gap for name, gap in found.differences.items()}
    return Proof(named, found.skipped)


def _proved_wide(
    gated: nn.Module,
    small: nn.Module,
    example: Example,
    cut: CutModel,
    wide: torch.dtype,
    tolerance: float,
) -> Proof:
    """Compare copies in a wider precision; from float32, go on to float64 if they differ.

    The copy is pruned again, because folding the gates into the weights rounds as well.
    """
    exact, inputs = in_precision(gated, example, wide)
    is_double = wide == torch.float64
    close = _DOUBLE if is_double and _is_double_throughout(exact, inputs) else tolerance
    again = cut(exact, True)
    try:
        with StaysWide(wide):
            found = prove_equal(exact, again, inputs, close, fresh_inputs(inputs))
    except PruneError:
        if is_double:
            raise
        del exact, again
        return _proved_wide(gated, small, example, cut, torch.float64, tolerance)
    check_rounded(small, again)
    if not is_double:
        found = _together(found, prove_fused_paths(exact, again, inputs))
    return _named_in(found, wide)


def _is_double_throughout(model: nn.Module, example: Example) -> bool:
    try:
        return computes_in_double(model, example)
    except PruneError:  # the comparison will say so
        return True
