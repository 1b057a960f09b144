"""The texts that say why channels are frozen, and what the user can do about it.

A reason names the fact first, then the module and source line of the operation, then the tensor,
then the remedy if there is one. Reasons appear in the table of `print(graph)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..tracing.tape import Op

OUTPUT = "part of the model's output"
REGISTER = "register it with register_buffer so that it is cut together with the channels"
POINTWISE = (
    "only the channels that reach it are frozen: to prune a layer before it, put a pointwise layer "
    "(a 1 x 1 convolution or a linear layer) between them"
)
HEADS = "split the channels into several heads, which can be removed one by one"
HEADS_AS_WHOLE = "merge the heads into one axis before this layer to prune single channels"
BLOCKS = "let a separate layer read each block to prune these channels"
ORIGIN = "put a layer before it that makes the channels"
CONSTANT_INDEX = "only a constant vector of integers (a list in the code, a buffer) can be followed"


class Where(Protocol):
    """Something that a line of a module's code does: an operation, or a decision."""

    @property
    def module(self) -> str:
        """The path of the module."""

    @property
    def where(self) -> str:
        """The module and the source line, for messages."""


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from.

    Attributes:
        text: The same in a few words.
        module: The module that computed the tensor, if an operation did.
        is_constant: True for a tensor that the code spells out or holds.
    """

    text: str
    module: str | None = None
    is_constant: bool = False

    def __str__(self) -> str:
        return self.text


class Reason(str):
    """Why channels are frozen: a text that knows its parts.

    Attributes:
        fact: What is done to the channels.
        modules: The modules whose code does it, or made the tensor concerned.
        refusal: Why that code cannot be rewritten; empty if it was not tried.
        remedy: What the user can do; empty for channels that must stay in any case.
    """

    fact: str
    modules: frozenset[str] = frozenset()
    refusal: str = ""
    remedy: str = ""

    def __new__(cls, text: str = "") -> Reason:
        if isinstance(text, Reason):
            return text
        reason = super().__new__(cls, text)
        reason.fact = text
        return reason


NO_REASON = Reason()  # of prunable channels


def because(
    where: Where | None,
    fact: str,
    *,
    detail: str = "",
    tensor: Origin | None = None,
    refusal: str = "",
    remedy: str = "",
) -> Reason:
    """Return the reason why an operation freezes channels.

    Args:
        where: The operation, or None if no single one is the cause.
        fact: What it does to the channels.
        detail: More about the fact.
        tensor: Which tensor is concerned; its description follows the detail.
        refusal: Why the code cannot be rewritten, if that was tried.
        remedy: What the user can do to make the channels prunable.

    Returns:
        The reason, which names the module and the source line of the operation.

    Example:
        >>> from polarprune.rules import because
        >>> def opaque(flow, op):
        ...     flow.freeze(op.args[0], because(op, "the channels are sorted"))
        >>> class Sorted(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x).erfc()
        >>> model = torch.nn.Sequential(Sorted(4, 8), torch.nn.Linear(8, 2))
        >>> graph = pp.trace(model, torch.randn(1, 4), rules={torch.ops.aten.erfc: opaque})
        >>> print(graph.groups["0"].reason)
        the channels are sorted in 0 ...
    """
    text = f"{fact} in {where.where}" if where else fact
    text += f" (its forward cannot be rewritten: {refusal})" if refusal else ""
    about = " ".join(str(part) for part in (detail, tensor) if part)
    text += f": {about}" if about else ""
    reason = Reason(f"{text}; {remedy}" if remedy else text)
    modules = (where.module if where else None, tensor.module if tensor else None)
    reason.fact, reason.refusal, reason.remedy = fact, refusal, remedy
    reason.modules = frozenset(path for path in modules if path is not None)
    return reason


def unknown_operation(op: Op) -> Reason:
    """Return the reason for an operation that has no rule."""
    packet = f"torch.ops.{op.func.namespace}.{op.name}"
    remedy = f"teach the operation with rules={{{packet}: …}}, see polarprune.rules"
    return because(op, f"channels cannot be followed through {op.func}", remedy=remedy)


def mixes(op: Op) -> Reason:
    """Return the reason for an operation that computes one number from several channels.

    The table of `print(graph)` says for how many channels norms=True is a remedy. It depends on the
    rest of the model, so it is not part of the reason.
    """
    return because(op, f"{op.name} mixes channels", remedy=POINTWISE)


def unknown_origin(op: Op, does: str, tensor: Origin, *, detail: str = "") -> Reason:
    """Return the reason for channels of a tensor that do not come from a known layer.

    Args:
        op: The operation.
        does: What it does with the channels.
        tensor: The tensor.
        detail: More about the fact.
    """
    remedy = for_origin(tensor, ORIGIN)
    fact = f"{does} channels that come from no known layer"
    return because(op, fact, detail=detail, tensor=tensor, remedy=remedy)


def unlabelled(op: Op, tensor: Origin) -> Reason:
    """Return the reason for an operand that varies along the channels but has no labels there."""
    fact = "combined with a tensor that is not a parameter and has no known channels"
    remedy = for_origin(tensor, POINTWISE)
    return because(op, fact, detail=f"{op.name} with", tensor=tensor, remedy=remedy)


def for_origin(tensor: Origin, otherwise: str) -> str:
    """Return the remedy for channels that meet a tensor."""
    return REGISTER if tensor.is_constant else otherwise


def picked_by_index(op: Op) -> Reason:
    """Return the reason for channels that a tensor of indices selects."""
    return because(op, "channels are picked by index", detail=op.name, remedy=CONSTANT_INDEX)
