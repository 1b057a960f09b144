"""Equality of two models, measured: nothing is handed out that was not compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from .computed import settle_weights
from .errors import PruneError
from .recorder import FORGOTTEN
from .tape import Example, as_call, copied, named_tensors, opened, tensors_in, untouched


class _NoDice(TorchFunctionMode):
    """Dropout and noise draw as many numbers as there are elements, which differ from size to size:
    dropout is off, and noise is the same everywhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _NOISE:
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
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "dropout_",
                 "feature_alpha_dropout", "feature_dropout", "native_dropout")
    if hasattr(space, name)
}  # fmt: skip


_NOISE: dict[Any, float] = {
    getattr(space, name): value
    for name, value in {
        "rand": 0.75, "rand_like": 0.75, "uniform_": 0.75, "randn": 0.5, "randn_like": 0.5,
        "normal_": 0.5, "bernoulli": 1.0, "bernoulli_": 1.0, "exponential_": 0.75,
    }.items()
    for space in (torch, torch.Tensor)
    if hasattr(space, name)
}  # fmt: skip


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
    with untouched(model, training), _NoDice(), all_digits(), off[0], off[1]:
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
    """max |a - b| / max |a| over all outputs; infinite if their shapes differ."""
    worst = 0.0
    left, right = (outputs(model, example, training=training) for model in (one, other))
    if len(left) != len(right):
        return float("inf")
    for a, b in zip(left, right, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel() and (a.is_floating_point() or a.is_complex()):
            scale = max(float(a.abs().max()), 1e-30)
            gap = float((a - b).abs().max()) / scale
            worst = max(worst, gap if gap == gap else float("inf"))
        elif a.numel() and not torch.equal(a, b):
            return float("inf")
    return worst


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
    one: nn.Module, other: nn.Module, example: Example, tolerance: float
) -> dict[str, float]:
    """Raise unless the two models agree in every mode they run in; return the differences."""
    found = {}
    for training in modes_that_run(one, example):
        name = "train" if training else "eval"
        try:
            found[name] = difference(one, other, example, training=training)
            _run_unwatched(other, example, training)
        except Exception as error:
            raise PruneError(f"the cut model does not run in {name} mode: {error}") from error
        if not found[name] <= tolerance:
            raise PruneError(
                f"the cut model differs by {found[name]:.2g} (relative, {name} mode) from the "
                f"gated one; allowed: {tolerance:.0e}. Nothing was exported. Please report this "
                f"model, and leave the part in question whole with keep=[...]."
            )
    return found


def _run_unwatched(model: nn.Module, example: Example, training: bool) -> None:
    """torch's encoders have a fused path, which they do not take while we compare."""
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        args, kwargs = as_call(example)
        with untouched(model, training):
            model(*args, **kwargs)


def prove_cut(
    gated: nn.Module, small: nn.Module, example: Example, cut: Callable[[nn.Module], nn.Module]
) -> dict[str, float]:
    """Equal in the models' own precision, or, where that rounds too coarsely, in float64."""
    first = next(tensor for _, tensor in named_tensors(gated) if tensor.is_floating_point())
    if first.dtype == torch.float64:
        return prove_equal(gated, small, example, 1e-10)
    try:
        return prove_equal(gated, small, example, 1e-5)
    except PruneError:
        gated, example = in_double(gated, example)  # cut anew: folding rounds as well
        found = prove_equal(gated, cut(gated), example, 1e-10)
        return {f"{mode}, in float64": value for mode, value in found.items()}


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
            untouched(model, training=False),
            opened(model),
            FlopCounterMode(display=False, custom_mapping=FORGOTTEN) as counter,
        ):
            model(*args, **kwargs)
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
    return int(counter.get_total_flops()) // 2


def in_double(model: nn.Module, example: Example) -> tuple[nn.Module, Example]:
    """A copy of model and example in float64."""
    double = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, example)
    return copied(model).double(), double


def example_for(example: Example, like: Tensor, made_for: torch.dtype) -> Example:
    """The example on the device of a model, and in its precision, if that has changed."""

    def here(x: Tensor) -> Tensor:
        return x.to(like.device, like.dtype if x.dtype == made_for else x.dtype)

    moved: Example = tree_map_only(Tensor, here, example)
    return moved
