"""Find out which integer attributes of its modules a model's forward reads.

These need no further search: trial cuts have shown which width they follow.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..errors import reason_given
from ..rewriting.captured_forward import Refused
from ..surgery.proof import eval_answer
from ..torch_internals.class_swaps import derive_class
from ..tracing.copying import copy_model
from ..tracing.model_state import Example

Attribute = tuple[str, str]  # path of the module, name of the attribute


def attributes_read(
    model: nn.Module, example: Example, attributes: set[Attribute]
) -> set[Attribute] | Refused:
    """Return which of these attributes are read when the model runs on the example.

    A copy of the model runs, and its modules note what is read. If that is impossible, the result
    is the reason.
    """
    read: set[Attribute] = set()
    if not attributes:
        return read
    try:
        copy = copy_model(model)
        for path in {path for path, _ in attributes}:
            names = {name for owner, name in attributes if owner == path}
            module = copy.get_submodule(path)
            derive_class(module, {"__getattribute__": _noting(type(module), path, names, read)})
        eval_answer(copy, example)
    except Exception as error:  # a class may not allow subclasses, or copies of its instances
        return Refused(reason_given(error))
    return read


def _noting(
    family: type[nn.Module], path: str, names: set[str], read: set[Attribute]
) -> Callable[[nn.Module, str], object]:
    """Return a `__getattribute__` that notes reads of these names."""

    def getattribute(module: nn.Module, name: str) -> object:
        if name in names:
            read.add((path, name))
        return family.__getattribute__(module, name)

    return getattribute
