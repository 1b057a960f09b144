"""Match the arguments of a call with those of a captured graph.

A graph was captured for one call, such as `block(x, mask=m)`. `block(x, m)` means the same, and so
does a call that spells out an argument with its default value. All these calls run the same graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from ..errors import PruneError
from ..tracing.model_state import Args, Kwargs
from .call_form import flatten
from .captured_forward import PLAIN_TYPES, CapturedForward


def form_of(args: Args, kwargs: Kwargs) -> str:
    """Return a string that is equal for two calls if one graph can run both."""
    leaves, form = flatten((args, kwargs))
    return f"{form} {[leaf if isinstance(leaf, PLAIN_TYPES) else type(leaf) for leaf in leaves]}"


def graph_arguments(
    captured: CapturedForward, module: nn.Module, args: Args, kwargs: Kwargs, owner: str
) -> list[object]:
    """Return the inputs of the graph for a call of the module.

    Args:
        captured: The graph.
        module: The module.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
        owner: The name of the module in messages.

    Raises:
        PruneError: The call has another structure than the one that was captured.
    """
    for call in spellings(type(module).forward, args, kwargs):
        leaves, form = flatten(call)
        if form == captured.form and _has_values(leaves, captured.fixed):
            return [leaf for i, leaf in enumerate(leaves) if str(i) not in captured.fixed]
    raise PruneError(
        f"{owner}: called with different arguments than the example, for which its "
        f"forward was rewritten. Trace with an example that calls it as you do."
    )


def _has_values(leaves: Sequence[object], fixed: Mapping[str, object]) -> bool:
    """Return whether all arguments except tensors have the values of the example."""
    return all(
        int(number) < len(leaves)
        and type(leaves[int(number)]) is type(value)
        and leaves[int(number)] == value
        for number, value in fixed.items()
    )


def spellings(
    function: Callable[..., object], args: Args, kwargs: Kwargs
) -> Iterator[tuple[Args, Kwargs]]:
    """Yield a call of a method, then other calls that mean the same.

    They pass arguments by position or by keyword, and leave out defaults or spell them out.
    """
    yield args, kwargs
    parameters = list(inspect.signature(function).parameters.values())[1:]
    plain = all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
    if not plain or len(args) > len(parameters):
        return
    given = {**{one.name: value for one, value in zip(parameters, args, strict=False)}, **kwargs}
    full = {one.name: given.get(one.name, one.default) for one in parameters}
    if not given.keys() <= full.keys() or any(v is inspect.Parameter.empty for v in full.values()):
        return  # the method would not accept this call
    defaults = {one.name: one.default for one in parameters}
    short = {name: v for name, v in full.items() if not _is_default(v, defaults[name])}
    for chosen in (short, full):
        yield from _by_position_and_keyword(chosen, list(defaults))


def _by_position_and_keyword(chosen: Kwargs, order: list[str]) -> Iterator[tuple[Args, Kwargs]]:
    """Yield every way to pass the first of these arguments by position, the rest by keyword."""
    listed = list(chosen.items())
    for count in range(len(chosen) + 1):
        if [name for name, _ in listed[:count]] == order[:count]:
            yield tuple(value for _, value in listed[:count]), dict(listed[count:])


def _is_default(value: object, default: object) -> bool:
    plain = isinstance(value, (*PLAIN_TYPES, int)) and type(value) is type(default)
    return value is default or (plain and bool(value == default))
