"""torch is patched in one package, for one thread, and restored on every path."""

from __future__ import annotations

import ast
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace

import polarprune as pp
from polarprune.rewriting import capture
from polarprune.rewriting.allowed_calls import FACTORIES
from polarprune.rewriting.captured_forward import CapturedForward
from polarprune.torch_internals import class_swaps, markers, patches, process_settings
from tests.helpers.nets import NETS

ROOT = Path(pp.__file__).parent
X = torch.randn(2, 4)
WRAPPED = set(_symbolic_trace._wrapped_fns_to_patch)  # torch adds more when it imports more


def torch_state() -> list[object]:
    """Return everything that polarprune patches."""
    return [
        *(getattr(torch, name) for name in FACTORIES),
        *(vars(kind)[name] for kind, name in patches._SWITCHES),
        nn.Module.__call__,
        nn.Module.__getattr__,
        _symbolic_trace._wrapped_fns_to_patch.keys() >= WRAPPED,
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.mkldnn.enabled,
        *(backend.fp32_precision for backend in patches._float32_backends()),
    ]


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Every test of this file leaves torch as it was."""
    before = torch_state()
    yield
    assert torch_state() == before


# --- patches --------------------------------------------------------------------------------------


def ignored(name: str) -> None:
    """Report nothing."""


PATCHES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "factories": lambda: patches.factories_replaced(FACTORIES, lambda made: lambda *_: made(1)),
    "switches": lambda: patches.switches_reported(ignored),
    "fx.wrap": patches.fx_wrap_ignored,
    "fused kernels": lambda: patches.fused_kernels_off([nn.LSTM(1, 1)]),
}
if patches._float32_backends():  # an older torch has no flags to patch
    PATCHES["float32 precision"] = patches.full_float32_precision


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_is_undone_after_success_and_after_an_exception(
    name: str,
) -> None:
    assert WRAPPED
    before = torch_state()
    with PATCHES[name]():
        assert torch_state() != before
    assert torch_state() == before
    with pytest.raises(ZeroDivisionError), PATCHES[name]():
        raise ZeroDivisionError
    assert torch_state() == before


def test_patches_nest() -> None:
    def more(made: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: made(*args) + 1

    with patches.factories_replaced({"zeros": torch.zeros}, more):
        with patches.factories_replaced({"zeros": torch.zeros}, more):
            assert torch.zeros(1).item() == 2
        assert torch.zeros(1).item() == 1
    assert torch.zeros(1).item() == 0


def in_thread(function: Callable[[], object]) -> object:
    """Return the result of a function in another thread."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(60)
    assert found, "the thread failed or hangs"
    return found[0]


def test_other_threads_see_torch_as_it_is() -> None:
    seen: list[str] = []

    def without_gradients() -> float:
        with torch.no_grad():
            return float(torch.zeros(1).item())

    with (
        patches.factories_replaced({"zeros": torch.zeros}, lambda made: lambda *_: torch.ones(1)),
        patches.switches_reported(seen.append),
    ):
        assert in_thread(without_gradients) == 0 and not seen
        assert without_gradients() == 1 and seen[0] == "no_grad.__enter__"


class Bakes(nn.Module):
    """A module that runs other code while its forward is captured."""

    meanwhile: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if Bakes.meanwhile is not None:
            Bakes.meanwhile()
        return self.layer(x)[:, :2] + torch.zeros(2)


def test_another_thread_runs_a_model_while_a_forward_is_captured() -> None:
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    wanted = other(X)
    found: list[object] = []
    Bakes.meanwhile = lambda: found.append(in_thread(lambda: other(X)))
    try:
        captured = capture.capture(Bakes(), (X,), {})
    finally:
        Bakes.meanwhile = None
    assert isinstance(captured, CapturedForward)
    targets = [
        str(node.target) for node in captured.graphs["eval"].nodes if node.op == "call_module"
    ]
    assert targets == ["layer"]
    assert len(found) == 2 and all(torch.equal(one, wanted) for one in found)  # type: ignore[arg-type]


def test_a_second_thread_waits_until_the_first_has_restored_torch() -> None:
    order: list[str] = []

    def second() -> None:
        with patches.exclusive():
            order.append("second")

    thread = threading.Thread(target=second)
    with patches.exclusive(), patches.exclusive():
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


TRACED = ["residual_pad_lambda", "residual_projection"]


def test_two_threads_trace_as_one_after_the_other() -> None:
    """The networks need graphs of both kinds: captured on the example, and by fx."""
    made = [NETS[name]() for name in TRACED * 2]
    wanted = [str(pp.trace(copy.deepcopy(model), inputs)) for model, inputs in made]
    found: dict[int, str] = {}
    before = torch_state()
    start = threading.Barrier(len(made))

    def run(number: int) -> None:
        model, inputs = made[number]
        start.wait()
        found[number] = str(pp.trace(model, inputs))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [found.get(number) for number in range(len(made))] == wanted
    assert torch_state() == before


def test_a_trace_that_fails_leaves_torch_as_it_was_for_the_next() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    before = torch_state()
    with pytest.raises(pp.PruneError, match="no"):
        pp.trace(nn.Sequential(nn.Linear(4, 4), Fails()), X)
    assert torch_state() == before
    assert (
        in_thread(lambda: pp.trace(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), X).units) == 8
    )


# --- classes --------------------------------------------------------------------------------------


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_derived_class_changes_one_instance_and_can_be_left() -> None:
    one, other = Layer(), Layer()
    class_swaps.derive_class(one, {"forward": lambda self, x: 2 * x})
    assert isinstance(one, Layer) and type(one).__name__ == "Layer" and type(one) is not Layer
    assert torch.equal(one(X), 2 * X) and torch.equal(other(X), X)
    class_swaps.leave_derived_class(one)
    assert type(one) is Layer and torch.equal(one(X), X)


def test_a_member_is_dropped_from_one_instance_only() -> None:
    one = Layer()
    class_swaps.derive_class(one, {"width": 3, "depth": 4})
    twin = copy.copy(one)
    class_swaps.drop_member(one, "width")
    assert not hasattr(one, "width") and one.depth == 4 and isinstance(one, Layer)
    assert twin.width == 3


def test_a_class_for_a_while_is_restored_after_an_exception() -> None:
    one = Layer()
    with pytest.raises(ZeroDivisionError), class_swaps.derived_class(one, {"width": 3}):
        assert one.width == 3
        raise ZeroDivisionError
    assert type(one) is Layer


def test_a_class_that_accepts_no_subclass_is_kept() -> None:
    class Final(nn.Module):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

    one = Final()
    with class_swaps.derived_class(one, {"width": 3}):
        assert type(one) is Final
    with pytest.raises(TypeError, match="final"):
        class_swaps.derive_class(one, {})
    assert type(one) is Final
    class_swaps.set_class(one, Layer)
    assert type(one) is Layer


# --- marks ----------------------------------------------------------------------------------------


def test_parts_of_gates_are_marked_and_a_name_of_the_user_is_no_mark() -> None:
    @markers.gate_part
    def hook() -> None:
        pass

    class Routed(nn.Module):
        is_gate = True  # as in a mixture of experts

    assert markers.is_gate_part(hook) and markers.is_gate_part(pp.Gate(2))
    assert not markers.is_gate_part(nn.Linear(1, 1)) and not markers.is_gate_part(Routed())


def test_an_exposed_weight_is_marked_on_the_class_of_the_layer() -> None:
    one, other = Layer(), Layer()
    class_swaps.derive_class(one, {})
    markers.mark_weight_exposed(one)
    assert markers.is_weight_exposed(one) and markers.is_weight_exposed(copy.deepcopy(one))
    assert not markers.is_weight_exposed(other)


def test_a_forward_knows_the_graph_it_runs() -> None:
    graph = fx.Graph()

    def forward() -> None:
        pass

    assert markers.source_graph(forward) is None
    markers.set_source_graph(forward, graph)
    assert markers.source_graph(forward) is graph


def test_compiled_modules_are_recognised() -> None:
    plain, inside = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapped: Any = torch.compile(plain, backend="eager")
    inside.compile(backend="eager")
    assert markers.is_compiled(wrapped) and markers.is_compiled(inside)
    assert not markers.is_compiled(plain)
    assert markers.uncompiled(wrapped) is plain and markers.uncompiled(plain) is plain


def test_a_recipe_is_attached_to_its_model() -> None:
    model = nn.Linear(2, 2)
    assert markers.attached_recipe(model) is None
    markers.attach_recipe(model, {"version": 2})
    assert markers.attached_recipe(model) == {"version": 2}


# --- settings of the process ----------------------------------------------------------------------


def test_threads_and_cudnn_are_restored_after_an_exception() -> None:
    threads, tuned = torch.get_num_threads(), torch.backends.cudnn.benchmark
    with (
        pytest.raises(ZeroDivisionError),
        process_settings.cpu_threads(threads + 1),
        process_settings.convolutions_tuned(),
    ):
        assert torch.get_num_threads() == threads + 1 and torch.backends.cudnn.benchmark
        raise ZeroDivisionError
    assert torch.get_num_threads() == threads and torch.backends.cudnn.benchmark == tuned


def test_no_threads_leave_the_number_as_it_is() -> None:
    threads = torch.get_num_threads()
    with process_settings.cpu_threads(0):
        assert torch.get_num_threads() == threads


# --- only here ------------------------------------------------------------------------------------

PROGRAMS = ("experiments", "cli")  # they own the process, so they seed it and resume its generators
SEEDS = ("torch.manual_seed", "torch.set_rng_state", "torch.cuda.set_rng_state")
SETTINGS = (
    "torch.set_",
    "torch.use_deterministic",
    "torch.default_generator.",
    "torch.cuda.manual_seed",
    *SEEDS,
)
SWITCHES = ("use_nested_tensor", "activation_relu_or_gelu")  # of torch's encoders
MARKS = ("_orig_mod", "_hf_hook", "offload")
NOT_SETTINGS = ("torch.set_grad_enabled", "torch.random.fork_rng")  # context managers of torch


def outside(found: Callable[[ast.AST], bool], *allowed: str) -> list[str]:
    """Return where other packages have such code."""
    return [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] not in ("torch_internals", *allowed)
        for node in ast.walk(ast.parse(path.read_text()))
        if found(node)
    ]


def test_no_other_package_replaces_classes_or_members_of_torch() -> None:
    assert not outside(lambda node: _assigns(node, "__class__", "fp32_precision"))
    assert not outside(_patches_torch)


def test_no_other_package_changes_settings_of_the_process() -> None:
    assert not outside(lambda node: _calls(node, *SETTINGS) and not _calls(node, *SEEDS))
    assert not outside(lambda node: _calls(node, *SEEDS), *PROGRAMS)
    assert not outside(_sets_a_backend)


def test_no_other_package_switches_kernels_of_encoders() -> None:
    assert not outside(lambda node: _assigns(node, *SWITCHES))


def test_no_other_package_knows_the_marks_of_others() -> None:
    assert not outside(lambda node: isinstance(node, ast.Constant) and node.value in MARKS)


@pytest.mark.parametrize(
    ("code", "check"),
    [
        ("x.__class__ = y", lambda node: _assigns(node, "__class__")),
        ("x.use_nested_tensor = False", lambda node: _assigns(node, *SWITCHES)),
        ("setattr(torch, 'zeros', f)", lambda node: _patches_torch(node)),
        ("torch.zeros = f", lambda node: _patches_torch(node)),
        ("torch.backends.mha.set_fastpath_enabled(False)", lambda node: _patches_torch(node)),
        ("torch.backends.cudnn.benchmark = True", lambda node: _sets_a_backend(node)),
        ("torch.set_num_threads(2)", lambda node: _calls(node, *SETTINGS)),
        ("torch.default_generator.manual_seed(0)", lambda node: _calls(node, *SETTINGS)),
    ],
)
def test_the_checks_find_such_code(code: str, check: Callable[[ast.AST], bool]) -> None:
    assert any(map(check, ast.walk(ast.parse(code))))


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []


def _assigns(node: ast.AST, *attributes: str) -> bool:
    return any(isinstance(t, ast.Attribute) and t.attr in attributes for t in _targets(node))


def _calls(node: ast.AST, *names: str) -> bool:
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return name.startswith(names) and name not in NOT_SETTINGS


def _sets_a_backend(node: ast.AST) -> bool:
    return any(ast.unparse(target).startswith("torch.backends.") for target in _targets(node))


def _patches_torch(node: ast.AST) -> bool:
    if any(ast.unparse(target).startswith("torch.") for target in _targets(node)):
        return True
    if not isinstance(node, ast.Call) or not node.args:
        return False
    name = ast.unparse(node.func)
    return (name == "setattr" and ast.unparse(node.args[0]).startswith("torch")) or (
        name.startswith("torch.backends.") and ".set_" in name
    )
