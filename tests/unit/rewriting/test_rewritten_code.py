"""Code with hard-coded sizes: its attributes change, or it is rewritten, or it is frozen.

Whatever way was taken, what comes back is still the user's module: it computes the same at another
batch size, trains, is with_weights_of, saved, loaded and exported like any other.
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import polarprune as pp
from polarprune.files.untrusted.checksum import BLANK, signed
from polarprune.rewriting import (
    capture,
    installed_forward,
    stored_graphs,
    symbolic_graphs,
)
from polarprune.rewriting.captured_forward import CapturedForward, Refused
from polarprune.surgery.proof import difference, prove_equal
from tests.helpers.exact import VARIANTS, pruner_of, set_gates
from tests.helpers.fixed_sizes import CASES, made
from tests.helpers.nets import cbr, head, randomise
from tests.helpers.random_cuts import Cut, cut_at_random, images, trains

every_case = pytest.mark.parametrize("name", CASES)


@cache
def shrunk(name: str) -> Cut:
    model, x = made(name)
    return cut_at_random(model, pp.trace(model, x), (x,))


@cache
def exported(name: str) -> Cut:
    """Cut by exporting a pruner instead: `masked` is the gated model."""
    pruner = pruner_of(*made(name))
    set_gates(pruner, VARIANTS["half"], name)
    small = pruner.export()
    return Cut(pruner.graph, pruner.plan(), pruner.model, small)


def cuts(name: str) -> list[Cut]:
    return [shrunk(name), exported(name)]


@every_case
def test_what_can_be_followed_is_open(name: str) -> None:
    case, graph = CASES[name], shrunk(name).graph
    assert {group: g.size for group, g in graph.prunable.items()} == case.opened
    whole = {group: g.reason for group, g in graph.groups.items() if g.frozen}
    assert whole.keys() == case.whole.keys()
    assert all(case.whole[group] in whole[group] for group in whole)
    assert set(case.rewritten) <= set(graph.rewritten)
    assert graph.unknown == {}


@every_case
@pytest.mark.parametrize("batch", [1, 3])
def test_another_batch_size_gives_what_the_original_gives(name: str, batch: int) -> None:
    other = images(batch, *CASES[name].shape[1:])
    for this in cuts(name):
        modes = {"eval", "train"}
        found = prove_equal(this.masked, this.small, (other,), 1e-10)
        assert found.differences.keys() == modes


@every_case
def test_what_comes_back_is_of_the_class_of_the_user(name: str) -> None:
    model, _ = made(name)
    for this in cuts(name):
        small = dict(this.small.named_modules())
        assert small.keys() == dict(model.named_modules()).keys()
        for path, module in model.named_modules():
            assert isinstance(small[path], type(module))
            assert type(small[path]).__name__ == type(module).__name__


@every_case
def test_what_comes_back_trains(name: str) -> None:
    for this in cuts(name):
        trains(this.small, (images(*CASES[name].shape),))


@every_case
def test_what_comes_back_is_copied_saved_and_loaded(name: str, tmp_path: Path) -> None:
    x = images(*CASES[name].shape)
    for this in cuts(name):
        pp.save(this.small, tmp_path / "small.safetensors")
        torch.manual_seed(1)
        fresh = randomise(CASES[name].make()).double()
        filled = copy.deepcopy(this.small)
        for parameter in filled.parameters():
            nn.init.zeros_(parameter)
        filled.load_state_dict(this.small.state_dict())
        again = pp.load(tmp_path / "small.safetensors", model=fresh)
        for other in (again, filled, copy.deepcopy(again)):
            for training in (False, True):
                assert difference(this.small, other, (x,), training=training) == 0


@every_case
def test_what_comes_back_is_pickled_with_its_code_as_data(name: str) -> None:
    x = images(*CASES[name].shape)
    for this in cuts(name):
        content = io.BytesIO()
        torch.save(this.small, content)
        content.seek(0)
        again = torch.load(content, weights_only=False)
        for other in (again, pickle.loads(pickle.dumps(again, protocol=0)), copy.copy(again)):
            assert str(other) == str(this.small)
            for training in (False, True):
                assert difference(this.small, other, (x,), training=training) == 0


@every_case
def test_what_comes_back_is_exported_by_torch(name: str) -> None:
    x = images(*CASES[name].shape)
    small = shrunk(name).small.eval()
    program = torch.export.export(small, (x,), strict=False)
    assert torch.allclose(program.module()(x), small(x), rtol=1e-10, atol=1e-12)


def test_scale_that_was_computed_from_a_width_keeps_its_value() -> None:
    this = shrunk("scale")
    x = images(2, this.small[0][0].out_channels, 3, 3)
    assert torch.allclose(this.small[1](x), x * 8**-0.5, rtol=1e-12)


def test_graphs_of_train_and_eval_mode_are_kept_apart() -> None:
    this = shrunk("modes")
    x = images(2, this.small[0][0].out_channels, 3, 3)
    width = sum(channel < 3 for channel in this.plan["0.0"])
    assert width
    one, other = this.small.train()[1](x), this.small.eval()[1](x)
    assert torch.allclose(one[:, -width:], 1.5 * other[:, -width:])
    assert torch.equal(one[:, :-width], other[:, :-width])


# --------------------------------------------------------------------------------------------------
# code that looks at sizes and values


class Inspection(nn.Module):
    def __init__(self, look: Callable[[Inspection, Tensor], Tensor]) -> None:
        super().__init__()
        self.look, self.c = look, 8

    def forward(self, x: Tensor) -> Tensor:
        return self.look(self, x)


def swap(x: Tensor) -> Tensor:
    """Code that counts channels, so that it must be rewritten."""
    a, b = x.split([3, x.shape[1] - 3], 1)
    return torch.cat([b, a], 1)


def tokens(x: Tensor, width: int) -> Tensor:
    x = x.permute(0, 2, 3, 1)
    return F.gelu(x.reshape(-1, width)).view_as(x).permute(0, 3, 1, 2)


def part(x: Tensor, size: int) -> Tensor:
    return F.interpolate(x, size=(size, x.shape[3]))


Looks = dict[str, Callable[[Inspection, Tensor], Tensor]]
RIGHT: Looks = {
    "root of the batch": lambda self, x: swap(x) / math.sqrt(x.shape[0]),
    "root of the width": lambda self, x: swap(x) / math.sqrt(x.shape[1]),
    "quarter of the height": lambda self, x: part(swap(x), math.ceil(x.shape[2] / 4)),
    "lower half": lambda self, x: swap(x)[:, :, x.shape[2] // 2 :],
    "ramp over rows": lambda self, x: swap(x) * torch.arange(x.shape[2]).to(x)[:, None],
    "ones of a list": lambda self, x: swap(x) + x.new_ones([x.shape[0], 1, *x.shape[2:]]),
    "branch on the width": lambda self, x: swap(x) * 2 if x.shape[1] > 5 else swap(x),
    "attribute in a scale": lambda self, x: swap(x) * self.c**-0.5,
    "number of elements": lambda self, x: x / x.numel(),
}
HARD: Looks = {
    "batch as a float": lambda self, x: swap(x) / float(x.shape[0]),
    "length": lambda self, x: swap(x) * len(x),
    "loop over the batch": lambda self, x: torch.stack([swap(x)[i] for i in range(x.shape[0])]),
    "iteration": lambda self, x: torch.stack(list(swap(x))),
    "unbind": lambda self, x: torch.stack(list(swap(x).unbind(0))),
    "branch on the batch": lambda self, x: swap(x) * (2 if x.shape[0] == 2 else 1),
    "branch on a remainder": lambda self, x: swap(x) * (2 if x.shape[-1] % 3 == 0 else 1),
    "whole part of the height": lambda self, x: part(swap(x), int(x.shape[2] * 1.5)),
    "smaller of two": lambda self, x: swap(x)[..., : min(x.shape[-1], 7)],
    "comparison of shapes": lambda self, x: swap(x) * (2 if x.shape[2:] == (6, 6) else 1),
    "branch on a value": lambda self, x: swap(x) * (2 if x[0, 0, 0, 0] > 0.1 else 1),
    "largest value as a float": lambda self, x: swap(x) * float(x.max()),
    "largest value as a number": lambda self, x: swap(x) * x.max().item(),
    "tokens by attribute": lambda self, x: tokens(x, self.c),
    "tokens by number": lambda self, x: tokens(x, 8),
    "limit that is seldom met": lambda self, x: x.clamp(max=x.shape[1] * 10.0),
    "tensor of the width": lambda self, x: x * torch.tensor(x.shape[1]).to(x),
    "new tensor of the width": lambda self, x: x * x.new_tensor(x.shape[1]),
}


def rows(x: Tensor, count: int) -> Tensor:
    """Normalize by the statistics of this many rows of the batch."""
    y = x.reshape(count, -1)
    return ((y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True) + 1e-5)).view(x.shape)


MIXED: Looks = {  # numbers made of a width and of something that the next input may change
    "batch and width": lambda self, x: rows(swap(x), x.shape[0] * x.shape[1]),
    "batch and a number": lambda self, x: rows(x, x.shape[0] * 8),
    "a number and batch": lambda self, x: rows(x, 8 * x.shape[0]),
    "batch and groups": lambda self, x: rows(x, x.shape[0] * 4),
    "width, height and width": lambda self, x: x / (x.shape[1] * x.shape[2] * x.shape[3]),
    "a part of the shape": lambda self, x: swap(x) / math.prod(x.shape[1:]),
    "the last of a part": lambda self, x: swap(x) / (x.shape[:2][-1] * x.shape[2:][0]),
    "width and height in a root": lambda self, x: swap(x) * (x.shape[1] * x.shape[2]) ** -0.5,
}
LOOKS = {**RIGHT, **HARD, **MIXED}


@pytest.mark.parametrize("look", [*LOOKS.values()], ids=[*LOOKS])
def test_code_that_looks_is_right_for_other_inputs_or_refuses_them(
    look: Callable[[Inspection, Tensor], Tensor],
) -> None:
    """On other batches, images and values than the example's: equal, or one clear PruneError."""
    net = nn.Sequential(cbr(3, 8), Inspection(look), nn.Conv2d(8, 6, 1), nn.ReLU(), head(6))
    model, example = randomise(net).double(), images(2, 3, 6, 6)
    graph = pp.trace(model, example)
    assert graph.prunable["2"].size == 6
    shapes = (1, 6, 6), (3, 6, 6), (5, 9, 8)
    others = [
        images(number, 3, *size) * scale for number, *size in shapes for scale in (1, 300, -1)
    ]
    for _ in range(4):
        this = cut_at_random(model, graph, (example,))
        for other in others:
            for training in (False, True):
                with suppress(pp.PruneError):
                    assert difference(this.masked, this.small, (other,), training=training) <= 1e-10


@pytest.mark.parametrize("look", [*MIXED.values()], ids=[*MIXED])
def test_sizes_that_mix_with_widths_are_read_anew(
    look: Callable[[Inspection, Tensor], Tensor],
) -> None:
    net = nn.Sequential(cbr(3, 8), Inspection(look), nn.Conv2d(8, 6, 1), nn.ReLU(), head(6))
    model, example = randomise(net).double(), images(2, 3, 6, 6)
    graph = pp.trace(model, example)
    assert not graph.groups["0.0"].frozen
    this = cut_at_random(model, graph, (example,))
    for other in (images(1, 3, 6, 6), images(5, 3, 6, 6), images(2, 3, 9, 8)):
        assert difference(this.masked, this.small, (other,), training=False) <= 1e-10


def test_a_number_without_a_formula_is_refused_for_other_sizes() -> None:
    net = nn.Sequential(
        cbr(3, 8), Inspection(lambda self, x: rows(x, 4 * (x.shape[0] + 2) - 8)), head(8)
    )
    model, example = randomise(net).double(), images(2, 3, 6, 6)
    graph = pp.trace(model, example)
    this = cut_at_random(model, graph, (example,))
    if not graph.groups["0.0"].frozen:
        with pytest.raises(
            pp.PruneError, match=r"^1 \(Inspection\), test_rewr.*\.py:\d+, .*the sizes of the"
        ):
            this.small(images(4, 3, 6, 6))


# --------------------------------------------------------------------------------------------------
# writing down


class Written(nn.Module):
    """A module whose forward has most of what can be stored: slices, methods, children."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, y: dict[str, Tensor], flip: bool = False, p: float = 2.0) -> Any:
        x = self.layer(x)[..., 1:] * self.gain[1:]
        x = x.masked_fill(x > 1, -float("inf")).clamp(min=-2.0)
        rest = torch.zeros(x.size(0), 2, dtype=torch.float32) + y["rest"]
        x = torch.cat([x.flip(0) if flip else x, rest], dim=-1).pow(p)
        if self.training:
            x = x * 2
        return {"x": x, "pair": (x.shape[0] * rest, [x.sum()])}


def call(number: int = 3, flip: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(number, 4), {"rest": torch.randn(number, 2)}), {"flip": flip}


def written() -> tuple[nn.Module, CapturedForward]:
    module = Written()
    args, kwargs = call()
    captured = capture.capture(module, args, kwargs)
    assert isinstance(captured, CapturedForward)
    return module, captured


def test_capture_store_and_run_gives_the_same() -> None:
    module, captured = written()
    stored = json.loads(json.dumps(stored_graphs.encode(captured)))
    again = installed_forward.with_forward(copy.deepcopy(module), stored_graphs.decode(stored))
    assert isinstance(again, Written) and type(again) is not Written
    assert stored_graphs.encode(stored_graphs.decode(stored)) == stored
    args, kwargs = call(5)
    seen = []
    for training in (True, False):
        before, after = (m.train(training)(*args, **kwargs) for m in (module, again))
        assert before.keys() == after.keys() and type(after["pair"]) is tuple
        pairs = list(zip(tree_leaves(before), tree_leaves(after), strict=True))
        assert len(pairs) == 3 and all(torch.equal(a, b) for a, b in pairs)
        seen.append(after["x"])
    assert torch.equal(seen[0], 2 * seen[1])
    assert type(module) is Written and not module.training


def test_capture_leaves_the_module_as_it_was() -> None:
    class Counts(nn.Module):
        calls: Any = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls = x.shape[0]
            return x[:, :2]

    module = Counts().eval()
    refused = capture.capture(module, (torch.randn(3, 4),), {})
    assert refused == Refused("its code sets self.calls, which a graph cannot hold")
    assert type(module) is Counts and not module.training
    assert module.calls == 0 and vars(module).keys() == vars(Counts()).keys()


OTHER_CALLS: dict[str, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "another value": lambda x, y: ((x, y), {"flip": False}),
    "another keyword": lambda x, y: ((x, y), {"flip": True, "p": 3.0}),
    "one less": lambda x, y: ((x, y), {}),
    "without what is needed": lambda x, y: ((x,), {"flip": True}),
    "an unknown name": lambda x, y: ((x, y), {"flip": True, "other": 3}),
    "one too many": lambda x, y: ((x, y, True, 2.0, None), {}),
    "other keys": lambda x, y: ((x, {"left": y["rest"]}), {"flip": True}),
}


SAME_CALLS: dict[str, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "by position": lambda x, y: ((x, y, True), {}),
    "by name": lambda x, y: ((), {"y": y, "flip": True, "x": x}),
    "what is so by default": lambda x, y: ((x, y), {"flip": True, "p": float("2")}),
    "all of it": lambda x, y: ((x, y, True, float("2")), {}),
}


@pytest.mark.parametrize("form", SAME_CALLS)
def test_the_same_call_may_be_written_in_another_way(form: str) -> None:
    module, captured = written()
    again = installed_forward.with_forward(copy.deepcopy(module), captured).eval()
    args, kwargs = call()
    found, wanted = again(*SAME_CALLS[form](*args)[0], **SAME_CALLS[form](*args)[1]), module.eval()
    assert torch.equal(found["x"], wanted(*args, **kwargs)["x"])


@pytest.mark.parametrize("form", OTHER_CALLS)
def test_call_of_another_form_is_refused(form: str) -> None:
    module, captured = written()
    again = installed_forward.with_forward(copy.deepcopy(module), captured)
    (x, y), _ = call()
    args, kwargs = OTHER_CALLS[form](x, y)
    message = r"called with different arguments than the example.*Trace "
    with pytest.raises(pp.PruneError, match=message):
        again(*args, **kwargs)


def test_module_that_is_called_in_two_forms_is_cut_or_stays_whole() -> None:
    """The first call has no second argument, the second has: one graph does not do for both."""

    class Forms(nn.Module):
        def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
            a, b = x.split([3, 5], 1)
            x = torch.cat([b, a], 1)
            return x if more is None else x + more

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.forms, self.tail = cbr(3, 8), Forms(), nn.Sequential(cbr(8, 6), head(6))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.tail(self.forms(self.forms(x), x))

    model, x = randomise(Net()).double(), images()
    graph = pp.trace(model, x)
    assert graph.prunable["tail.0.0"].size == 6
    cut_at_random(model, graph, (x,))


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy()[:, :2])


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = {"tensor": torch.randn(4)}  # neither a parameter nor a buffer

    def forward(self, x: Tensor) -> Tensor:
        return x * self.hidden["tensor"]


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("targets are missing")
        return x[:, :2]


class Own(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Result(x[:, :2])


@dataclass
class Result:
    x: Tensor


class Leaves(nn.Module):
    penalty: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = x.square().mean()
        return x[:, :2]


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x[:, :2]


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.mean(0)
        return x[:, :2]


class NoGrad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            share = x.mean(1, keepdim=True)
        return x[:, :2] * share


class Decorated(nn.Module):
    @torch.no_grad()
    def share(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] * self.share(x)


class Precise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x[:, :2] * x.mean(1, keepdim=True)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


class OwnGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Twice.apply(x)
        return doubled[:, :2]


LOST: dict[type[nn.Module], str] = {
    Leaves: "sets self.",
    Appends: "appends to a list on self",
    Averages: "sets self.",
    NoGrad: "uses no_grad.__enter__",
    Decorated: "uses no_grad.__enter__",
    Precise: "uses autocast.__enter__",
    OwnGradient: "uses Function.apply",
}


@pytest.mark.parametrize("family", LOST, ids=lambda family: family.__name__)
def test_nothing_is_lost_when_code_is_written_down(family: type[nn.Module]) -> None:
    """Gradients, precision and what is left on self are no part of a graph."""
    module = family()
    before = dict(vars(module)), dict(module._buffers)
    for found in (
        capture.capture(module, (torch.randn(3, 4),), {}),
        symbolic_graphs.editable_graph(module),
    ):
        assert isinstance(found, Refused) and LOST[family] in found.reason
    assert (dict(vars(module)), dict(module._buffers)) == before
    assert family is not OwnGradient or module(torch.ones(1, 4)).tolist() == [[2.0, 2.0]]


def test_a_block_that_is_cut_keeps_what_learns_nothing_so() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed, self.one, self.two = (nn.Conv2d(8, 8, 1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.fixed(x)
            return x + self.two(self.one(x).relu())

    model, x = nn.Sequential(cbr(3, 8), Fixed(), head(8)).double(), images()
    pruner = pp.Pruner(model, x, lam=1.0, steps=1)
    pruner.param_groups(lr=0.0)
    set_gates(pruner, lambda group: group.size if group.minimum else 0, "closed")
    small = pruner.export()
    small(x).square().sum().backward()
    assert small[1].fixed.weight.grad is None and small[0][0].weight.grad is None
    assert small[2][-1].weight.grad is not None


UNCAPTURED: dict[type[nn.Module], str] = {
    Numpy: r"fails while it is captured \(TypeError: .*np\.ndarray",
    Constant: "a tensor that is neither an input nor a parameter or buffer",
    Raises: r"fails while it is captured \(RuntimeError: targets are missing\)",
    Own: "calls .*Result.*, which a stored graph may not use",
}


@pytest.mark.parametrize("family", UNCAPTURED, ids=lambda family: family.__name__)
def test_code_that_cannot_be_captured_is_refused_with_the_reason(family: type[nn.Module]) -> None:
    refused = capture.capture(family(), (torch.randn(3, 4),), {})
    assert isinstance(refused, Refused) and re.search(UNCAPTURED[family], refused.reason)


def test_forward_of_the_instance_is_not_written_down() -> None:
    module = Written()
    module.forward = lambda x: x  # type: ignore[method-assign]
    refused = capture.capture(module, (torch.randn(3, 4),), {})
    assert refused == Refused("its forward was replaced by a function that is not a method of it")


# --------------------------------------------------------------------------------------------------
# files that were tampered with


def node(data: dict[str, Any], kind: str, target: str = "") -> list[Any]:
    """Return the first node of this kind in the stored graph: name, kind, target, args, kwargs."""
    return next(n for n in data["eval"] if n[1] == kind and (not target or n[2] == target))


def set_target(kind: str, old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        node(data, kind, old)[2] = new

    return change


def set_attribute(name: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        found = node(data, "call_method", "flip")
        found[1:4] = ["call_function", "builtins.getattr", {"tuple": [found[3]["tuple"][0], name]}]

    return change


def set_keyword(data: dict[str, Any]) -> None:
    held = node(data, "call_function", "torch.cat")[4]["dict"]
    held["dim=__import__('os').getpid(), out"] = held.pop("dim")


def set_name(name: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        text = json.dumps(data["eval"])
        old = node(data, "call_method", "flip")[0]
        data["eval"] = json.loads(text.replace(f'"{old}"', json.dumps(name)))

    return change


def set_operator(name: str) -> Callable[[dict[str, Any]], None]:
    return set_target("call_function", "torch.cat", f"operator.{name}")


def set_type(data: dict[str, Any]) -> None:
    node(data, "call_function", "torch.zeros")[4]["dict"]["dtype"] = {"dtype": "load"}


def set_kind(data: dict[str, Any]) -> None:
    node(data, "call_method", "flip")[1] = "call_system"


CODE = "x); __import__('os').getpid("
TAMPERED: dict[str, Callable[[dict[str, Any]], None]] = {
    "unknown function": set_target("call_function", "torch.cat", "os.system"),
    "builtin": set_target("call_function", "torch.cat", "builtins.eval"),
    "function that reads files": set_target("call_function", "torch.cat", "torch.load"),
    "function in a submodule": set_target("call_function", "torch.cat", "torch.serialization.load"),
    "method not of tensors": set_target("call_method", "flip", "system"),
    "method with code": set_target("call_method", "flip", f"flip({CODE}"),
    "method of a method": set_target("call_method", "flip", "flip.__self__"),
    "module with code": set_target("call_module", "layer", f"layer({CODE}"),
    "attribute with code": set_target("get_attr", "gain", f"gain + {CODE}"),
    "private attribute": set_attribute("__class__"),
    "attribute by code": set_attribute(CODE),
    "keyword with code": set_keyword,
    "name with code": set_name("a = __import__('os').getpid(); b"),
    "name with a new line": set_name("a\nimport os\nb"),
}
ACCEPTED: dict[str, Callable[[dict[str, Any]], None]] = {
    "private attribute of the module": set_target("get_attr", "gain", "__init__.__globals__"),
    "private method": set_target("call_method", "flip", "__reduce_ex__"),
    "method that calls": set_target("call_method", "flip", "__call__"),
    "function that calls": set_operator("call"),
    "function that reads attributes": set_operator("attrgetter"),
    "function that calls methods": set_operator("methodcaller"),
    "type that is none": set_type,
    "kind of node": set_kind,
}


@pytest.mark.parametrize(
    "change",
    [
        *(pytest.param(change, id=name) for name, change in TAMPERED.items()),
        *(pytest.param(change, id=name) for name, change in ACCEPTED.items()),
    ],
)
def test_graph_that_was_tampered_with_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    stored = json.loads(json.dumps(stored_graphs.encode(written()[1])))
    stored_graphs.decode(copy.deepcopy(stored))
    change(stored)
    with pytest.raises(pp.PruneError, match="not loaded"):
        stored_graphs.decode(stored)


def test_stored_graph_cannot_run_code() -> None:
    """Go from a tensor to the globals of one of its methods, and to `eval`."""

    def items(*held: Any) -> dict[str, Any]:
        return {"tuple": list(held)}

    nothing: dict[str, Any] = {"dict": {}}
    nodes = [
        ["x0", "placeholder", "x0", items(), nothing],
        ["a", "call_function", "operator.attrgetter", items("backward.__globals__"), nothing],
        ["b", "call_function", "operator.call", items({"node": "a"}, {"node": "x0"}), nothing],
        ["c", "call_function", "operator.getitem", items({"node": "b"}, "__builtins__"), nothing],
        ["d", "call_function", "operator.getitem", items({"node": "c"}, "eval"), nothing],
        ["e", "call_function", "operator.call", items({"node": "d"}, "6 * 7"), nothing],
        ["output", "output", "output", items({"node": "e"}), nothing],
    ]
    identity = capture.capture(nn.Identity(), (torch.zeros(1),), {})
    assert isinstance(identity, CapturedForward)
    stored = {**stored_graphs.encode(identity), "train": nodes, "eval": nodes}
    try:
        answer = installed_forward.with_forward(nn.Identity(), stored_graphs.decode(stored))(
            torch.zeros(1)
        )
    except pp.PruneError:
        return
    pytest.fail(f"a file made python compute {answer}")


def test_file_that_was_tampered_with_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    pp.save(shrunk("pad").small, path)
    with safe_open(str(path), framework="pt") as file:
        content = json.loads(file.metadata()["polarprune"])
    for graph in (content["recipe"]["rewired"]["1"][mode] for mode in ("train", "eval")):
        next(n for n in graph if n[1] == "call_function")[2] = "os.system"
    text, tensors = json.dumps({**content, "sha256": BLANK}), load_file(str(path))
    save_file(tensors, str(path), metadata={"polarprune": signed(text, tensors)})
    with pytest.raises(
        pp.PruneError, match=r"not loaded: .* function 'os\.system', which is not allowed"
    ):
        pp.load(path, model=made("pad")[0])


def test_names_of_nodes_mean_nothing_outside_of_the_file(tmp_path: Path) -> None:
    """Another version of torch may name nodes otherwise."""
    path = tmp_path / "small.safetensors"
    small = shrunk("pad").small
    pp.save(small, path)
    with safe_open(str(path), framework="pt") as file:
        content = json.loads(file.metadata()["polarprune"])
    for code in content["recipe"]["rewired"].values():
        for mode in ("train", "eval"):
            code[mode] = renamed(code[mode])
    text, tensors = json.dumps({**content, "sha256": BLANK}), load_file(str(path))
    save_file(tensors, str(path), metadata={"polarprune": signed(text, tensors)})
    model, x = made("pad")
    assert torch.equal(pp.load(path, model=model).eval()(x), small.eval()(x))


def renamed(nodes: list[Any]) -> list[Any]:
    """Return a stored graph whose nodes have other names."""
    names = {name: f"other_{number}" for number, (name, *_) in enumerate(nodes)}

    def replaced(data: Any) -> Any:
        if isinstance(data, dict) and data.keys() == {"node"}:
            return {"node": names[data["node"]]}
        if isinstance(data, dict):
            return {key: replaced(item) for key, item in data.items()}
        return [replaced(item) for item in data] if isinstance(data, list) else data

    return [[names[name], *map(replaced, rest)] for name, *rest in nodes]
