"""Record every ATen operation that runs while the recorder is active.

Products are not computed where a placeholder of the right shape will do (`shape_only`). The
recorder knows which values are real and which come from placeholders. It sets `tape.needs_values`
as soon as placeholder values reach something that depends on values.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .mac_count import macs_of
from .model_state import Args, Kwargs, named_tensors
from .schemas import (
    changes_shape_in_place,
    draws_random_numbers,
    is_mutable,
    reads_shape_only,
    returns_views,
    written_arguments,
)
from .shape_only import PLACEHOLDERS
from .source_lines import user_line
from .tape import Op, Tape, Value, values_read_by
from .watched_sizes import SizeLog

_CONSTANT = torch.ops.aten.lift_fresh.default  # what torch.tensor(...) in the code becomes
_SMALL = 4096  # elements of a constant, or of an integer tensor of the model, whose values are kept
_LARGEST_INDEX = 1_000_000  # elements of other integer tensors whose values are kept


class OpRecorder(TorchDispatchMode):
    """Records operations on a tape.

    Args:
        model: the model that will run; its parameters and buffers are known by name.
        example: the arguments that it is called with.
        with_values: compute every operation, not only its shape.
        brief: omit source lines and MACs.
        count_macs: count the MACs of every operation.
    """

    def __init__(
        self,
        model: nn.Module,
        example: object,
        *,
        with_values: bool,
        brief: bool,
        count_macs: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.brief, self.count_macs = brief, count_macs
        self.busy = False  # True while the recorder itself reads shapes
        self.tape = Tape(has_values=with_values)
        self.placeholders = {} if with_values else PLACEHOLDERS
        self.module_stack: list[str] = []
        # By id. An id is reused when a tensor is freed, hence the weak reference.
        self.known: dict[int, tuple[weakref.ref[Tensor], Value]] = {}
        named = self._add_named_tensors(model)
        self.tape.inputs = self.values(example)
        # The example, the model's integers, and what is computed from these. Not its floats,
        # because the weights of a trial cut are arbitrary.
        self.real = {*self.tape.inputs, *(value for value in named if value.is_integer)}
        self.created: set[Value] = set()  # in this run; all others belong to the model or the user
        self.overwritten: list[tuple[Tensor, Tensor]] = []  # tensors, and their values before
        self.seeds: tuple[int, ...] = ()  # of the default generators when the run starts
        self.tape.sizes = SizeLog(self.current_module)
        self.tape.unchecked_modules = {
            path for path, m in model.named_modules() if type(m) is nn.MultiheadAttention
        }

    def _add_named_tensors(self, model: nn.Module) -> list[Value]:
        found = []
        for name, tensor in named_tensors(model):
            value = self._remember(tensor, _value(tensor, name))
            if value.is_integer and not tensor.is_meta and tensor.numel() < _SMALL:
                value.data = copy_of(tensor)
            found.append(value)
        return found

    def current_module(self) -> str:
        """Return the path of the module whose forward runs now."""
        return self.module_stack[-1] if self.module_stack else ""

    # --- tensors and their values ---

    def _remember(self, tensor: Tensor, value: Value) -> Value:
        self.known[id(tensor)] = weakref.ref(tensor), value
        return value

    def _known_value(self, tensor: Tensor) -> Value | None:
        found = self.known.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def value(self, tensor: Tensor) -> Value:
        """Return the value that stands for a tensor on the tape."""
        found = self._known_value(tensor)
        if found is None:
            before, self.busy = self.busy, True
            found = self._remember(tensor, _value(tensor))
            if found.is_integer and not tensor.is_meta and tensor.numel() < _LARGEST_INDEX:
                found.data = copy_of(tensor) if tensor.numel() else tensor
            self.busy = before
        return found

    def values(self, tree: object) -> list[Value]:
        """Return the values of all tensors in a tree."""
        return [self.value(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

    def _replaced(self, tree: object) -> Any:
        """Return arguments of an operation with values in place of tensors."""
        if isinstance(tree, Tensor):
            return self.value(tree)
        if isinstance(tree, (list, tuple)):
            return type(tree)([self._replaced(item) for item in tree])
        return tree

    # --- operations ---

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Record the operation, and return its result or a placeholder."""
        kwargs = kwargs or {}
        for position, name in written_arguments(func):
            self._save(args[position] if position < len(args) else kwargs.get(name))
        placeholder = self.placeholders.get(func)
        out: object = placeholder(*args, **kwargs) if placeholder else None
        is_placeholder = out is not None
        if not is_placeholder:
            out = self._perform(func, args, kwargs)
        op = self._op(func, args, kwargs, out)
        self.tape.ops.append(op)
        self.tape.read_values += values_read_by(op)
        self.created.update(op.outs)
        if not self.tape.has_values:
            self._track_real_values(op, is_placeholder)
        return out

    def _perform(self, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        try:
            return func(*args, **kwargs)
        except Exception:  # the model's code may catch it, so it may depend on values
            self.tape.needs_values = True
            raise

    def _op(self, func: OpOverload, args: Args, kwargs: Kwargs, out: object) -> Op:
        """Return the record of an operation that was performed."""
        replaced = self._replaced(tuple(args))
        named = {key: self._replaced(item) for key, item in kwargs.items()}
        outs = self._outs(func, replaced, out)
        op = Op(func, replaced, named, outs, self.current_module())
        op.seeded = draws_random_numbers(func) and (
            kwargs.get("generator") is not None or default_seeds() != self.seeds
        )
        if not self.brief:
            op.line = user_line()
            op.macs = macs_of(func, args, kwargs, out) if self.count_macs else 0
        return op

    def _outs(self, func: OpOverload, args: tuple[Any, ...], out: object) -> list[Value]:
        """Return the values of the results, and note what they are views of."""
        if func is _CONSTANT and isinstance(out, Tensor) and out.numel() < _SMALL:
            args[0].data = copy_of(out)
        if changes_shape_in_place(func) and isinstance(out, Tensor):  # a new value, the same tensor
            outs = [self._remember(out, _value(out))]
            outs[0].base = args[0].root
        else:
            outs = [self.value(out)] if isinstance(out, Tensor) else self.values(out)
        if returns_views(func):
            for value in outs:  # ATen's views are all views of the first argument
                value.base = value.base or args[0].base or args[0]
        return outs

    def _save(self, given: object) -> None:
        """Save what is about to be overwritten, if it existed before the run."""
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor):
                value = self._known_value(tensor)
                if value is None or value.root not in self.created:
                    self.overwritten.append((tensor, copy_of(tensor)))
                    if value is None or not (value.root.name or value.root in self.tape.inputs):
                        self.tape.needs_values = True  # other tensors may share it, as with x.data

    def _track_real_values(self, op: Op, is_placeholder: bool) -> None:
        """Note whether the results are real. Integers must be: they decide what is computed."""
        inputs = op.inputs()
        not_real = [value for value in inputs if value.root not in self.real]
        depends = is_placeholder or not_real
        if op.func is _CONSTANT or not depends or reads_shape_only(op.func):
            self.real.update(value.root for value in op.outs)
            return
        if is_mutable(op.func):
            self.real.difference_update(value.root for value in inputs)
        # Only the first output: nothing may ever read the indices that a maximum returns second.
        integers = any(value.is_integer for value in (*not_real, *op.outs[:1]))
        self.tape.needs_values |= integers and not returns_views(op.func)

    def start_further(self, cached: list[Tensor]) -> list[Value]:
        """Note that the example's run ends here; what follows is generated with this cache."""
        self.tape.example_ops, self.count_macs = len(self.tape.ops), False
        return [self.value(tensor) for tensor in cached]

    def finish(self, out: object) -> None:
        """Note what was returned, and what the model's code stored without returning it."""
        self.tape.outputs = self.values(out)
        alive = {value for reference, value in self.known.values() if reference() is not None}
        self.tape.stored_values = [
            value
            for value in dict.fromkeys(self.tape.unused_values())
            if value in alive and not (value.root.name or value.root in self.tape.inputs)
        ]


def _value(tensor: Tensor, name: str = "") -> Value:
    kind = tensor.dtype
    is_integer = not (kind.is_floating_point or kind.is_complex)
    return Value(tuple(tensor.shape), name, tensor.stride(), kind.itemsize, is_integer=is_integer)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy, hidden from the dispatch modes around this one."""
    with torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().clone()


def default_seeds() -> tuple[int, ...]:
    """Return the seeds of the default generators. They change if the model's code sets them."""
    gpu = (torch.cuda.initial_seed(),) if torch.cuda.is_initialized() else ()
    return (torch.initial_seed(), *gpu)
