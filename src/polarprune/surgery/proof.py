"""Equality of two models, measured: nothing is handed out that was not compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from ..errors import PruneError
from ..rewriting.parametrizations import settle_weights
from ..tracing.copying import copy_model
from ..tracing.mac_count import MISSING_FORMULAS
from ..tracing.model_state import (
    Example,
    as_call,
    named_tensors,
    restored,
    tensors_in,
    without_fused_paths,
)
from .other_inputs import ANOTHER_BATCH, fresh_inputs


class _NoDice(TorchFunctionMode):
    """Dropout and noise draw as many numbers as there are elements, which differ from size to size:
    dropout is off, and noise is the same everywhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _NOISE and kwargs.get("generator") is None:  # else a fixed vector
            return func(*args, **kwargs).fill_(_NOISE[func])
        if func is torch.nn.functional.multi_head_attention_forward:
            kwargs = {**kwargs, "training": False}  # it calls dropout where no mode looks
        if func is torch.nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})}
        return func(*args, **kwargs)


_DROPOUTS = {
    getattr(space, name)
    for space in (torch.nn.functional, torch)
    for name in (
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "dropout_",
        "feature_alpha_dropout",
        "feature_dropout",
        "native_dropout",
    )
    if hasattr(space, name)
}


_NOISE: dict[Any, float] = {
    getattr(space, name): value
    for name, value in {
        "rand": 0.75,
        "rand_like": 0.75,
        "uniform_": 0.75,
        "randn": 0.5,
        "randn_like": 0.5,
        "normal_": 0.5,
        "bernoulli": 1.0,
        "bernoulli_": 1.0,
        "exponential_": 0.75,
    }.items()
    for space in (torch, torch.Tensor)
    if hasattr(space, name)
}


class StaysDouble(TorchFunctionMode):
    """Code that asks for float32 gets float64: the norms and softmaxes of transformers ask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        named = {key: _doubled(value) for key, value in (kwargs or {}).items()}
        return func(*map(_doubled, args), **named)


def _doubled(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given


@contextmanager
def all_digits() -> Iterator[None]:
    """GPUs round the factors of products in float32 to TF32, by default: not while we compare."""
    back: Any = torch.backends
    if not hasattr(back.cudnn, "conv"):  # an older torch
        yield
        return
    places = [back.cuda.matmul, back.cudnn.conv, back.cudnn.rnn]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


@contextmanager
def _repeatable(model: nn.Module, training: bool) -> Iterator[None]:
    off = [torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda")]  # the user's may be on
    with restored(model, training), _NoDice(), all_digits(), off[0], off[1]:
        torch.manual_seed(0)
        settle_weights(model)
        yield


def outputs(model: nn.Module, example: Example, *, training: bool) -> list[Tensor]:
    """All tensors that the model puts out, with dropout off and the random state fixed."""
    args, kwargs = as_call(example)
    with _repeatable(model, training):
        out = model(*args, **kwargs)
    return [tensor.detach() for tensor in tensors_in(out)]


def difference(one: nn.Module, other: nn.Module, example: Example, *, training: bool) -> float:
    """The largest relative difference over all outputs; infinite if their shapes differ."""
    left, right = (outputs(model, example, training=training) for model in (one, other))
    return _largest_gap(left, right)


def _largest_gap(left: list[Tensor], right: list[Tensor]) -> float:
    if len(left) != len(right):
        return float("inf")
    return max((relative_gap(a, b) for a, b in zip(left, right, strict=True)), default=0.0)


def relative_gap(a: Tensor, b: Tensor) -> float:
    """max |a - b| / max |a| over the places that are not equal.

    A constant in both (logits masked with -1e9) says nothing about the rest, so it is no measure of
    it. Infinities and NaN have to stand in the same places.
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


def modes_that_run(model: nn.Module, example: Example) -> list[bool]:
    """Eval mode, and train mode where the model runs in it on this example."""
    modes = [False]
    try:
        outputs(model, example, training=True)
        modes.append(True)
    except Exception:  # detection models want targets, batch norm more than one sample
        pass
    return modes


def prove_equal(
    one: nn.Module,
    other: nn.Module,
    example: Example,
    tolerance: float,
    fresh: Iterable[tuple[str, Example]] = (),
) -> dict[str, float]:
    """Raise unless the two models agree in every mode they run in; return the differences.

    `fresh`: more inputs, by name, for eval mode. Those that the first model does not accept are
    passed over.
    """
    found = {}
    for training in modes_that_run(one, example):
        name = "train" if training else "eval"
        with _runs_too(f"in {name} mode"):
            found[name] = difference(one, other, example, training=training)
        _check_gap(found[name], tolerance, f"{name} mode")
    sizes = [tensor.shape[:1] for tensor in outputs(one, example, training=False)]
    for name, inputs in fresh:
        gap = _difference_if_it_runs(one, other, inputs, name, sizes)
        if gap is not None:
            found[name] = gap
            _check_gap(gap, tolerance, f"eval mode, {name}")
    return found


@contextmanager
def _runs_too(when: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PruneError(f"the cut model does not run {when}: {error}") from error


def _check_gap(gap: float, tolerance: float, where: str) -> None:
    if not gap <= tolerance:
        raise PruneError(
            f"the cut model differs by {gap:.2g} (relative, {where}) from the gated one; allowed: "
            f"{tolerance:.0e}. Nothing was exported. Please report this model, and freeze the part "
            f"in question with keep=[...]."
        )


def _difference_if_it_runs(
    one: nn.Module, other: nn.Module, inputs: Example, name: str, sizes: list[torch.Size]
) -> float | None:
    """None if the first model does not accept the inputs, or the cut one says that it does not.

    `sizes`: the leading ones of its outputs. `x.view(-1, 256)` makes more rows of larger pictures,
    which are of no use.
    """
    try:
        wanted = outputs(one, inputs, training=False)
    except Exception:  # sizes that it was not made for
        return None
    if name != ANOTHER_BATCH and [tensor.shape[:1] for tensor in wanted] != sizes:
        return None
    try:
        found = outputs(other, inputs, training=False)
    except PruneError:  # a forward that was rewritten for other sizes
        return None
    except Exception as error:
        raise PruneError(f"the cut model does not run on {name}: {error}") from error
    return _largest_gap(wanted, found)


def prove_unwatched(gated: nn.Module, small: nn.Module, example: Example) -> dict[str, float]:
    """The same as users run them: torch's encoders take a fused path then, not while we watch."""
    fused = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
    if not any(isinstance(module, fused) for module in gated.modules()):
        return {}
    with _runs_too("under torch.no_grad()"):
        found = [_unwatched(model, example) for model in (gated, small)]
    if found[0] is None or found[1] is None:
        return {}
    gap = _largest_gap(found[0], found[1])
    _check_gap(gap, _FUSED, "eval mode under torch.no_grad()")
    return {"no_grad": gap}


_FUSED = 1e-4  # torch's fused attention computes in another order


def _unwatched(model: nn.Module, example: Example) -> list[Tensor] | None:
    """None if it draws random numbers."""
    args, kwargs = as_call(example)
    with restored(model, False), all_digits():
        settle_weights(model)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):  # torch puts zeros at padded places then
                module.use_nested_tensor = False
        before = torch.get_rng_state()
        found = [tensor.detach() for tensor in tensors_in(model(*args, **kwargs))]
        return found if torch.equal(before, torch.get_rng_state()) else None


def prove_cut(
    gated: nn.Module,
    small: nn.Module,
    example: Example,
    cut: Callable[[nn.Module], nn.Module],
    tolerance: float = 1e-5,
) -> dict[str, float]:
    """Equal in the models' own precision, or, where that rounds too coarsely, in float64.

    `tolerance` is that of float32. `cut`: what makes a small model of a gated one.
    """
    first = next(tensor for _, tensor in named_tensors(gated) if tensor.is_floating_point())
    close = 1e-10 if first.dtype == torch.float64 else tolerance
    unwatched = prove_unwatched(gated, small, example)
    try:
        return {**prove_equal(gated, small, example, close, fresh_inputs(example)), **unwatched}
    except PruneError:
        gated, example = in_double(gated, example)  # cut anew: folding rounds as well
        with StaysDouble():  # parts may compute in float32
            found = prove_equal(gated, cut(gated), example, 1e-10, fresh_inputs(example))
        return {**{f"{mode}, in float64": gap for mode, gap in found.items()}, **unwatched}


def check_macs(small: nn.Module, example: Example, claimed: int) -> None:
    counted = count_macs(small, example)
    if counted > claimed:  # less is possible: a product with one channel may be no product
        raise PruneError(
            f"export: the cost model says {claimed} MACs, torch counts {counted} in the small "
            f"model. Nothing was exported; please report this model."
        )


def count_macs(model: nn.Module, example: Example) -> int:
    """MACs of one run in eval mode, as torch counts them; fused attention on CPUs too."""
    args, kwargs = as_call(example)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learned:  # torch's counter stumbles over parameters that are given to modules
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


def in_double(model: nn.Module, example: Example) -> tuple[nn.Module, Example]:
    """A copy of model and example in float64."""
    double = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, example)
    return copy_model(model).double(), double


def own_copy(example: Example) -> Example:
    """The same inputs, in memory of their own."""
    found: Example = tree_map_only(Tensor, lambda x: x.detach().clone(), example)
    return found


def example_for(example: Example, like: Tensor, made_for: torch.dtype) -> Example:
    """The example on the device of a model, and in its precision, if that has changed."""

    def here(x: Tensor) -> Tensor:
        return x.to(like.device, like.dtype if x.dtype == made_for else x.dtype)

    moved: Example = tree_map_only(Tensor, here, example)
    return moved
