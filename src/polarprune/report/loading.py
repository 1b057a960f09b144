"""How to load the small model of a report: the name of its class, and the lines of code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

from .facts import FILE

if TYPE_CHECKING:
    from .report import Report


def class_name(model: nn.Module) -> str:
    """Return the dotted name by which the class of a model can be imported, if it can.

    A model whose forward was rewritten has a subclass that no module holds; then it is the first
    base class that one does. A class of a script or of a function is given by its name alone.
    """
    for family in type(model).__mro__:
        module, name = family.__module__, family.__qualname__
        if family is nn.Module or "<locals>" in name:
            return family.__name__
        if getattr(sys.modules.get(module), name, None) is family:
            return name if module == "__main__" else f"{_public(module, family)}.{name}"
    return type(model).__name__


def _public(module: str, family: type) -> str:
    """Return the shortest package that holds a class: `torch.nn` for `torch.nn.modules.linear`."""
    parts = module.split(".")
    packages = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    held = (p for p in packages if getattr(sys.modules.get(p), family.__name__, None) is family)
    return next(held, module)


def loading_lines(report: Report) -> list[str]:
    """Return the code that loads the small model; empty before the export, or without a class."""
    if not (report.proof and report.model):
        return []
    module, _, name = report.model.rpartition(".")
    make = report.results.get("make") or {
        "imports": f"from {module} import {name}" if module else "",
        "call": f"{name}(...)",
    }
    file = report.results.get("file")
    saving = [] if file else [f'pp.save(small, "{FILE}")', ""]
    remark = ["# (...): the same arguments as before pruning"] if "(...)" in make["call"] else []
    load = f'small = pp.load("{file or FILE}", model={make["call"]})'
    imports = [line for line in ("import polarprune as pp", make["imports"]) if line]
    return [*imports, "", *saving, *remark, load]
