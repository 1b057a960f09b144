"""Record every ATen operation that runs while the recorder is active.

Products are not computed where a placeholder of the right shape will do (`shape_only`). The
recorder knows which values are real and which come from placeholders. The tape needs values as soon
as placeholder values reach something that depends on values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
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
from .shape_only import PLACEHOLDERS, Zeros
from .source_lines import user_line
from .tape import NodeKey, Nodes, Op, Tape, Value, unused_values, values_read_by
from .watched_sizes import SizeLog, plain

_CONSTANT = torch.ops.aten.lift_fresh.default  # what torch.tensor(...) in the code becomes
_SMALL = 4096  # elements of a constant, or of an integer tensor of the model, whose values are kept
_LARGEST_INDEX = 1_000_000  # elements of other integer tensors whose values are kept


class OpRecorder(TorchDispatchMode):
    """Records one run, and makes its tape. Other parts of the run tell it what they see.

    Args:
        model: The model that will run; its parameters and buffers are known by name.
        example: The arguments that it is called with.
        with_values: Compute every operation, not only its shape.
        generates: A cache that the model returns is not an output.
        brief: Omit source lines and MACs.
        count_macs: Count the MACs of every operation.
    """

    def __init__(
        self,
        model: nn.Module,
        example: object,
        *,
        with_values: bool,
        generates: bool,
        brief: bool,
        count_macs: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.brief, self.generates, self.with_values = brief, generates, with_values
        self.sizes = SizeLog(self.current_module)
        self._count_macs = count_macs
        self.watches_sizes = True  # False while the recorder itself reads shapes, and after the run
        self._zeros = Zeros()
        self._placeholders = {} if with_values else PLACEHOLDERS
        self._module_stack: list[str] = []
        self._unchecked_modules = frozenset(
            path for path, m in model.named_modules() if type(m) is nn.MultiheadAttention
        )
        # By id. An id is reused when a tensor is freed, hence the weak reference.
        self._known: dict[int, tuple[weakref.ref[Tensor], Value]] = {}
        named = self._add_named_tensors(model)
        self._inputs = self.values(example)
        # The example, the model's integers, and what is computed from these. Not its floats,
        # because the weights of a trial cut are arbitrary.
        self._real = {*self._inputs, *(value for value in named if value.is_integer)}
        self._created: set[Value] = set()  # in this run; all others belong to the model or the user
        self._overwritten: list[tuple[Tensor, Tensor]] = []  # tensors, and their values before
        self._seeds: tuple[int, ...] = ()  # of the default generators when the run starts
        # What the tape will hold.
        self._ops: list[Op] = []
        self._read_values: list[Value] = []
        self._outputs: list[Value] = []
        self._stored_values: list[Value] = []
        self._needs_values = False
        self._example_ops: int | None = None
        self._failed_in: str | None = None
        self._node_values: dict[NodeKey, list[Value]] = {}
        self._node_numbers: dict[NodeKey, int | float] = {}
        self._node_positions: dict[NodeKey, int] = {}

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
        return self._module_stack[-1] if self._module_stack else ""

    # --- tensors and their values ---

    def _remember(self, tensor: Tensor, value: Value) -> Value:
        self._known[id(tensor)] = weakref.ref(tensor), value
        return value

    def _known_value(self, tensor: Tensor) -> Value | None:
        found = self._known.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def value(self, tensor: Tensor) -> Value:
        """Return the value that stands for a tensor on the tape."""
        found = self._known_value(tensor)
        if found is None:
            before, self.watches_sizes = self.watches_sizes, False
            found = self._remember(tensor, _value(tensor))
            if found.is_integer and not tensor.is_meta and tensor.numel() < _LARGEST_INDEX:
                found.data = copy_of(tensor) if tensor.numel() else tensor
            self.watches_sizes = before
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
        placeholder = self._placeholders.get(func)
        out: object = placeholder(self._zeros, *args, **kwargs) if placeholder else None
        is_placeholder = out is not None
        if not is_placeholder:
            out = self._perform(func, args, kwargs)
        op = self._op(func, args, kwargs, out)
        self._ops.append(op)
        self._read_values += values_read_by(op)
        self._created.update(op.outs)
        if not self.with_values:
            self._track_real_values(op, is_placeholder)
        return out

    def _perform(self, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        try:
            return func(*args, **kwargs)
        except Exception:  # the model's code may catch it, so it may depend on values
            self._needs_values = True
            raise

    def _op(self, func: OpOverload, args: Args, kwargs: Kwargs, out: object) -> Op:
        """Return the record of an operation that was performed."""
        replaced = self._replaced(tuple(args))
        named = {key: self._replaced(item) for key, item in kwargs.items()}
        outs = self._outs(func, replaced, out)
        seeded = draws_random_numbers(func) and (
            kwargs.get("generator") is not None or default_seeds() != self._seeds
        )
        module = self.current_module()
        if self.brief:
            return Op(func, replaced, named, outs, module, seeded=seeded)
        macs = macs_of(func, args, kwargs, out) if self._count_macs else 0
        return Op(func, replaced, named, outs, module, user_line(), macs, seeded)

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
                if value is None or value.root not in self._created:
                    self._overwritten.append((tensor, copy_of(tensor)))
                    if value is None or not (value.root.name or value.root in self._inputs):
                        self._needs_values = True  # other tensors may share it, as with x.data

    def _track_real_values(self, op: Op, is_placeholder: bool) -> None:
        """Note whether the results are real. Integers must be: they decide what is computed."""
        inputs = op.inputs()
        not_real = [value for value in inputs if value.root not in self._real]
        depends = is_placeholder or not_real
        if op.func is _CONSTANT or not depends or reads_shape_only(op.func):
            self._real.update(value.root for value in op.outs)
            return
        if is_mutable(op.func):
            self._real.difference_update(value.root for value in inputs)
        # Only the first output: nothing may ever read the indices that a maximum returns second.
        integers = any(value.is_integer for value in (*not_real, *op.outs[:1]))
        self._needs_values |= integers and not returns_views(op.func)

    # --- what other parts of the run tell ---

    def start(self) -> None:
        """Note that the random generators have the seeds of the run now."""
        self._seeds = default_seeds()

    def enter_module(self, path: str) -> None:
        """Note that the forward of this module starts."""
        self._module_stack.append(path)
        self._failed_in = None

    def leave_module(self, failed: bool) -> None:
        """Note that the forward that started last ends, by an exception if it failed."""
        path = self._module_stack.pop()
        if failed and self._failed_in is None:
            self._failed_in = path

    def note_access(self, values: Iterable[Value]) -> None:
        """Note that Python code accesses the memory of these tensors."""
        self._needs_values |= any(value.root not in self._real for value in values)

    def note_read(self, values: Iterable[Value]) -> None:
        """Note that the values of these tensors decide what Python code does."""
        self._read_values += values

    def note_node(self, key: NodeKey, result: object) -> None:
        """Note what a node of a captured graph returned, at its first call."""
        self._node_positions.setdefault(key, len(self._ops))
        if isinstance(result, (int, float)):
            self._node_numbers.setdefault(key, plain(result))
        else:
            self._node_values.setdefault(key, self.values(result))

    def start_further(self, cached: list[Tensor]) -> list[Value]:
        """Note that the example's run ends here; what follows is generated with this cache."""
        self._example_ops, self._count_macs = len(self._ops), False
        return [self.value(tensor) for tensor in cached]

    def finish(self, out: object) -> None:
        """Note what was returned, and what the model's code stored without returning it."""
        self.sizes.stop()
        self.watches_sizes = False
        self._outputs = self.values(out)
        referenced = {value for reference, value in self._known.values() if reference() is not None}
        unused = unused_values(self._ops, (*self._outputs, *self._read_values))
        self._stored_values = [
            value
            for value in dict.fromkeys(unused)
            if value in referenced and not (value.root.name or value.root in self._inputs)
        ]

    def close(self) -> None:
        """Put back the values of tensors that were overwritten, and free what the run held."""
        self.sizes.stop()
        self._zeros.release()
        with torch.no_grad():
            for tensor, before in reversed(self._overwritten):
                tensor.copy_(before)
        self._overwritten.clear()

    def tape(self) -> Tape:
        """Return the tape of the run, or of the part before an error."""
        return Tape(
            ops=tuple(self._ops),
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
            read_values=tuple(self._read_values),
            stored_values=tuple(self._stored_values),
            decisions=self.sizes.decisions,
            rounded=self.sizes.rounded,
            example_ops=self._example_ops,
            generates=self.generates,
            failed_in=self._failed_in,
            has_values=self.with_values,
            needs_values=self._needs_values,
            unchecked_modules=self._unchecked_modules,
            nodes=Nodes(self._node_values, self._node_numbers, self._node_positions),
        )


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
