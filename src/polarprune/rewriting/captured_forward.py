"""The result of capturing a module's forward: its graphs, or the reason why there are none.

`capture` makes a `CapturedForward`, `resize`, `remove_branches` and `weighted_norms` edit its
graphs, `stored_graphs` turns it into plain data, and `installed_forward` makes a module run it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..channels.notes import Note, folded
from .call_form import Form, positional

# Arguments of these types become part of the graph; the graph is valid for these values only.
PLAIN_TYPES = (bool, str, float, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class Refused:
    """The reason why something could not be captured, rewritten or removed."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def notes_of(refused: Mapping[str, Refused], consequence: str) -> list[Note]:
    """Return one note for each reason, which names the first module and counts the others.

    >>> notes_of({"a": Refused("why"), "b": Refused("why")}, "its forward is kept")
    ['a (and 1 more): its forward is kept: why']
    """
    return folded(
        Note(f"{consequence}: {one.reason}", [path or "the model"]) for path, one in refused.items()
    )


@dataclass
class CapturedForward:
    """A module's forward as two graphs, for calls with one structure of arguments.

    Attributes:
        form: The structure of `(args, kwargs)`, see `call_form`. None if the graph takes its
            arguments by the names of its placeholders.
        fixed: The arguments that are not tensors: index of the leaf -> value. A call with other
            values needs another graph.
        graphs: The operations in `"train"` and in `"eval"` mode.
    """

    form: Form | None
    fixed: dict[str, object]
    graphs: dict[str, fx.Graph]

    def copy(self) -> CapturedForward:
        """Return a copy whose graphs can be edited."""
        graphs = {mode: copy.deepcopy(graph) for mode, graph in self.graphs.items()}
        return CapturedForward(self.form, dict(self.fixed), graphs)

    @property
    def positional_count(self) -> int | None:
        """The number of arguments if all are tensors passed by position, else None."""
        count = sum(node.op == "placeholder" for node in self.graphs["train"].nodes)
        fits = self.form is None or self.form == positional(count)
        return count if not self.fixed and fits else None

    @property
    def only(self) -> fx.Graph | None:
        """The graph if train and eval mode have the same one, else None."""
        train, evaluated = self.graphs["train"], self.graphs["eval"]
        return train if str(train) == str(evaluated) else None
