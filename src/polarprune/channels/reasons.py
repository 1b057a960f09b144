"""The texts that say why channels are frozen, and what the user can do about it.

A reason names the fact first, then the module and source line of the operation, then the tensor,
then the remedy if there is one. Reasons appear in the table of `print(graph)`.
"""

from __future__ import annotations

from ..tracing.tape import Op

OUTPUT = "part of the model's output"
REGISTER = "register it with register_buffer so that it is cut together with the channels"
POINTWISE = (
    "only the channels that reach it are frozen: to prune a layer before it, put a pointwise layer "
    "(a 1 x 1 convolution or a linear layer) between them"
)
HEADS = "split the channels into several heads, which can be removed one by one"
HEADS_AS_WHOLE = "merge the heads into one axis before this layer to prune single channels"
ORIGIN = "put a layer before it that makes the channels"
CONSTANT_INDEX = "only a constant vector of integers (a list in the code, a buffer) can be followed"


def because(op: Op, fact: str, *, detail: str = "", remedy: str = "") -> str:
    """Return the reason why an operation freezes channels.

    Args:
        op: the operation.
        fact: what it does to the channels.
        detail: which tensor is concerned.
        remedy: what the user can do to make the channels prunable.

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
    text = f"{fact} in {op.where}"
    text += f": {detail}" if detail else ""
    return f"{text}; {remedy}" if remedy else text


def unknown_operation(op: Op) -> str:
    """Return the reason for an operation that has no rule."""
    packet = f"torch.ops.{op.func.namespace}.{op.name}"
    remedy = f"teach the operation with rules={{{packet}: …}}, see polarprune.rules"
    return because(op, f"channels cannot be followed through {op.func}", remedy=remedy)


def mixes(op: Op) -> str:
    """Return the reason for an operation that computes one number from several channels.

    The table of `print(graph)` says for how many channels norms=True is a remedy. It depends on the
    rest of the model, so it is not part of the reason.
    """
    return because(op, f"{op.name} mixes channels", remedy=POINTWISE)


def unlabelled(op: Op, tensor: str) -> str:
    """Return the reason for an operand that varies along the channels but has no labels there."""
    fact = "meets a tensor that is not a parameter and has no channels"
    detail = f"{op.name} with {tensor}"
    return because(op, fact, detail=detail, remedy=for_origin(tensor, POINTWISE))


def for_origin(tensor: str, otherwise: str) -> str:
    """Return the remedy for channels that meet a tensor, given what `Flow.describe` says of it."""
    return REGISTER if tensor.startswith("a constant") else otherwise


def picked_by_index(op: Op) -> str:
    """Return the reason for channels that a tensor of indices selects."""
    return because(op, "channels are picked by index", detail=op.name, remedy=CONSTANT_INDEX)
