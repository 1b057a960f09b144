"""Write a model for a runtime, ONNX or torch.export, and compare the file with the model.

A file is kept only if the runtime computes the outputs of the model, up to rounding.
"""

from __future__ import annotations

import io
import logging
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from ..errors import PruneError
from ..validation.arguments import check_new_file
from ..validation.optional_packages import optional_package

_TOLERANCE = 1e-4  # relative to the largest value of an output
_BATCH_FACTORS = (1, 2, 5)  # batches that are compared, as multiples of the given one
Inputs = tuple[Tensor, ...]
Answer = Callable[[Inputs], list[Tensor]]


@dataclass(frozen=True)
class Deployment:
    """What is known about a file that was written.

    Attributes:
        difference: The largest difference of outputs from the model's, relative to the largest
            value of each output.
        fixed_batch: Why the file accepts only batches of the size that was given, in the words of
            torch; None if it accepts batches of any size.
    """

    difference: float
    fixed_batch: str | None


def deploy(model: nn.Module, inputs: Inputs, file: Path) -> Deployment:
    """Write a model as ONNX (`.onnx`) or as a program of torch.export (`.pt2`).

    Args:
        model: The model; it is set to eval mode.
        inputs: Example inputs. Their first axis is the batch.
        file: The file to write. It is replaced only after the comparison.

    Returns:
        How exact the file is, and whether it accepts batches of any size. Where the model's code
        fixes the size of the batch, the file accepts only that of `inputs`.

    Raises:
        PruneError: If the file cannot be written, the model cannot be exported, or the outputs
            differ. The file that was there is then unchanged.
    """
    check_new_file(file, FORMATS)
    model.eval()
    try:
        with tempfile.TemporaryDirectory(dir=file.parent) as folder, torch.no_grad(), _quiet():
            new = Path(folder) / file.name
            made = _write_and_compare(model, inputs, new)
            if not made.difference <= _TOLERANCE:
                raise PruneError(
                    f"{file}: its outputs would differ from the model's by {made.difference:.1e} "
                    f"of the largest value. No file was written; try the other format."
                )
            new.replace(file)
    except PruneError:
        raise
    except OSError as error:
        raise PruneError(
            f"{file}: it cannot be written: {error.strerror or error}. The file that was there is "
            f"unchanged: free some space, or give another path."
        ) from error
    except Exception as error:  # the exporter or the runtime may raise anything
        raise PruneError(
            f"{file}: this model could not be exported: {_first_line(error)}"
        ) from error
    return made


def _write_and_compare(model: nn.Module, inputs: Inputs, file: Path) -> Deployment:
    """Write the file, and compare its outputs with the model's for several sizes of the batch."""
    program, fixed_batch = _exported(model, inputs)
    answer = FORMATS[file.suffix](program, inputs, fixed_batch is None, file)
    factors = (1,) if fixed_batch else _BATCH_FACTORS
    differences = [_difference(model, answer, _repeated(inputs, n)) for n in factors]
    return Deployment(max(differences), fixed_batch)


def _repeated(inputs: Inputs, count: int) -> Inputs:
    return tuple(torch.cat([x] * count) for x in inputs)


def _exported(model: nn.Module, inputs: Inputs) -> tuple[ExportedProgram, str | None]:
    """Export for batches of any size, or for one size and with the reason why it is fixed."""
    sizes = tuple({0: torch.export.Dim("batch")} for _ in inputs)
    double = _repeated(inputs, 2)  # torch would treat a size of 1 as a constant
    try:
        return torch.export.export(model, double, dynamic_shapes=sizes), None
    except Exception as error:  # that torch, or the model on the double batch, may raise
        return torch.export.export(model, inputs), _first_line(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what torch logs in this thread, and its warnings about its own code.

    Warnings of other modules are shown. Other threads log as before.
    """
    mine, handlers = threading.get_ident(), _log_handlers()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != mine

    for handler in handlers:
        handler.addFilter(is_of_another_thread)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\b|onnx")
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch, through copyreg
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_of_another_thread)


def _log_handlers() -> list[logging.Handler]:
    """Return all handlers: torch gives one to each of its loggers."""
    known = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(one for one in known if isinstance(one, logging.Logger))]
    handlers = [handler for logger in loggers for handler in logger.handlers]
    return [*handlers, *([logging.lastResort] if logging.lastResort else [])]


def _first_line(error: BaseException) -> str:
    """Return the first line of the original cause, without terminal colours."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = (str(error).strip() or repr(error)).splitlines()
    return re.sub(r"\x1b\[\d+m", "", lines[0])


# --- comparison -----------------------------------------------------------------------------------


def _difference(model: nn.Module, answer: Answer, inputs: Inputs) -> float:
    """Return the largest relative difference over all outputs."""
    wanted = _tensors(model(*(x.clone() for x in inputs)))  # a model may write to its inputs
    found = answer(tuple(x.clone() for x in inputs))
    shapes = [[tuple(x.shape) for x in outputs] for outputs in (wanted, found)]
    if shapes[0] != shapes[1]:
        raise PruneError(f"outputs would have the shapes {shapes[1]} instead of {shapes[0]}.")
    pairs = zip(wanted, found, strict=True)
    return max((_relative_difference(x, y) for x, y in pairs), default=0.0)


def _relative_difference(wanted: Tensor, found: Tensor) -> float:
    """Compare one output; equal infinities and two NaNs count as equal."""
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    one, two = wanted.to(wide), found.to(wide)
    differs = (one != two) & ~(one.isnan() & two.isnan())
    gaps = (one - two)[differs].abs()
    if not gaps.numel():
        return 0.0
    largest = one[one.isfinite()].abs()
    share = float(gaps.max()) / (float(largest.max()) if largest.numel() else 1.0)
    return share if share == share else float("inf")


def _tensors(outputs: object) -> list[Tensor]:
    return [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]


# --- formats --------------------------------------------------------------------------------------


def _onnx(program: ExportedProgram, inputs: Inputs, any_batch: bool, file: Path) -> Answer:
    """Write ONNX, and return what onnxruntime computes from the file."""
    optional_package("onnxscript", needed_for="ONNX export", extra="onnx")  # for torch's exporter
    onnxruntime = optional_package("onnxruntime", needed_for="ONNX export", extra="onnx")
    names = tuple({0: "batch"} for _ in inputs) if any_batch else None
    made = torch.onnx.export(program, inputs, dynamic_shapes=names, dynamo=True, verbose=False)
    assert made is not None
    made.save(file, external_data=False)
    session = onnxruntime.InferenceSession(file)

    def answer(given: Inputs) -> list[Tensor]:
        pairs = zip(session.get_inputs(), given, strict=True)
        found = session.run(None, {one.name: x.numpy() for one, x in pairs})
        return [torch.from_numpy(array) for array in found]

    return answer


def _pt2(program: ExportedProgram, inputs: Inputs, any_batch: bool, file: Path) -> Answer:
    """Write a program of torch.export, and return what it computes after loading."""
    content = io.BytesIO()
    torch.export.save(program, content)  # to a file, torch would end the process on a full disk
    file.write_bytes(content.getvalue())
    loaded = torch.export.load(file).module()
    return lambda given: _tensors(loaded(*given))


FORMATS: dict[str, Callable[[ExportedProgram, Inputs, bool, Path], Answer]] = {
    ".onnx": _onnx,
    ".pt2": _pt2,
}
