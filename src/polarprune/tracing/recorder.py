"""Run a model once and return the tape of what it did.

Everything that runs in eager mode is recorded, including what Python control flow selects. Products
are not computed (`shape_only`) unless something depends on values; then the run is repeated with
all values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn

from ..errors import PruneError
from ..torch_internals.process_settings import seed_generators
from .generation import Answer, CannotContinue, FurtherCall, answers, further_call
from .model_state import Example, as_call, restored, tensors_in, without_fused_paths
from .op_recorder import OpRecorder
from .python_reads import PythonReads
from .tape import Tape, Value
from .watched_sizes import watch_attributes

Mark = Callable[[str, object], None]  # the name of a node in a captured graph, and its result
Forward = Callable[..., object]
MakeForward = Callable[[nn.Module, Mark], Forward]
TRACING_SEED = 0x5EED_0F_A_7ACE  # unlikely to be chosen by the model's own code


def record(
    model: nn.Module,
    example: Example,
    *,
    training: bool,
    forwards: Mapping[str, MakeForward] | None = None,
    generates: bool = True,
) -> Tape:
    """Return the tape of one run.

    Args:
        model: The model to run; its state is restored afterwards.
        example: The inputs to run it on.
        training: Run in train mode, else in eval mode.
        forwards: Functions that make a forward for the modules with these paths. It replaces
            theirs during the run, and may mark values by name.
        generates: A cache that the model returns is not an output; in eval mode, the run continues
            with one more token.

    Returns:
        The tape. Values are computed only if something other than values depends on them.

    Raises:
        CannotContinue: The model does not run on a further token with its cache.
        PruneError: The model does not run on the example, or returns no tensor.
    """
    run = partial(
        attempt, model, example, training=training, forwards=forwards, generates=generates
    )
    tape, error = run()
    if error is not None or tape.depends_on_data or tape.needs_values:
        tape, error = run(with_values=True)
    watched = not isinstance(error, PruneError) or isinstance(error, CannotContinue)
    if error is not None and watched:  # watched sizes may be the cause
        tape, error = run(with_values=True, watch_sizes=False)
    _check(model, tape, error)
    return tape


def _check(model: nn.Module, tape: Tape, error: Exception | None) -> None:
    """Raise a PruneError if the run failed or returned no tensor."""
    if isinstance(error, PruneError):
        raise error
    if error is not None:
        raise PruneError(
            f"{tape.failed_in or type(model).__name__}: the model does not run on the example "
            f"inputs: {error}. Pass inputs of the shape, dtype and device that model(...) accepts."
        ) from error
    if not tape.outputs:
        raise PruneError(
            f"{type(model).__name__}: the model's output contains no tensor, so there is nothing "
            f"to compare. Let forward return the tensors that it computes."
        )


def attempt(
    model: nn.Module,
    example: Example,
    *,
    training: bool,
    forwards: Mapping[str, MakeForward] | None = None,
    generates: bool = False,
    with_values: bool = False,
    brief: bool = False,
    watch_sizes: bool = True,
) -> tuple[Tape, Exception | None]:
    """Run the model once, and return the tape, with the error if the run fails.

    Args:
        model: The model to run; its state is restored afterwards.
        example: The inputs to run it on.
        training: Run in train mode, else in eval mode.
        forwards: As in `record`.
        generates: As in `record`.
        with_values: Compute every operation, not only its shape.
        brief: Omit source lines, MACs and watched sizes.
        watch_sizes: Note what Python code does with sizes.
    """
    further = further_call(model, example) if generates and not training else FurtherCall()
    count_macs = not (training or brief)  # the cost is that of eval mode
    recorder = OpRecorder(
        model,
        (as_call(example), further.arguments),
        with_values=with_values,
        generates=generates,
        brief=brief,
        count_macs=count_macs,
    )
    run = partial(answers, model, example, generates=generates, further=further)
    failed = None
    try:
        with _replaced_forwards(model, recorder, forwards or {}), _module_hooks(model, recorder):
            _run(model, run, recorder, training=training, watch_sizes=watch_sizes and not brief)
    except Exception as error:
        failed = error
    finally:
        recorder.close()
    return recorder.tape(), failed


def _run(
    model: nn.Module,
    run: Callable[..., Answer],
    recorder: OpRecorder,
    *,
    training: bool,
    watch_sizes: bool,
) -> None:
    """Run the model under the recorder."""
    reads = PythonReads(recorder, watch_sizes)
    cached: list[Value] = []
    with restored(model, training), without_fused_paths(model), recorder, reads:
        seed_generators(TRACING_SEED)
        recorder.start()
        if watch_sizes:
            watch_attributes(model.named_modules(), recorder.sizes)
        found = run(between=lambda cache: cached.extend(recorder.start_further(tensors_in(cache))))
        recorder.finish(list(found))
    _check_reads_cache(recorder.tape(), cached)


def _check_reads_cache(tape: Tape, cached: Iterable[Value]) -> None:
    """Raise if a further token does not read all of the cache: then users may read the rest."""
    read = {value.root for op in tape.further_ops for value in op.inputs()}
    if not read.issuperset(value.root for value in cached if not value.is_integer):
        raise CannotContinue("a further token does not read all tensors of the cache")


@contextmanager
def _replaced_forwards(
    model: nn.Module, recorder: OpRecorder, forwards: Mapping[str, MakeForward]
) -> Iterator[None]:
    """Context manager: give these modules the forwards that the functions make."""
    modules = {path: model.get_submodule(path) for path in forwards}
    own = {module: vars(module).get("forward") for module in modules.values()}
    try:
        for path, make in forwards.items():
            modules[path].forward = make(modules[path], _marker(recorder, path))
        yield
    finally:
        for module, forward in own.items():
            vars(module).pop("forward", None)  # capture refuses modules with a forward of their own
            if forward is not None:
                module.forward = forward


def _marker(recorder: OpRecorder, path: str) -> Mark:
    """Return a function that notes what a node of a captured graph returned."""

    def mark(name: str, result: object) -> None:
        recorder.note_node((path, name), result)

    return mark


@contextmanager
def _module_hooks(model: nn.Module, recorder: OpRecorder) -> Iterator[None]:
    """Context manager: keep track of the module that runs, and of the one in which a run fails."""
    with ExitStack() as placed:
        for path, module in model.named_modules():
            enter = module.register_forward_pre_hook(_enter(recorder, path))
            placed.callback(enter.remove)
            leave = module.register_forward_hook(_leave(recorder), always_call=True)
            placed.callback(leave.remove)
        yield


def _enter(recorder: OpRecorder, path: str) -> Callable[[nn.Module, object], None]:
    def hook(module: nn.Module, args: object) -> None:
        recorder.enter_module(path)

    return hook


def _leave(recorder: OpRecorder) -> Callable[[nn.Module, object, object], None]:
    def hook(module: nn.Module, args: object, out: object) -> None:
        recorder.leave_module(failed=sys.exc_info()[0] is not None)

    return hook
