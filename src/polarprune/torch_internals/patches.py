"""Every function or class of torch that polarprune replaces for a while.

Settings of the process that have an official switch are in `process_settings.py`. Each patch is a
context manager that restores what it found, also after an exception. Patches are visible to all
threads, so two rules hold:

- Patches share one re-entrant lock. A second thread that wants to patch waits until the first has
  restored everything, so threads cannot restore each other's patches.
- A replaced function acts only in the thread that replaced it. All other threads get the original,
  so a training loop may run beside a trace.

Random states are not patches, and belong to the whole process: a trace seeds the generators, and
puts them back when it ends. Random numbers that another thread draws meanwhile can repeat.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import fx, nn
from torch.fx import _symbolic_trace

Function = TypeVar("Function", bound=Callable[..., object])

_LOCK = threading.RLock()

# Context managers and functions that change how gradients or precision are computed. A graph of
# operations cannot hold them.
_SWITCHES: tuple[tuple[type, str], ...] = (
    (torch.autocast, "__enter__"),
    (torch.inference_mode, "__enter__"),
    (torch.no_grad, "__enter__"),
    (torch.enable_grad, "__enter__"),
    (torch.set_grad_enabled, "__init__"),
    (torch.autograd.Function, "apply"),
)


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold the lock of all patches: no other thread can patch torch inside this context."""
    with _LOCK:
        yield


@contextmanager
def _replaced(owner: object, members: Mapping[str, object]) -> Iterator[None]:
    """Replace members of a class or module of torch, and restore them afterwards."""
    with _LOCK:
        before = {name: vars(owner)[name] for name in members}
        try:
            for name, member in members.items():
                setattr(owner, name, member)
            yield
        finally:
            for name, member in before.items():
                setattr(owner, name, member)


def _in_this_thread(original: Function, replacement: Callable[..., object]) -> Function:
    """Return a function that calls `replacement` in this thread, and `original` in all others."""
    mine = threading.get_ident()

    @functools.wraps(original)
    def choose(*args: object, **kwargs: object) -> object:
        function = replacement if threading.get_ident() == mine else original
        return function(*args, **kwargs)

    return choose  # type: ignore[return-value]


@contextmanager
def factories_replaced(
    factories: Mapping[str, Callable[..., object]],
    wrap: Callable[[Callable[..., object]], Callable[..., object]],
) -> Iterator[None]:
    """Replace functions of torch that create tensors, such as `torch.zeros`.

    These functions do not accept proxies as sizes, and have no tensor argument that could lead
    torch to the tracer. So tracing has to replace them.

    Args:
        factories: The original functions by their name in `torch`.
        wrap: Makes the replacement from the original.
    """
    members = {name: _in_this_thread(made, wrap(made)) for name, made in factories.items()}
    with _replaced(torch, members):
        yield


@contextmanager
def switches_reported(report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` with the name of each switch of gradients or precision that code uses.

    The switches are `torch.no_grad`, `enable_grad`, `set_grad_enabled`, `inference_mode`,
    `autocast` and calls of a `torch.autograd.Function`. `report` may raise to stop the code.
    """
    with _LOCK:
        before = [(kind, name, vars(kind)[name]) for kind, name in _SWITCHES]
        try:
            for kind, name, method in before:
                setattr(kind, name, _reporting(method, report))
            yield
        finally:
            for kind, name, method in before:
                setattr(kind, name, method)


def _reporting(method: Callable[..., object], report: Callable[[str], None]) -> object:
    """Wrap a method, or a class method, so that it reports its name before it runs."""
    inner: Callable[..., object] = getattr(method, "__func__", method)

    def reported(*args: object, **kwargs: object) -> object:
        report(inner.__qualname__)
        return inner(*args, **kwargs)

    wrapper = _in_this_thread(inner, reported)
    return classmethod(wrapper) if isinstance(method, classmethod) else wrapper


@contextmanager
def fx_wrap_ignored() -> Iterator[None]:
    """Trace through functions that the user registered with `torch.fx.wrap`.

    fx would record such a function as one call, which cannot be stored in a file.
    """
    with _LOCK:
        wrapped: dict[object, object] = getattr(_symbolic_trace, "_wrapped_fns_to_patch", {})
        before = dict(wrapped)
        wrapped.clear()
        try:
            yield
        finally:
            wrapped.update(before)


@contextmanager
def fused_kernels_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let attention, and recurrent layers if there are any, run as separate operations.

    In eval mode torch runs whole encoder layers and recurrent layers as one opaque kernel, in
    which channels cannot be followed.
    """
    with _LOCK:
        fast_path = torch.backends.mha.get_fastpath_enabled()
        mkldnn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            if any(isinstance(module, nn.RNNBase) for module in modules):
                torch.backends.mkldnn.set_flags(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            torch.backends.mkldnn.set_flags(mkldnn)


class _Backend(Protocol):
    """A part of `torch.backends` whose float32 precision can be set."""

    fp32_precision: str


def _float32_backends() -> list[_Backend]:
    """Return the backends that may round float32 to TF32; none in a torch without these flags."""
    cudnn = torch.backends.cudnn
    if not hasattr(cudnn, "conv"):
        return []
    return [cast(_Backend, torch.backends.cuda.matmul), cudnn.conv, cudnn.rnn]


@contextmanager
def full_float32_precision() -> Iterator[None]:
    """Compute products, convolutions and recurrent layers in full float32 precision on GPUs.

    By default, GPUs round the inputs of these operations to TF32. Two models that compute the same
    function would then differ by more than rounding in float32 explains.
    """
    with _LOCK:
        before = [(backend, backend.fp32_precision) for backend in _float32_backends()]
        try:
            for backend, _ in before:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in before:
                backend.fp32_precision = precision


class OneThreadTracer(fx.Tracer):
    """A tracer that ignores modules which other threads run.

    While fx traces, it replaces `nn.Module.__call__` and `nn.Module.__getattr__` for all threads.
    """

    def __init__(self, autowrap_modules: Sequence[ModuleType] = ()) -> None:
        wrapped: Any = tuple(autowrap_modules)  # torch annotates a tuple of one module
        super().__init__(autowrap_modules=wrapped)
        self._thread = threading.get_ident()

    def trace(
        self,
        root: nn.Module | Callable[..., object],
        concrete_args: dict[str, object] | None = None,
    ) -> fx.Graph:
        """Trace while no other thread traces or patches."""
        with _LOCK:
            return super().trace(root, concrete_args)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Record the call of a module, or just run it if another thread calls it."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(
        self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]
    ) -> object:
        """Return a proxy of a tensor, or the tensor itself if another thread reads it."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


@contextmanager
def optimizers_reported(report: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Call `report` with each optimizer that code makes, once it has its parameter groups.

    That is the last moment at which groups can be added freely: schedulers that are made later
    count them.
    """
    make = torch.optim.Optimizer.__init__

    def reporting(optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> None:
        make(optimizer, *args, **kwargs)  # type: ignore[arg-type]
        report(optimizer)

    with _replaced(torch.optim.Optimizer, {"__init__": _in_this_thread(make, reporting)}):
        yield
