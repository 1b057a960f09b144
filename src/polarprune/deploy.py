"""A model written for where it will run, and compared with itself there before the file is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .errors import PruneError

_CLOSE = 1e-4  # of the largest output: other kernels add up in another order
Inputs = tuple[Tensor, ...]
Answer = Callable[[Inputs], list[Tensor]]


def deploy(model: nn.Module, inputs: Inputs, file: Path) -> tuple[float, bool]:
    """Write a model as ONNX (`.onnx`) or as a program of torch.export (`.pt2`).

    Returns the largest difference of outputs, as a share of the largest output, and whether the
    file takes batches of any size; where the model does not allow that, it takes that of `inputs`.
    """
    if file.suffix not in FORMATS:
        raise PruneError(f"{file}: give a name that ends in {' or '.join(FORMATS)}.")
    if not file.parent.is_dir():
        raise PruneError(f"{file}: there is no folder {file.parent}.")
    model.eval()
    new = file.with_name(f"new-{file.name}")
    double = tuple(torch.cat([x, x]) for x in inputs)  # a size of 1 would be taken for a constant
    try:
        with torch.no_grad():
            try:
                there, any_size = FORMATS[file.suffix](model, double, True, new), True
                apart = max(_apart(model, there, some) for some in (double, inputs))
            except PruneError:
                raise
            except Exception:  # the size of the batch is in its code
                there, any_size = FORMATS[file.suffix](model, inputs, False, new), False
                apart = _apart(model, there, inputs)
    except PruneError:
        raise
    except Exception as error:  # of the exporter, or of the runtime
        why = (str(error).strip() or repr(error)).splitlines()[0]
        raise PruneError(f"{file}: this model could not be written so ({why}).") from error
    else:
        if not apart <= _CLOSE:
            raise PruneError(
                f"{file}: its outputs would differ from the model's by {apart:.1e} of the largest. "
                f"Nothing was written."
            )
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    return apart, any_size


def _apart(model: nn.Module, there: Answer, inputs: Inputs) -> float:
    wanted, found = _tensors(model(*inputs)), there(inputs)
    shapes = [[x.shape for x in some] for some in (wanted, found)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"outputs of {shapes[1]} instead of {shapes[0]}")
    largest = max(float(x.double().abs().max()) for x in wanted)
    pairs = zip(wanted, found, strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs) / (largest or 1.0)


def _tensors(outputs: Any) -> list[Tensor]:
    return [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]


def _onnx(model: nn.Module, inputs: Inputs, any_size: bool, file: Path) -> Answer:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  torch's exporter wants it
    except ImportError as error:
        raise PruneError(
            "to write ONNX takes onnx, onnxscript and onnxruntime: pip install polarprune[onnx]"
        ) from error
    sizes = tuple({0: "batch"} for _ in inputs) if any_size else None
    program = torch.onnx.export(model, inputs, dynamic_shapes=sizes, dynamo=True, verbose=False)
    assert program is not None
    program.save(file, external_data=False)
    session = onnxruntime.InferenceSession(file)
    names = [one.name for one in session.get_inputs()]

    def answer(some: Inputs) -> list[Tensor]:
        given = {name: x.numpy() for name, x in zip(names, some, strict=True)}
        return [torch.from_numpy(found) for found in session.run(None, given)]

    return answer


def _program(model: nn.Module, inputs: Inputs, any_size: bool, file: Path) -> Answer:
    sizes = tuple({0: torch.export.Dim("batch")} for _ in inputs) if any_size else None
    torch.export.save(torch.export.export(model, inputs, dynamic_shapes=sizes), file)
    loaded = torch.export.load(file).module()
    return lambda some: _tensors(loaded(*some))


FORMATS: dict[str, Callable[[nn.Module, Inputs, bool, Path], Answer]] = {
    ".onnx": _onnx,
    ".pt2": _program,
}
