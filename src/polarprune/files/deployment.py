"""A model written for where it will run, and compared with itself there before the file is kept."""

from __future__ import annotations

import io
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from ..errors import PruneError

_CLOSE = 1e-4  # of the largest value of an output: other kernels add up in another order
_SIZES = (1, 2, 5)  # times the batch that is given
Inputs = tuple[Tensor, ...]
Answer = Callable[[Inputs], list[Tensor]]


def deploy(model: nn.Module, inputs: Inputs, file: Path) -> tuple[float, bool]:
    """Write a model as ONNX (`.onnx`) or as a program of torch.export (`.pt2`).

    Returns the largest difference of outputs, as a share of the largest value of each, and whether
    the file takes batches of any size; where the model's code does not allow that, it takes that of
    `inputs`.
    """
    if file.suffix not in FORMATS:
        raise PruneError(f"{file}: give a name that ends in {' or '.join(FORMATS)}.")
    if file.is_dir() or not file.parent.is_dir():
        what = "that is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise PruneError(f"{file}: {what}.")
    model.eval()
    try:
        with tempfile.TemporaryDirectory(dir=file.parent) as folder, torch.no_grad(), _quiet():
            new = Path(folder) / file.name
            program, any_size = _program(model, inputs)
            there = FORMATS[file.suffix](program, inputs, any_size, new)
            sizes = _SIZES if any_size else (1,)
            apart = max(_apart(model, there, _times(inputs, n)) for n in sizes)
            if not apart <= _CLOSE:
                raise PruneError(
                    f"{file}: its outputs would differ from the model's by {apart:.1e} of the "
                    f"largest. Nothing was written."
                )
            new.replace(file)
    except PruneError:
        raise
    except OSError as error:
        raise PruneError(
            f"{file}: it cannot be written: {error.strerror or error}. What is there is kept as it "
            f"was: make room, or give another place."
        ) from error
    except Exception as error:  # of the exporter, or of the runtime
        raise PruneError(f"{file}: this model could not be written so: {_reason(error)}") from error
    return apart, any_size


def _times(inputs: Inputs, count: int) -> Inputs:
    return tuple(torch.cat([x] * count) for x in inputs)


def _program(model: nn.Module, inputs: Inputs) -> tuple[ExportedProgram, bool]:
    """For batches of any size, if the model's code allows that."""
    sizes = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    double = _times(inputs, 2)  # a size of 1 would be taken for a constant
    try:
        return torch.export.export(model, double, dynamic_shapes=sizes), True
    except Exception:  # the size is in the code
        return torch.export.export(model, inputs), False


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch logs when an attempt fails, and warns of in its own code, is not for the user."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = (str(error).strip() or repr(error)).splitlines()
    return re.sub(r"\x1b\[\d+m", "", lines[0])


def _apart(model: nn.Module, there: Answer, inputs: Inputs) -> float:
    wanted = _tensors(model(*(x.clone() for x in inputs)))  # it may write to them
    found = there(tuple(x.clone() for x in inputs))
    shapes = [[tuple(x.shape) for x in some] for some in (wanted, found)]
    if shapes[0] != shapes[1]:
        raise PruneError(f"outputs would have the shapes {shapes[1]} instead of {shapes[0]}.")
    return max((_share(x, y) for x, y in zip(wanted, found, strict=True)), default=0.0)


def _share(wanted: Tensor, found: Tensor) -> float:
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    one, two = wanted.to(wide), found.to(wide)
    differs = (one != two) & ~(one.isnan() & two.isnan())
    gaps = (one - two)[differs].abs()
    if not gaps.numel():
        return 0.0
    largest = one[one.isfinite()].abs()
    share = float(gaps.max()) / (float(largest.max()) if largest.numel() else 1.0)
    return share if share == share else float("inf")


def _tensors(outputs: Any) -> list[Tensor]:
    return [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]


def _onnx(program: ExportedProgram, inputs: Inputs, any_size: bool, file: Path) -> Answer:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  torch's exporter wants it
    except ImportError as error:
        raise PruneError(
            "to write ONNX takes onnx, onnxscript and onnxruntime: pip install polarprune[onnx]"
        ) from error
    names = tuple({0: "batch"} for _ in inputs) if any_size else None
    made = torch.onnx.export(program, inputs, dynamic_shapes=names, dynamo=True, verbose=False)
    assert made is not None
    made.save(file, external_data=False)
    session = onnxruntime.InferenceSession(file)

    def answer(some: Inputs) -> list[Tensor]:
        given = zip(session.get_inputs(), some, strict=True)
        found = session.run(None, {one.name: x.numpy() for one, x in given})
        return [torch.from_numpy(array) for array in found]

    return answer


def _pt2(program: ExportedProgram, inputs: Inputs, any_size: bool, file: Path) -> Answer:
    content = io.BytesIO()
    torch.export.save(program, content)  # to a file: on a full disk torch ends the whole process
    file.write_bytes(content.getvalue())
    loaded = torch.export.load(file).module()
    return lambda some: _tensors(loaded(*some))


FORMATS: dict[str, Callable[[ExportedProgram, Inputs, bool, Path], Answer]] = {
    ".onnx": _onnx,
    ".pt2": _pt2,
}
