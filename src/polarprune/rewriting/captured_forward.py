"""A module's forward as a graph that can be edited and run.

How a graph is made is `capture`'s business, how it is stored that of `stored_graphs`.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..errors import PruneError
from .interpreter import runner

CODE = "polarprune_code"  # the graph that a forward runs
LONGEST = 4096  # entries of a vector of integers that code is re-emitted with
PLAIN = (bool, str, float, torch.dtype, torch.device, type(None))


@dataclass
class CapturedForward:
    """What a module computes for a call of one form, in train and in eval mode."""

    form: str | None  # of the arguments, as torch's pytree writes it; None: as they are named
    fixed: dict[str, Any]  # arguments that are no tensors: number of the leaf -> value
    graphs: dict[str, fx.Graph]  # "train", "eval"

    def leaves(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of the graph, from those of a call, however they are written."""
        for call in spellings(type(module).forward, args, kwargs):
            leaves, form = pytree.tree_flatten(call)
            if pytree.treespec_dumps(form) == self.form and all(
                int(number) < len(leaves)
                and type(leaves[int(number)]) is type(value)
                and leaves[int(number)] == value
                for number, value in self.fixed.items()
            ):
                return [leaf for i, leaf in enumerate(leaves) if str(i) not in self.fixed]
        raise PruneError(
            f"{type(module).__name__}: called in another form than in the example, for which the "
            f"code was re-emitted. Trace with an example of the form in use."
        )

    @property
    def simple(self) -> int | None:
        """How many arguments it takes, if these are tensors one after the other."""
        count = sum(node.op == "placeholder" for node in self.graphs["train"].nodes)
        _, form = pytree.tree_flatten(((0,) * count, {}))
        fits = self.form is None or pytree.treespec_dumps(form) == self.form
        return count if not self.fixed and fits else None

    @property
    def only(self) -> fx.Graph | None:
        """The graph, if both modes have the same."""
        train, evaluated = self.graphs["train"], self.graphs["eval"]
        return train if str(train) == str(evaluated) else None


def spellings(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A call of a method, and others that mean the same: by place, by name, with or without what is
    as by default."""
    yield args, kwargs
    parameters = list(inspect.signature(function).parameters.values())[1:]
    plain = all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
    if not plain or len(args) > len(parameters):
        return
    given = {**{one.name: value for one, value in zip(parameters, args, strict=False)}, **kwargs}
    full = {one.name: given.get(one.name, one.default) for one in parameters}
    if not given.keys() <= full.keys() or any(v is inspect.Parameter.empty for v in full.values()):
        return  # not a call that the method would take
    short = {one.name: full[one.name] for one in parameters
             if not _alike(full[one.name], one.default)}  # fmt: skip
    for some in (short, full):
        listed = list(some.items())
        for count in range(len(some) + 1):
            if [name for name, _ in listed[:count]] == [one.name for one in parameters[:count]]:
                yield tuple(value for _, value in listed[:count]), dict(listed[count:])


def _alike(one: Any, other: Any) -> bool:
    plain = isinstance(one, (*PLAIN, int)) and type(one) is type(other)
    return one is other or (plain and bool(one == other))


def form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What two calls must have in common for one graph to do."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    return f"{form} {[leaf if isinstance(leaf, PLAIN) else type(leaf) for leaf in leaves]}"


# --- code that a graph cannot hold ----------------------------------------------------------------


@contextmanager
def nothing_lost(module: nn.Module, busy: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Raises where the module's code, run inside to be written down, does what no graph holds:
    it switches gradients or autocast, calls a torch.autograd.Function, throws Python's dice, or
    leaves something on self.

    A table that it looks for first, and makes only if it is not there, is no loss: it is made anew.
    While `busy()` other code runs (that of children), which is not written down.
    """
    tables = (vars(module), module._buffers, module._parameters)
    before = [(table, dict(table)) for table in tables]
    held: list[Any] = [(x, x.copy()) for key, x in vars(module).items()
                       if type(x) in (list, dict) and key[0] != "_"]  # fmt: skip
    own = [(kind, name, vars(kind)[name]) for kind, name in _SWITCHES]
    dice = random.getstate()
    for kind, name, method in own:
        setattr(kind, name, _refusing(method, busy))
    try:
        with _looked_for(module) as first:
            yield
        lost = [len(x) != len(old) for x, old in held if isinstance(x, list)]
        for table, old in before:
            changed = [k for k in {*table, *old} if not _same(table.get(k), old.get(k))]
            lost += [table is not tables[0] or k not in first or _number(table.get(k))
                     for k in changed]  # fmt: skip
        if any(lost) or random.getstate() != dice:
            raise PruneError("code that leaves something on self, or throws dice")
    finally:
        random.setstate(dice)
        for kind, name, method in own:
            setattr(kind, name, method)
        for table, old in (*before, *held):
            table.clear()
            table.update(old) if isinstance(table, dict) else table.extend(old)


@contextmanager
def _looked_for(module: nn.Module) -> Iterator[set[str]]:
    """The attributes that code inside reads before it sets them."""
    first, written, family = set[str](), set[str](), type(module)

    def read(self: nn.Module, name: str) -> Any:
        if name not in written:
            first.add(name)
        return family.__getattribute__(self, name)

    def write(self: nn.Module, name: str, value: Any) -> None:
        written.add(name)
        family.__setattr__(self, name, value)

    watched = {"__getattribute__": read, "__setattr__": write}
    with suppress(Exception):  # a class that minds being derived from
        module.__class__ = type(family.__name__, (family,), watched)
    try:
        yield first
    finally:
        module.__class__ = family


_SWITCHES = (
    (torch.autocast, "__enter__"), (torch.inference_mode, "__enter__"),
    (torch.no_grad, "__enter__"), (torch.enable_grad, "__enter__"),
    (torch.set_grad_enabled, "__init__"), (torch.autograd.Function, "apply"),
)  # fmt: skip


def _refusing(method: Any, busy: Callable[[], bool]) -> Any:
    inner = getattr(method, "__func__", method)

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not busy():
            raise PruneError(f"code with {inner.__qualname__}")
        return inner(*args, **kwargs)

    return classmethod(wrapper) if isinstance(method, classmethod) else wrapper


def _number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _same(one: Any, other: Any) -> bool:
    return one is other or (_number(one) and _number(other) and one == other)


# --- running --------------------------------------------------------------------------------------


def with_forward(
    module: nn.Module, captured: CapturedForward, *, from_file: bool = False
) -> nn.Module:
    """The same module, of a subclass of its class that computes what the graphs say."""
    return with_method(module, forward_of(captured, from_file=from_file))


def forward_of(captured: CapturedForward, *, from_file: bool = False) -> Callable[..., Any]:
    functions = {mode: runner(g, from_file=from_file) for mode, g in captured.graphs.items()}
    simple = captured.simple
    leaves = _by_name(captured) if captured.form is None else captured.leaves

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = functions["train" if self.training else "eval"]
        if len(args) == simple and not kwargs:  # nothing that torch.compile would stumble on
            return function(self, *args)
        return function(self, *leaves(self, args, kwargs))

    if captured.form is None:
        setattr(forward, CODE, captured.graphs["train"])  # fx could not write it down again
    return forward


def _by_name(captured: CapturedForward) -> Callable[..., list[Any]]:
    """The arguments of the graph, from those of a call: by the names of the placeholders."""
    inputs = [node for node in captured.graphs["train"].nodes if node.op == "placeholder"]
    names = [str(node.target) for node in inputs]
    defaults = {str(node.target): node.args[0] for node in inputs if node.args}

    def leaves(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        twice = [name for name in names[: len(args)] if name in kwargs]
        if len(args) > len(names) or twice or sorted(given) != sorted(names):
            raise TypeError(f"{type(module).__name__} takes the arguments {', '.join(names)}")
        return [given[name] for name in names]

    return leaves


def with_method(
    module: nn.Module, forward: Callable[..., Any], *, widths_change: bool = False
) -> nn.Module:
    """Of a subclass of its class that has this forward; numbers that it would not look at may not
    change, or whole numbers only."""
    family = type(module)
    vars(module).pop("forward", None)  # a method that it chose would come before its class

    def set_unless_fixed(self: nn.Module, name: str, value: Any) -> None:
        known = plain_attributes(self)
        free = widths_change and type(value) is int
        if name in known and value != known[name] and not free:
            raise PruneError(
                f"{family.__name__}.{name} = {value!r}: the code of this module was re-emitted "
                f"with {known[name]!r}, and would go on with that. Set it before."
            )
        family.__setattr__(self, name, value)

    with suppress(TypeError, ValueError):  # torch.export goes by it
        forward.__signature__ = inspect.signature(family.forward)  # type: ignore[attr-defined]
    methods = {"forward": forward, "__setattr__": set_unless_fixed}
    module.__class__ = type(family.__name__, (family,), methods)
    return module


def fixed_values(module: nn.Module) -> dict[str, Any]:
    """All values of a module that re-emitted code goes on with as they were."""
    tensors = {k: v for k, v in (*vars(module).items(), *module._buffers.items())
               if isinstance(v, Tensor) and v.dim() == 1 and v.numel() <= LONGEST}  # fmt: skip
    orders = {k: v.tolist() for k, v in tensors.items() if v.dtype == torch.int64 and not v.is_meta}
    return {**plain_attributes(module), **orders}


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Plain values that a module holds, which its code may read."""
    kinds = (bool, int, float, str)
    return {k: v for k, v in vars(module).items() if isinstance(v, kinds) and k != "training"}
