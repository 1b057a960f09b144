"""Run a model once and write down every ATen operation it performs.

Whatever runs in eager mode is captured, Python control flow included. Products are not computed
(`standins`), unless something depends on values: then the run is repeated with all of them.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

from ..errors import PruneError
from .shape_only import STAND_INS, release_stand_ins
from .tape import (
    Example,
    Mark,
    Op,
    Shim,
    Tape,
    Value,
    as_call,
    name_of,
    named_tensors,
    opened,
    tells,
    tensors_in,
    untouched,
)
from .watched_sizes import (
    SizeLog,
    plain,
    watch_attributes,
    watched_count,
    watched_size,
    watched_sizes,
)


class _Recorder(TorchDispatchMode):
    def __init__(
        self, model: nn.Module, example: Any, *, computed: bool, brief: bool, counts: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.brief, self.counts = brief, counts
        self.busy = False  # it reads shapes itself
        self.tape = Tape(computed=computed)
        self.stand_ins = {} if computed else STAND_INS
        self.stack: list[str] = []
        self.known: dict[int, tuple[Callable[[], Tensor | None], Value]] = {}  # by id, while alive
        for name, tensor in named_tensors(model):
            value = self._know(tensor, _value(tensor, name))
            if value.is_integer and not tensor.is_meta and tensor.numel() < _SMALL:
                value.data = _copied(tensor)
        named = [value for _, value in self.known.values()]
        self.tape.inputs = self.values(example)
        # Values that are what they would be: the example, integers of the model, what comes of
        # these. Not its floats: the weights of a trial cut are only shapes.
        self.real = {*self.tape.inputs, *(value for value in named if value.is_integer)}
        self.made: set[Value] = set()  # in this run; all others are the model's or the user's
        self.before: list[tuple[Tensor, Tensor]] = []  # what was in those, if they are written to
        self.seeds: tuple[int, ...] = ()  # of the default generators, as the run begins
        self.tape.sizes = SizeLog(lambda: self.stack[-1] if self.stack else "")
        attention = nn.MultiheadAttention
        self.tape.excused = {k for k, m in model.named_modules() if type(m) is attention}

    def _know(self, tensor: Tensor, value: Value) -> Value:
        self.known[id(tensor)] = weakref.ref(tensor), value
        return value

    def _seen(self, tensor: Tensor) -> Value | None:
        alive, value = self.known.get(id(tensor), _NOBODY)
        return value if alive() is tensor else None

    def value(self, tensor: Tensor) -> Value:
        found = self._seen(tensor)
        if found is None:
            before, self.busy = self.busy, True
            found = self._know(tensor, _value(tensor))
            if found.is_integer and not tensor.is_meta and tensor.numel() < 1_000_000:
                found.data = _copied(tensor) if tensor.numel() else tensor
            self.busy = before
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
        for position, name in _written(func):
            self._keep(args[position] if position < len(args) else kwargs.get(name))
        stand_in = self.stand_ins.get(func)
        out: Any = stand_in(*args, **kwargs) if stand_in else None
        stood_in = out is not None
        if not stood_in:
            try:
                out = func(*args, **kwargs)
            except Exception:  # which the model's code may catch
                self.tape.looked = True
                raise
        named_args = self.named(tuple(args))
        named_kwargs = {key: self.named(item) for key, item in kwargs.items()}
        outs = [self.value(out)] if isinstance(out, Tensor) else self.values(out)
        if func is _FRESH and out.numel() < _SMALL:
            named_args[0].data = _copied(out)
        if torch.Tag.inplace_view in func.tags:  # the same tensor has another shape now
            outs = [self._know(out, _value(out))]
            outs[0].base = named_args[0].root
        if _gives_views(func):
            for value in outs:  # ATen's views are all of their first argument
                value.base = value.base or named_args[0].base or named_args[0]
        op = Op(func, named_args, named_kwargs, outs, self.stack[-1] if self.stack else "")
        op.seeded = _draws(func) and (kwargs.get("generator") is not None or _seeds() != self.seeds)
        if not self.brief:
            op.line = _user_line()
            op.macs = _macs(func, args, kwargs, out) if self.counts else 0
        self.tape.ops.append(op)
        self.tape.told += tells(op)
        self.made.update(outs)
        if not self.tape.computed:
            self._judge(op, stood_in)
        return out

    def _keep(self, given: Any) -> None:
        """What is about to be written to is put back after the run, if it was there before."""
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor):
                value = self._seen(tensor)
                if value is None or value.root not in self.made:
                    self.before.append((tensor, _copied(tensor)))
                    if value is None or not (value.root.name or value.root in self.tape.inputs):
                        self.tape.looked = True  # who knows what else lies there (x.data)

    def finish(self, out: Any) -> None:
        """Note what was returned, and what the model's code stores without returning it."""
        self.tape.outputs = self.values(out)
        alive = {value for reference, value in self.known.values() if reference() is not None}
        self.tape.stored = [
            value
            for value in dict.fromkeys(self.tape.unread())
            if value in alive and not (value.root.name or value.root in self.tape.inputs)
        ]

    def _judge(self, op: Op, stood_in: bool) -> None:
        """Integers decide what is computed (indices, lengths, choices): none may be made up."""
        inputs = op.inputs()
        made_up = [value for value in inputs if value.root not in self.real]
        if op.func is _FRESH or not (stood_in or made_up) or _reads_the_shape(op.func):
            self.real.update(value.root for value in op.outs)
            return
        if op.func._schema.is_mutable:
            self.real.difference_update(value.root for value in inputs)
        # (The indices of a maximum come after it, and perhaps nobody ever reads them.)
        whole = any(value.is_integer for value in (*made_up, *op.outs[:1]))
        self.tape.looked |= whole and not _gives_views(op.func)


class _Watch(TorchFunctionMode):
    """Notices code that reads values past the dispatcher, and what it does with sizes."""

    def __init__(self, recorder: _Recorder, sizes: bool) -> None:
        super().__init__()
        self.recorder = recorder
        self.sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS:
            values = self.recorder.values((args, kwargs))
            self.recorder.tape.looked |= any(v.root not in self.recorder.real for v in values)
            if func in _TELLING:
                self.recorder.tape.told += values
            elif func in _SPLITS:  # at places that may be given as a tensor
                self.recorder.tape.told += self.recorder.values((args[1:], kwargs))
        found = func(*args, **(kwargs or {}))
        if self.sizes and func in _SIZES and not self.recorder.busy:
            return self._watched(func, args, kwargs or {}, found)
        return found

    def _watched(self, func: Any, args: Any, kwargs: Any, found: Any) -> Any:
        """A size that was read, as a number that remembers that."""
        value = self.recorder.value(args[0] if args else kwargs["input"])
        log = self.recorder.tape.sizes
        if isinstance(found, torch.Size):
            return torch.Size(watched_sizes(value, log))
        if func in _COUNTS:
            return watched_count(value, log)
        if func is Tensor.__len__:  # `len` makes a plain number of whatever we return
            first = watched_size(value, 0, log)
            log.compared(first.source, first.source.constant(found), _user_line())
            return found
        axis = args[1] if len(args) > 1 else kwargs["dim"]
        return watched_size(value, value.axis(int(axis)), log)


_TELLING = {getattr(Tensor, name) for name in ("tolist", "numpy", "storage", "untyped_storage",
                                               "__array__", "__dlpack__", "__repr__")}  # fmt: skip
_COUNTS = {Tensor.numel, Tensor.nelement, torch.numel}
_SIZES = {Tensor.shape.__get__, Tensor.size, Tensor.__len__, *_COUNTS}  # type: ignore[attr-defined]
_SPLITS = {torch.tensor_split, Tensor.tensor_split}
_READERS = {
    *_TELLING, *_SPLITS, Tensor.data_ptr, Tensor.__reduce_ex__,
    Tensor.data.__set__,  # type: ignore[attr-defined]
}  # fmt: skip


def _fused_attention(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    return int(2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _with_vector(*shapes: Any, **options: Any) -> int:
    return int(2 * max(math.prod(shape) for shape in shapes if isinstance(shape, torch.Size)))


# Torch counts attention in whatever kernel, but forgets the fused one for CPUs; and products with a
# matrix, but not with a vector. Which one runs depends on strides and on whether weights learn, so
# that a narrower model may take another.
FORGOTTEN = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused_attention,
    **{getattr(torch.ops.aten, name): _with_vector for name in ("mv", "addmv", "dot", "vdot")},
}
_FORMULAS = {func: shape_wrapper(formula) for func, formula in FORGOTTEN.items()}


def _macs(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    formula: Any = _FORMULAS.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0
    by_shape = getattr(formula, "__wrapped__", None)  # without the search for tensors in trees
    if by_shape and isinstance(out, Tensor) and not kwargs:
        shapes = (x.shape if isinstance(x, Tensor) else x for x in args)
        return int(by_shape(*shapes, out_shape=out.shape)) // 2
    return int(formula(*args, **kwargs, out_val=out)) // 2


_NOBODY: tuple[Callable[[], None], Any] = (lambda: None, None)
_FRESH = torch.ops.aten.lift_fresh.default  # what torch.tensor(...) in the code becomes
_SMALL = 4096


def _value(tensor: Tensor, name: str = "") -> Value:
    kind = tensor.dtype
    is_integer = not (kind.is_floating_point or kind.is_complex)
    return Value(tuple(tensor.shape), name, tensor.stride(), kind.itemsize, is_integer=is_integer)


def _copied(tensor: Tensor) -> Tensor:
    """(Other modes may be active around ours.)"""
    with torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().clone()


TRACING_SEED = 0x5EED_0F_A_7ACE  # no code of a model's will choose the same


def _seeds() -> tuple[int, ...]:
    """Of the default generators: another one means that the model's code has set it."""
    gpu = (torch.cuda.initial_seed(),) if torch.cuda.is_initialized() else ()
    return (torch.initial_seed(), *gpu)


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _gives_views(func: Any) -> bool:
    return any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """The arguments that it writes to."""
    given = enumerate(func._schema.arguments)
    return [(k, a.name) for k, a in given if a.alias_info and a.alias_info.is_write]


@cache
def _reads_the_shape(func: Any) -> bool:
    return name_of(func).startswith("new_") or name_of(func).endswith("_like")


def _user_line() -> str:
    """file:line of the innermost frame that belongs to neither torch nor this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "polarprune.")) and name not in ("torch", "contextlib"):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def record(
    model: nn.Module, example: Example, *, training: bool, shims: Mapping[str, Shim] | None = None
) -> Tape:
    """The tape of one run of `model` on `example`, in train or eval mode.

    A shim takes the place of a module's forward during the run, and may mark values by name.
    Values are computed only where something besides values depends on them.
    """
    tape, error = attempt(model, example, training=training, shims=shims)
    if error is not None or tape.depends_on_data or tape.looked:
        tape, error = attempt(model, example, training=training, shims=shims, computed=True)
    if error is not None and not isinstance(error, PruneError):  # code that minds our numbers?
        tape, error = attempt(
            model, example, training=training, shims=shims, computed=True, sizes=False
        )
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
    brief: bool = False,
    sizes: bool = True,
) -> tuple[Tape, Exception | None]:
    """What `record` does, with the tape up to the error if the run fails.

    `computed`: with all values; `brief`: without lines of code, MACs and what becomes of sizes;
    `sizes`: note what becomes of them.
    """
    args, kwargs = as_call(example)
    counts = not (training or brief)  # MACs are those of eval mode
    recorder = _Recorder(model, (args, kwargs), computed=computed, brief=brief, counts=counts)
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
        sizes = sizes and not brief
        with untouched(model, training), opened(model), recorder, _Watch(recorder, sizes):
            torch.default_generator.manual_seed(TRACING_SEED)
            recorder.seeds = _seeds()
            if sizes:
                watch_attributes(model.named_modules(), recorder.tape.sizes)
            out = model(*args, **kwargs)
            recorder.tape.sizes.active, recorder.busy = False, True
            recorder.finish(tensors_in(out))
    except Exception as error:
        failed = error
    finally:
        recorder.tape.sizes.active = False
        release_stand_ins()
        with torch.no_grad():
            for tensor, before in reversed(recorder.before):
                tensor.copy_(before)
        for handle in handles:
            handle.remove()
        for module, forward in own.items():
            del module.forward  # as_graph refuses modules that have one of their own
            if forward is not None:
                module.forward = forward
    return recorder.tape, failed


def _marker(recorder: _Recorder, path: str) -> Mark:
    def mark(name: str, result: Any) -> None:
        recorder.tape.ends.setdefault((path, name), len(recorder.tape.ops))
        if isinstance(result, (int, float)):
            recorder.tape.marked_numbers.setdefault((path, name), plain(result))
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
