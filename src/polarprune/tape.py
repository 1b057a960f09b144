"""Run a model once and write down every ATen operation it performs.

Whatever runs in eager mode is captured, Python control flow included. The tape holds facts only
(operations, shapes, which module and source line); what they mean for channels is `rules`' job.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper
from torch.utils.weak import WeakTensorKeyDictionary

from .errors import PruneError
from .standins import STAND_INS, forget

Mark = Callable[[str, Any], None]
Shim = Callable[[nn.Module, Mark], Callable[..., Any]]
Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@dataclass(eq=False)
class Value:
    """A tensor that was seen: where it came from and its shape, not its contents."""

    shape: tuple[int, ...]
    name: str = ""  # of a parameter or buffer
    stride: tuple[int, ...] = ()
    itemsize: int = 4
    base: Value | None = None  # what it is a view of
    data: Tensor | None = None  # kept for small integer tensors (they may be indices), constants


@dataclass(eq=False)
class Op:
    """One operation. In `args` and `kwargs` a `Value` stands where a tensor stood."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Value]
    module: str
    line: str
    macs: int = 0

    @property
    def name(self) -> str:
        return _name_of(self.func)

    @property
    def where(self) -> str:
        return f"{self.module or 'model'} ({self.line})"

    def inputs(self) -> list[Value]:
        return self._inputs

    @cached_property
    def _inputs(self) -> list[Value]:
        return [value for item in (*self.args, *self.kwargs.values()) for value in _values_in(item)]

    def tensors(self) -> list[Value]:
        """All that it reads and all that it gives."""
        return [*self._inputs, *self.outs]


def _values_in(tree: Any) -> list[Value]:
    if isinstance(tree, Value):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [value for item in tree for value in _values_in(item)]
    return []


@cache
def _name_of(func: Any) -> str:
    return str(func._schema.name).split("::")[-1]


@dataclass(eq=False)
class Tape:
    """The operations of one run, in order, and what came out."""

    ops: list[Op] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    marks: dict[tuple[str, str], list[Value]] = field(default_factory=dict)
    numbers: dict[tuple[str, str], int | float] = field(default_factory=dict)  # marked ones
    ends: dict[tuple[str, str], int] = field(default_factory=dict)  # operations before each mark
    broken: str | None = None  # the module in which the run failed
    computed: bool = False  # with all values, not only the shapes

    @cached_property
    def needed(self) -> set[Value]:
        """Tensors that an output depends on."""
        return {value for op in self.that_matter for value in op.inputs()} | set(self.outputs)

    @cached_property
    def depends_on_data(self) -> bool:
        """True if some shape or number in the run comes from the values in a tensor."""
        return any(
            op.func.namespace != "aten"
            or torch.Tag.data_dependent_output in op.func.tags
            or (torch.Tag.dynamic_output_shape in op.func.tags and op.name != "index")
            or (op.name == "index" and any(_is_mask(value) for value in op.inputs()[1:]))
            for op in self.ops
        )

    @cached_property
    def that_matter(self) -> list[Op]:
        """Operations that an output depends on, and those that write into something."""
        needed, found = set(self.outputs), []
        for op in reversed(self.ops):
            if op.func._schema.is_mutable or any(out in needed for out in op.outs):
                found.append(op)
                needed.update(op.inputs())
                needed.update(value.base for value in op.inputs() if value.base is not None)
        return found[::-1]


def _is_mask(value: Value) -> bool:
    return value.data is not None and value.data.dtype is torch.bool


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module, computed: bool, counts: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts  # MACs, which are those of eval mode
        self.tape = Tape(computed=computed)
        self.stand_ins = {} if computed else STAND_INS
        self.stack: list[str] = []
        self.known = WeakTensorKeyDictionary()
        for name, tensor in named_tensors(model):
            self.known[tensor] = _value(tensor, name)

    def value(self, tensor: Tensor) -> Value:
        found: Value | None = self.known.get(tensor)
        if found is None:
            found = _value(tensor)
            if not tensor.is_floating_point() and not tensor.is_meta and tensor.numel() < 1_000_000:
                found.data = _copied(tensor)
            self.known[tensor] = found
        return found

    def values(self, tree: Any) -> list[Value]:
        return [self.value(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

    def named(self, tree: Any) -> Any:
        """Arguments of an operation, with values in place of tensors."""
        if isinstance(tree, Tensor):
            return self.value(tree)
        if isinstance(tree, (list, tuple)):
            return type(tree)([self.named(item) for item in tree])
        return tree

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stand_in = self.stand_ins.get(func)
        out = stand_in(*args, **kwargs) if stand_in else None
        if out is None:
            out = func(*args, **kwargs)
        packet = func._overloadpacket
        formula = (_FORMULAS.get(packet) or flop_registry.get(packet)) if self.counts else None
        macs = formula(*args, **kwargs, out_val=out) // 2 if formula else 0
        named_args = self.named(tuple(args))
        named_kwargs = {key: self.named(item) for key, item in kwargs.items()}
        outs = [self.value(out)] if isinstance(out, Tensor) else self.values(out)
        if func is _FRESH and out.numel() < _SMALL:
            named_args[0].data = _copied(out)
        if _gives_views(func):
            for value in outs:  # ATen's views are all of their first argument
                value.base = value.base or named_args[0].base or named_args[0]
        module = self.stack[-1] if self.stack else ""
        self.tape.ops.append(Op(func, named_args, named_kwargs, outs, module, _user_line(), macs))
        return out


def _fused_attention(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    return int(2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


# Torch counts attention in whatever kernel, but forgets the fused one for CPUs. Which one runs
# depends on strides, so that a narrower model may take another.
FORGOTTEN = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused_attention}
_FORMULAS = {func: shape_wrapper(formula) for func, formula in FORGOTTEN.items()}

_FRESH = torch.ops.aten.lift_fresh.default  # what torch.tensor(...) in the code becomes
_SMALL = 4096


def _value(tensor: Tensor, name: str = "") -> Value:
    return Value(tuple(tensor.shape), name, tensor.stride(), tensor.element_size())


def _copied(tensor: Tensor) -> Tensor:
    """(Other modes may be active around ours.)"""
    with torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().clone()


@cache
def _gives_views(func: Any) -> bool:
    return any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)


def _user_line() -> str:
    """file:line of the innermost frame that belongs to neither torch nor this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "polarprune.")) and name not in ("torch", "contextlib"):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers; a tensor that has two names is given once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def as_call(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `model(...)` takes, as positional and keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


@contextmanager
def untouched(model: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Run the model inside without a trace: mode, buffers and random state are put back.

    So is what a forward remembers: code that is written down later computes it then, too. And
    hooks, which some libraries put in as the model first runs.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    tables = [
        (table, dict(table))
        for held, _ in attributes
        for key, table in held.items()
        if isinstance(table, dict) and (key == "_buffers" or "_hooks" in key)
    ]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    if training is not None:
        model.train(training)
    gpus = {t.device.index or 0 for _, t in named_tensors(model) if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(gpus)), torch.no_grad():
            yield
    finally:
        for table, entries in [*attributes, *tables]:
            table.clear()
            table.update(entries)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def record(
    model: nn.Module, example: Example, *, training: bool, shims: Mapping[str, Shim] | None = None
) -> Tape:
    """The tape of one run of `model` on `example`, in train or eval mode.

    A shim takes the place of a module's forward during the run, and may mark values by name.
    Values are computed only where the model's code looks at them.
    """
    tape, error = attempt(model, example, training=training, shims=shims)
    if error is not None or tape.depends_on_data:
        tape, error = attempt(model, example, training=training, shims=shims, computed=True)
    if isinstance(error, PruneError):
        raise error
    if error is not None:
        raise PruneError(
            f"{tape.broken or type(model).__name__}: the model does not run on the example "
            f"inputs: {error}. Give inputs of the shape, type and device that model(...) takes."
        ) from error
    if not tape.outputs:
        raise PruneError(
            f"{type(model).__name__}: no tensor is found in the model's output, so nothing could "
            f"be compared. Let forward return what it computes."
        )
    return tape


def attempt(
    model: nn.Module,
    example: Example,
    *,
    training: bool,
    shims: Mapping[str, Shim] | None = None,
    computed: bool = False,
) -> tuple[Tape, Exception | None]:
    """What `record` does, with the tape up to the error if the run fails."""
    args, kwargs = as_call(example)
    recorder = _Recorder(model, computed, counts=not training)
    handles = []
    failed = None
    shimmed = [(model.get_submodule(path), path, shim) for path, shim in (shims or {}).items()]
    own = {module: vars(module).get("forward") for module, _, _ in shimmed}
    for module, path, shim in shimmed:
        module.forward = shim(module, _marker(recorder, path))
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_enter(recorder, name)))
        handles.append(module.register_forward_hook(_leave(recorder), always_call=True))
    try:
        with untouched(model, training), open_attention(), recorder:
            recorder.tape.inputs = recorder.values((args, kwargs))
            recorder.tape.outputs = recorder.values(tensors_in(model(*args, **kwargs)))
    except Exception as error:
        failed = error
    finally:
        forget()
        for handle in handles:
            handle.remove()
        for module, forward in own.items():
            del module.forward  # as_graph refuses modules that have one of their own
            if forward is not None:
                module.forward = forward
    return recorder.tape, failed


def on_host() -> AbstractContextManager[Any]:
    """Whatever the user's default is, labels live on the host."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def open_attention() -> Iterator[None]:
    """Attention in eval mode takes an opaque fused path otherwise."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def tensors_in(out: Any) -> list[Tensor]:
    """All tensors in what a model returned: in containers, and in the fields of plain objects."""
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting = [out]
    while waiting:
        for leaf in tree_leaves(waiting.pop(0)):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif hasattr(leaf, "__dict__") and id(leaf) not in seen and not callable(leaf):
                seen.add(id(leaf))
                waiting.append(vars(leaf))
    return found


def _marker(recorder: _Recorder, path: str) -> Mark:
    def mark(name: str, result: Any) -> None:
        recorder.tape.ends.setdefault((path, name), len(recorder.tape.ops))
        if isinstance(result, (int, float)):
            recorder.tape.numbers.setdefault((path, name), result)
        else:
            recorder.tape.marks.setdefault((path, name), recorder.values(result))

    return mark


def _enter(recorder: _Recorder, name: str) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        recorder.stack.append(name)
        recorder.tape.broken = None

    return hook


def _leave(recorder: _Recorder) -> Any:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        name = recorder.stack.pop()
        if sys.exc_info()[0] is not None and recorder.tape.broken is None:
            recorder.tape.broken = name

    return hook
