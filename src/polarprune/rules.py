"""What you need to teach `trace` an operation that it does not know.

Pass `rules={torch.ops.my.op: rule}` to `trace` or `Pruner`. A rule is a function `(flow, op)` that
says what the operation does to channels. `docs/rules.md` explains it with examples that run.

Types:
    Rule: the type of a rule, `Callable[[Flow, Op], None]`.
    Op: one operation of the run, with its arguments (`args`, `kwargs`) and results (`outs`).
    Value: a tensor of the run: its `shape`, and its `name` if it is a parameter or a buffer.
    Flow: the labels of all tensors: `layers`, `on`, `set`, `freeze`, `labels`,
        `add_contraction`.
    Labels: `flow.labels`, which joins and freezes labels (`join`, `freeze`).
    Contraction: an operation that merges channels by a weight, where a gate can act.

Rules to use as they are, or to call from a rule of your own:
    pointwise: the operation treats every element separately, like `relu` or `add`.
    same: the result has the channels of the first argument, like a copy or a cast.
    reduction: the operation reduces the axes that its argument `dim` names, or all, like `mean`.

Functions:
    along: turn a vector of labels into a layer that varies along one axis.
    support: the axes along which a layer varies.
    because: build a reason that names the module and the source line of an operation.
"""

from __future__ import annotations

from .channels.labels import Labels, along, support
from .channels.propagation import Contraction, Flow, Rule
from .channels.reasons import because
from .channels.rules.elementwise import pointwise
from .channels.rules.movement import same
from .channels.rules.reductions import reduction
from .tracing.tape import Op, Value

__all__ = [
    "Contraction",
    "Flow",
    "Labels",
    "Op",
    "Rule",
    "Value",
    "along",
    "because",
    "pointwise",
    "reduction",
    "same",
    "support",
]
