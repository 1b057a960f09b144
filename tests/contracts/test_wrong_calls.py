"""Wrong calls: each is one `PruneError` that says where, what and the remedy; nothing changes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import json
import logging
import math
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from typer.testing import CliRunner

import polarprune as pp
from polarprune.cli.app import app
from polarprune.files.model_file import read_card
from polarprune.report.report import Report

pytestmark = pytest.mark.usefixtures("shared_traces")
X = torch.zeros(2, 3)
STEPS = 6


def made(build: Callable[..., Any]) -> Callable[..., Any]:
    """The weights of what is built in a call are not drawn from dice that are watched."""

    @functools.wraps(build)
    def built(*args: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return build(*args)

    return built


@made
def make() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)
    )


@made
def other() -> nn.Sequential:
    """Another model, as wide as nothing in the first."""
    return nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2))


@dataclass
class World:
    """All that a call may touch."""

    folder: Path
    net: nn.Sequential = field(default_factory=make)
    pruner: Any = None
    optimizer: Any = None
    small: Any = None

    @property
    def file(self) -> Path:
        return self.folder / "small.safetensors"

    def plain(self, **settings: Any) -> pp.Pruner:
        goal = {} if settings.keys() & {"macs", "params", "latency", "lam"} else {"macs": 0.5}
        return pp.Pruner(self.net, X, **{"steps": STEPS, **goal, **settings})


def fresh(folder: Path) -> World:
    """A plain model, and files of all kinds."""
    world = World(folder)
    (folder / "text").write_text("hello")
    (folder / "folder").mkdir()
    save_file({"x": X}, str(folder / "plain.safetensors"))
    graph = pp.trace(world.net, X)
    world.small = pp.shrink(world.net, graph, {"0": [0, 2, 5]})
    pp.save(world.small, world.file)
    return world


def gated(folder: Path, **settings: Any) -> World:
    """Before the first step, nothing attached."""
    world = World(folder)
    world.pruner = world.plain(**settings)
    world.optimizer = SGD(world.pruner.param_groups(lr=0.05), momentum=0.9)
    return world


def trained(folder: Path, by_hand: bool = False, **settings: Any) -> World:
    """All steps are done."""
    world = gated(folder, **settings)
    if not by_hand:
        world.pruner.attach(world.optimizer)
    for number in range(STEPS):
        world.optimizer.zero_grad()
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        world.net(x).square().mean().backward()
        world.optimizer.step()
        if by_hand:
            world.pruner.step()
    return world


def by_hand(folder: Path) -> World:
    """All steps are done, and the pruner does not know the optimizer."""
    return trained(folder, by_hand=True)


def with_lam(folder: Path) -> World:
    return gated(folder, lam=1.0)


def compacting(folder: Path) -> World:
    return gated(folder, compact="auto")


def damaged(change: Callable[[World], Any]) -> Callable[[Path], World]:
    """All steps are done, and something was changed from outside."""

    def build(folder: Path) -> World:
        world = trained(folder)
        with torch.no_grad():
            change(world)
        return world

    return build


# --- all that must be as before -------------------------------------------------------------------


def picture(world: World) -> dict[str, Any]:
    """States, hooks, parametrizations, modes, classes, attributes, outputs; files."""
    models = {"net": world.net, "small": world.small} if world.small else {"net": world.net}
    found: dict[str, Any] = {name: picture_of(model) for name, model in models.items()}
    if world.pruner is not None:
        with contextlib.suppress(pp.PruneError):  # NaN, in the model's state too
            found["pruner"] = copy.deepcopy(world.pruner.state_dict())
        found["pruner's own"] = {
            key: (id(value), value if isinstance(value, (bool, int, float)) else None)
            for key, value in vars(world.pruner).items()
        }
    if world.optimizer is not None:
        found["optimizer"] = copy.deepcopy(world.optimizer.state_dict())
        found["optimizer's own"] = {
            "params": [[id(p) for p in group["params"]] for group in world.optimizer.param_groups],
            "hooks": hooks_of(world.optimizer),
        }
    found["files"] = {
        str(file): file.read_bytes() if file.is_file() else None
        for file in sorted(world.folder.rglob("*"))
    }
    return found


def picture_of(model: nn.Module) -> dict[str, Any]:
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        trial = copy.deepcopy(model)
        on_cpu = not any(tensor.is_meta for _, tensor in tensors)
        outputs = [trial.train(mode)(torch.randn(5, 3)) for mode in (False, True) if on_cpu]
    return {
        "state": {name: bits(tensor) for name, tensor in model.state_dict().items()},
        "tensors": [(name, id(t), t.requires_grad, t.grad is None) for name, t in tensors],
        "gradients": [bits(t.grad) for _, t in tensors if t.grad is not None],
        "modules": [(path, id(m), type(m), m.training) for path, m in modules.items()],
        "attributes": [(path, list(vars(m))) for path, m in modules.items()],
        "hooks": [(path, hooks_of(m)) for path, m in modules.items()],
        "parametrized": [
            (path, list(m.parametrizations))
            for path, m in modules.items()
            if parametrize.is_parametrized(m)
        ],
        "outputs": [bits(output) for output in outputs],
    }


def bits(tensor: Tensor) -> Any:
    """NaN equals NaN there."""
    if tensor.is_meta:
        return list(tensor.shape)
    return [str(tensor.dtype), list(tensor.shape), tensor.detach().clone().numpy().tobytes()]


def hooks_of(owner: Any) -> dict[str, list[tuple[Any, int]]]:
    return {
        key: [(number, id(hook)) for number, hook in table.items()]
        for key, table in vars(owner).items()
        if "hook" in key and isinstance(table, dict)
    }


def surroundings() -> dict[str, Any]:
    """What all code of a process shares."""
    back: Any = torch.backends
    precisions = [back.cuda.matmul, back.cudnn.conv, back.cudnn.rnn]
    return {
        "torch's dice": torch.get_rng_state(),
        "python's dice": random.getstate(),
        "numpy's dice": [str(part) for part in numpy.random.get_state()],
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "cudnn": (back.cudnn.enabled, back.cudnn.benchmark, back.cudnn.deterministic),
        "precision": [place.fp32_precision for place in precisions],
        "fast paths": (back.mha.get_fastpath_enabled(), back.mkldnn.enabled),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "logging": logging.root.manager.disable,
        "warnings": list(warnings.filters),
        "garbage": (gc.isenabled(), gc.get_threshold()),
        "place": (os.getcwd(), dict(os.environ)),
    }


def assert_same(one: Any, two: Any, what: str = "") -> None:
    assert type(one) is type(two), what
    if isinstance(one, Tensor):
        assert_same(bits(one), bits(two), what)
    elif isinstance(one, dict):
        assert list(one) == list(two), what
        for key in one:
            assert_same(one[key], two[key], f"{what}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), what
        for number, pair in enumerate(zip(one, two, strict=True)):
            assert_same(*pair, f"{what}[{number}]")
    else:
        assert one == two or one != one, f"{what}: {one} is {two} now"


# --- the calls ------------------------------------------------------------------------------------

Call = Callable[[World], Any]
FRESH: dict[str, tuple[Call, str]] = {}  # and how their message begins


def failing(flow: Any, op: Any) -> None:
    raise KeyError("a rule that fails")


class Fails(nn.Module):
    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.first, self.last, self.answer = nn.Linear(3, 8), nn.Linear(8, 2), answer

    def forward(self, x: Tensor) -> Any:
        if self.answer is None:
            raise KeyError("own code")
        return self.answer


@made
def fails(answer: Any = None) -> nn.Module:
    return Fails(answer)


@made
def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2))


def compiled() -> nn.Module:
    return torch.compile(make(), backend="eager")  # type: ignore[return-value]


@made
def with_gate(net: nn.Sequential) -> nn.Module:
    return nn.Sequential(net[0], pp.Gate(8), nn.Linear(8, 2))


# the model and the example
NO_MODULE = "the model is a {}; give a torch.nn.Module"
NO_RUN = r"{}: the model does not run on the example inputs: .*Pass inputs of the shape, dtype and"
MODELS: dict[str, tuple[Callable[[World], Any], str]] = {
    "None": (lambda w: None, NO_MODULE.format("NoneType")),
    "a class": (lambda w: nn.Linear, NO_MODULE.format("type")),
    "a function": (lambda w: w.net.forward, NO_MODULE.format("method")),
    "a state": (lambda w: w.net.state_dict(), NO_MODULE.format("OrderedDict")),
    "a list": (lambda w: [w.net], NO_MODULE.format("list")),
    "compiled": (
        lambda w: compiled(),
        "the model is compiled: give polarprune the plain model first",
    ),
    "in DataParallel": (
        lambda w: nn.DataParallel(w.net),
        r"the model is wrapped in DataParallel: give .*\(model.module\) first",
    ),
    "lazy": (lambda w: lazy(), "the model has lazy modules without weights: run it once"),
    "on meta": (lambda w: make().to("meta"), "the example inputs are on cpu, the model is on meta"),
    "fails": (lambda w: fails(), NO_RUN.format("Fails")),
    "returns text": (lambda w: fails("text"), "Fails: the model's output contains no tensor"),
    "with a gate": (
        lambda w: with_gate(w.net),
        "the model has gates already: use the Pruner that put them there",
    ),
}
EXAMPLES: dict[str, tuple[Any, str]] = {
    "None": (None, NO_RUN.format("0")),
    "text": ("x", NO_RUN.format("0")),
    "an array": (numpy.zeros((2, 3), "float32"), NO_RUN.format("0")),
    "another shape": (torch.zeros(2, 5), NO_RUN.format("0")),
    "another type": (X.double(), NO_RUN.format("0")),
    "whole numbers": (X.long(), NO_RUN.format("0")),
    "nothing in it": (X[:0], "the example inputs are empty: give at least one example of each"),
    "elsewhere": (X.to("meta"), "the example inputs are on meta, the model is on cpu: move the"),
    "two inputs": ((X, X), NO_RUN.format("Sequential")),
    "no input": ((), NO_RUN.format("Sequential")),
    "another name": ({"image": X}, NO_RUN.format("Sequential")),
}
for name, (wrong, said) in MODELS.items():
    FRESH[f"trace: the model, {name}"] = (lambda w, wrong=wrong: pp.trace(wrong(w), X), said)
    FRESH[f"Pruner: the model, {name}"] = (
        lambda w, wrong=wrong: pp.Pruner(wrong(w), X, macs=0.5, steps=9),
        said,
    )
for name, (wrong, said) in EXAMPLES.items():
    FRESH[f"trace: the example, {name}"] = (lambda w, wrong=wrong: pp.trace(w.net, wrong), said)
    FRESH[f"Pruner: the example, {name}"] = (
        lambda w, wrong=wrong: pp.Pruner(w.net, wrong, macs=0.5, steps=9),
        said,
    )

# what trace and Pruner are told
TOLD: dict[str, tuple[Callable[[World], dict[str, Any]], str]] = {
    "keep, a module": (lambda w: {"keep": [w.net[0]]}, "keep: Linear given; give names of modules"),
    "keep, None": (lambda w: {"keep": None}, "keep: NoneType given; give names of modules"),
    "keep, a number": (lambda w: {"keep": 3}, "keep: int given; give names of modules"),
    "keep, bytes": (lambda w: {"keep": b"0"}, "keep: int given; give names of modules"),
    "keep, mixed": (lambda w: {"keep": ["0", 3]}, "keep: str, int given; give names of modules"),
    "keep, no match": (
        lambda w: {"keep": ["layer9"]},
        "keep: no module with parameters matches 'layer9'. Names are as in",
    ),
    "keep, no pattern": (
        lambda w: {"keep": "["},
        r"keep: no module with parameters matches '\['. Names are as in",
    ),
    "rules, a number": (lambda w: {"rules": 3}, "rules=3: give a dict, such as rules="),
    "rules, a list": (lambda w: {"rules": [failing]}, r"rules=\[<function.*: give a dict, such as"),
    "rules, a name": (lambda w: {"rules": {"relu": failing}}, "rules: 'relu' is not an operation"),
    "rules, no function": (
        lambda w: {"rules": {torch.ops.aten.relu: 3}},
        r"rules: 3 is not a rule for aten.relu; give a function of \(flow, op\)",
    ),
    "rules, one fails": (
        lambda w: {"rules": {torch.ops.aten.relu: failing}},
        "rules: the rule for aten.relu.default fails in 2 .*KeyError.*Correct",
    ),
    "norms, a word": (lambda w: {"norms": "yes"}, "norms='yes': give True or False"),
    "norms, None": (lambda w: {"norms": None}, "norms=None: give True or False"),
    "norms, a number": (lambda w: {"norms": 1}, "norms=1: give True or False"),
}
for name, (given, said) in TOLD.items():
    FRESH[f"trace: {name}"] = (lambda w, given=given: pp.trace(w.net, X, **given(w)), said)
    FRESH[f"Pruner: {name}"] = (lambda w, given=given: w.plain(**given(w)), said)

SETTINGS: list[tuple[dict[str, Any], str]] = [
    *(
        ({key: value}, f"{key}={re.escape(repr(value))}: a budget is a fraction of the original")
        for key in ("macs", "params", "latency")
        for value in (0, 1.0, 1.5, -0.1, math.nan, math.inf, True, "0.5", [0.5], 1j)
    ),
    *(
        ({"lam": value}, f"lam={re.escape(repr(value))}: must be positive and finite")
        for value in (0, -1.0, math.nan, math.inf, "1", True, [1], 10**400)
    ),
    *(
        ({"steps": value}, f"steps={re.escape(repr(value))}: give the number of optimizer steps")
        for value in (0, -3, 2.5, 10.0, "ten", None, True, math.nan, 10**30)
    ),
    *(
        ({"min_channels": value}, r"min_channels=.*: give a number of channels, 0 or more")
        for value in (-1, 0.5, True, "2")
    ),
    *(
        ({"multiple_of": value}, f"multiple_of={value!r}: give a positive integer")
        for value in (0, -8, 1.5, "8", None, True)
    ),
    *(
        ({"schedule": value}, r"schedule=.*: give a polarprune.Schedule\(")
        for value in (None, {"done": 0.4}, pp.Schedule, 0.5)
    ),
    *(
        ({"compact": value}, 'compact=.*: give "auto", or call pruner.compact')
        for value in (True, False, "yes", [])
    ),
    *(
        ({"uniform": value}, r"uniform=.*: give True, or patterns of names of groups")
        for value in (None, 1, 0.5, "", [], [3], ["*", None], {})
    ),
    ({"uniform": True}, "uniform=True: no two prunable groups are at the same position of rep"),
    ({"uniform": "nowhere*"}, r"uniform: 'nowhere\*' matches no two prunable groups of the same"),
    ({"uniform": ["0", "3"]}, r"uniform: '0' matches no two .* names of groups \(0, 3, …"),
    ({"uniform": True, "macs": None, "lam": 1.0}, "conflicting settings: with lam= every channel"),
    ({"macs": 0.5, "lam": 1.0}, "conflicting settings: lam=1.0 leaves the ratio open, macs"),
    ({"macs": None}, "no goal: give a budget"),
    ({"macs": 0.001}, r"budget out of reach: macs=0.001 \(the lowest is"),
    ({"multiple_of": 1000, "macs": 0.5}, r"budget out of reach: macs=0.5 \(the lowest is 1.0"),
    *(
        ({"frozen": value}, r"frozen=.*: give a dict from names of groups to reasons")
        for value in ("0", ["0"], {"0": 1}, {0: "why"})
    ),
    ({"frozen": {"1": "why"}}, r"frozen: no group is named '1'\. print\(polarprune\.trace"),
    ({"keep": "*"}, "no prunable channels: every group is frozen .*Print polarprune.trace"),
]
for settings, said in SETTINGS:
    name = ", ".join(f"{key}={str(value)[:20]}" for key, value in settings.items())
    FRESH[f"Pruner: {name}"] = (lambda w, settings=settings: w.plain(**settings), said)

# shrink
PLANS: dict[str, tuple[Any, str]] = {
    "None": (None, "plan: got NoneType, expected a dict; use group names"),
    "a list": ([0], "plan: got list, expected a dict; use group names"),
    "no such group": (
        {"layer9": [0]},
        "plan: unknown or frozen group 'layer9'. Use prunable groups: 0, 3",
    ),
    "a frozen group": ({"5": [0]}, "plan: unknown or frozen group '5'. Use prunable groups: 0, 3"),
    "a number as name": ({0: [0]}, "plan: unknown or frozen group 0. Use prunable groups: 0, 3"),
    "beyond the end": ({"0": [8]}, "plan: group '0' has 8 channels; use indices from 0 to 7"),
    "from the end": ({"0": [-1]}, "plan: group '0' has 8 channels; use indices from 0 to 7"),
    "halves": (
        {"0": [0.5]},
        "plan: group '0' got 0.5, …; use the indices of the channels",
    ),
    "a mask": (
        {"0": torch.ones(8, dtype=torch.bool)},
        "plan: group '0' got True, .*for a mask",
    ),
    "text": ({"0": "01"}, "plan: group '0' got '01'; use a list"),
    "a count": ({"0": 3}, "plan: group '0' got 3; use a list"),
    "a table": (
        {"0": [[1]]},
        r"plan: group '0' got \[1\], …; use the indices",
    ),
    "nothing left": ({"0": []}, "0: the plan keeps 0 channels, but the group needs at least 1"),
}
for name, (wrong, said) in PLANS.items():
    FRESH[f"shrink: the plan, {name}"] = (
        lambda w, wrong=wrong: pp.shrink(w.net, pp.trace(w.net, X), wrong),
        said,
    )
FRESH |= {
    "shrink: no model": (
        lambda w: pp.shrink(None, pp.trace(w.net, X), {}),
        "shrink: the model is a NoneType; give a torch.nn.Module",
    ),
    "shrink: a class": (
        lambda w: pp.shrink(nn.Linear, pp.trace(w.net, X), {}),
        "shrink: the model is a type; give a torch.nn.Module",
    ),
    "shrink: no graph": (
        lambda w: pp.shrink(w.net, None, {}),
        "shrink: the graph is a NoneType; give what polarprune.trace",
    ),
    "shrink: a plan as graph": (
        lambda w: pp.shrink(w.net, {"0": [1]}, {}),
        "shrink: the graph is a dict; give what polarprune.trace",
    ),
    "shrink: another model": (
        lambda w: pp.shrink(other(), pp.trace(w.net, X), {"0": [1]}),
        r"0.weight: expected shape \[8, 3\], found \[9, 3\]. The graph bel",
    ),
    "shrink: a small one again": (
        lambda w: pp.shrink(w.small, pp.trace(w.net, X), {"0": [1]}),
        r"0.weight: expected shape \[8, 3\], found \[3, 3\]. The graph",
    ),
    "shrink: compiled": (
        lambda w: pp.shrink(compiled(), pp.trace(w.net, X), {"0": [1]}),
        r"0.weight: expected shape \[8, 3\], found missing. The graph belongs",
    ),
}

# save
PATHS = (None, 3, "", b"small.safetensors", X)
for path in PATHS:
    FRESH[f"save: {path!r:.12}"] = (
        lambda w, path=path: pp.save(w.small, path),
        r"save: path=.*; give the name of a file",
    )
    FRESH[f"load: {path!r:.12}"] = (
        lambda w, path=path: pp.load(path, model=w.net),
        r"load: path=.*; give the name of a file",
    )
    FRESH[f"read_card: {path!r:.12}"] = (
        lambda w, path=path: read_card(path),
        r"read_card: path=.*; give the name of a file",
    )
for path, why in {
    "folder": "Is a directory",
    "none/x": "No such file",
    "text/x": "Not a directory",
    "a\0b": "embedded null byte",
}.items():
    FRESH[f"save: to {path!r}"] = (
        lambda w, path=path: pp.save(w.small, w.folder / path),
        f"save: .*{path} cannot be written: .*{why}.*The file that was there is unchanged.*"
        "give another path",
    )
CARDS: dict[str, tuple[Any, str]] = {
    "a number": (3, "save: card is a int; give a dict of plain data"),
    "a list": ([{}], "save: card is a list; give a dict of plain data"),
    "a tensor": ({"x": X}, "save: .* cannot be written: .*Tensor is not JSON.*Give plain data as"),
    "NaN": ({"loss": math.nan}, "save: .* cannot be written: .*Give plain data as card"),
    "a set": ({"x": {1}}, "save: .* cannot be written: .*set is not JSON.*Give plain data as card"),
    "names": ({(1, 2): 3}, "save: .* cannot be written: keys must be .*Give plain data as card"),
    "twice": ({1: 2, "1": 3}, "save: .* cannot be written: a key occurs twice. Give plain data"),
}
for name, (wrong, said) in CARDS.items():
    FRESH[f"save: a card, {name}"] = (
        lambda w, wrong=wrong: pp.save(w.small, w.folder / "new", card=wrong),
        said,
    )
NOT_MADE = (
    r"save: {} was not made by export\(\) or shrink\(\). A model that was not pruned needs no "
    r"recipe: use"
)
FRESH |= {
    "save: a plain model": (
        lambda w: pp.save(w.net, w.folder / "new"),
        NOT_MADE.format("Sequential"),
    ),
    "save: None": (lambda w: pp.save(None, w.folder / "new"), NOT_MADE.format("NoneType")),
    "save: a state": (
        lambda w: pp.save(w.small.state_dict(), w.folder / "new"),
        NOT_MADE.format("OrderedDict"),
    ),
    "save: on meta": (
        lambda w: pp.save(copy.deepcopy(w.small).to("meta"), w.folder / "new"),
        "save: 0.weight is on the meta device and has no values; save the model bef",
    ),
}

# load
MISSING = "Give a file that polarprune.save wrote"
ANOTHER = "load: .* is damaged or belongs to another model: .*give a fresh instance of the class"
FRESH |= {
    "load: no file": (
        lambda w: pp.load(w.folder / "none", model=w.net),
        f"load: there is no file .*none. {MISSING}",
    ),
    "load: a folder": (
        lambda w: pp.load(w.folder, model=w.net),
        f"load: there is no file .*. {MISSING}",
    ),
    "load: a text": (
        lambda w: pp.load(w.folder / "text", model=w.net),
        f"load: .*text is not a safetensors file: .*{MISSING}",
    ),
    "load: no recipe": (
        lambda w: pp.load(w.folder / "plain.safetensors", model=w.net),
        f"load: .* holds no recipe; it was not written by .*{MISSING}",
    ),
    "read_card: a text": (
        lambda w: read_card(w.folder / "text"),
        f"load: .*text is not a safetensors file: .*{MISSING}",
    ),
    "load: no model": (
        lambda w: pp.load(w.file, model=None),
        "load: model=None; give an instance, such as model=Net",
    ),
    "load: a class": (
        lambda w: pp.load(w.file, model=nn.Sequential),
        "load: model=<class .*; give an instance, such as model=Net",
    ),
    "load: a state": (
        lambda w: pp.load(w.file, model=w.net.state_dict()),
        "load: model=.{,60}; give an instance, such as model=Net",
    ),
    "load: on meta": (
        lambda w: pp.load(w.file, model=make().to("meta")),
        "load: the model is on the meta device; give one that holds its weights",
    ),
    "load: another model": (lambda w: pp.load(w.file, model=other()), ANOTHER),
    "load: a small model": (lambda w: pp.load(w.file, model=w.small), ANOTHER),
    "load: a wrapped model": (lambda w: pp.load(w.file, model=nn.DataParallel(w.net)), ANOTHER),
    "load: a compiled model": (lambda w: pp.load(w.file, model=compiled()), ANOTHER),
}

# Gate
for value in (0, -1, "3", 2.5, None, True, [3]):
    FRESH[f"Gate: size={value!r}"] = (
        lambda w, value=value: pp.Gate(value),
        r"Gate: size=.*; pass the number of channels",
    )
for value in ("1", None, 1.5, True):
    FRESH[f"Gate: axis={value!r}"] = (
        lambda w, value=value: pp.Gate(3, value),
        r"Gate: axis=.*; pass the axis of the channels",
    )
for value in (torch.int64, torch.complex64, "float32", None, float):
    FRESH[f"Gate: dtype={value!r}"] = (
        lambda w, value=value: pp.Gate(3, 1, value),
        r"Gate: dtype=.*; pass a floating-point dtype",
    )
for name, value in {
    "four channels": torch.ones(2, 4),
    "one channel": torch.ones(2, 1),
    "no such axis": torch.ones(3),
    "whole numbers": torch.ones(2, 3, dtype=torch.long),
    "None": None,
    "a list": [[1.0, 1.0, 1.0]],
}.items():
    FRESH[f"Gate: called, {name}"] = (
        lambda w, value=value: pp.Gate(3)(value),
        "Gate: the input is .*; pass a floating-point tensor with 3 channels along",
    )

# Schedule
for numbers in (
    {"eps_end": 0.0},
    {"eps_end": 1.0},
    {"eps_start": -0.1},
    {"done": 1.5},
    {"done": 0.0},
    {"start": 0.7},
    {"start": math.nan},
    {"window": 0},
    {"sweeps": 0},
    {"max_shrink": -math.inf},
    {"floor": -1.0},
    {"gate_lr": -1.0},
    {"alpha_start": 10**400},
    {"eps_end": 0.0, "done": 2.0},
):
    named = ".*".join(numbers)
    FRESH[f"Schedule: {str(numbers)[:50]}"] = (
        lambda w, numbers=numbers: pp.Schedule(**numbers),
        f"Schedule: .*{named}.*Correct these numbers",
    )
for numbers in (
    {"done": "0.5"},
    {"start": None},
    {"eps_end": [1e-3]},
    {"floor": True},
    {"gate_lr": 1j},
    {"sweeps": 1.5},
    {"relaxed": "yes"},
    {"relaxed": 1},
    {"window": torch.ones(2)},
):
    FRESH[f"Schedule: {numbers}"] = (
        lambda w, numbers=numbers: pp.Schedule(**numbers),
        f"Schedule: {next(iter(numbers))}=.*Give numbers, integers for sweeps",
    )

# reports
REPORT = Report({"steps": 3}, {"macs": 4}, {"macs": 2}, [], [], {}, [])
WHOLE = dataclasses.asdict(REPORT)
TEXTS: dict[str, Any] = {
    "None": None,
    "a path": "runs/report.json",
    "empty": "",
    "a list": "[1, 2]",
    "null": "null",
    "no parts": "{}",
    "one more": json.dumps({**WHOLE, "more": 1}),
    "settings": json.dumps({**WHOLE, "settings": 3}),
    "before": json.dumps({**WHOLE, "before": []}),
    "other costs": json.dumps({**WHOLE, "after": {"params": 3}}),
    "groups": json.dumps({**WHOLE, "groups": [{}]}),
    "notes": json.dumps({**WHOLE, "notes": [1]}),
    "history": json.dumps({**WHOLE, "history": [{"step": "x"}]}),
    "results": json.dumps({**WHOLE, "results": {"table": [{"accuracy": "high"}]}}),
}
for name, text in TEXTS.items():
    FRESH[f"Report.from_json: {name}"] = (
        lambda w, text=text: Report.from_json(text),
        r"report: this is not what Report.to_json\(\) writes .*Give the text of a report.json",
    )
for value in (1, 0, -1, 2.5, None, "3"):
    FRESH[f"snapshots: {value!r}"] = (
        lambda w, value=value: REPORT.snapshots(value),
        r"snapshots: count=.*; give an integer of at least 2",
    )
FRESH["to_json: a tensor"] = (
    lambda w: dataclasses.replace(REPORT, results={"x": X}).to_json(),
    "report: it holds a value that JSON cannot represent .*Give plain data as results",
)

# --- calls of a pruner ----------------------------------------------------------------------------

RAW = "attach: {} is not a torch.optim.Optimizer; attach to the raw optimizer inside it"
NOT_HELD = (
    r"attach: the optimizer does not hold the gates: build the optimizer with pruner.param_gr"
)
GATED: dict[str, tuple[Call, str]] = {
    "attach: None": (lambda w: w.pruner.attach(None), RAW.format("NoneType")),
    "attach: a module": (lambda w: w.pruner.attach(w.net), RAW.format("Sequential")),
    "attach: a class": (lambda w: w.pruner.attach(SGD), RAW.format("type")),
    "attach: a list": (lambda w: w.pruner.attach([w.optimizer]), RAW.format("list")),
    "attach: a scheduler": (
        lambda w: w.pruner.attach(StepLR(SGD(w.net.parameters(), 0.1), 1)),
        RAW.format("StepLR"),
    ),
    "attach: another, a number": (lambda w: w.pruner.attach(w.optimizer, 3), RAW.format("int")),
    "attach: weight decay": (
        lambda w: w.pruner.attach(SGD(w.net.parameters(), 0.1, weight_decay=0.01)),
        r"attach: gates \(for one, of .*\) are in a parameter group with weight decay 0.01.*build",
    ),
    "attach: gates in another, too": (
        lambda w: w.pruner.attach(w.optimizer, Adam(w.net.parameters())),
        r"attach: two optimizers hold gates \(for one, of .*take the parameters of the other ones",
    ),
    "attach: no gates": (lambda w: w.pruner.attach(SGD(other().parameters(), 0.1)), NOT_HELD),
    "attach: one gate": (
        lambda w: w.pruner.attach(Adam([next(iter(w.pruner.gates.values())).alpha])),
        NOT_HELD,
    ),
    "attach: of another run": (
        lambda w: w.pruner.attach(SGD(World(w.folder).plain().param_groups(lr=0.1))),
        NOT_HELD,
    ),
    "export: no step": (
        lambda w: w.pruner.export(),
        r"export: the budget is not met yet: .*0 of 6 steps were taken.*Continue",
    ),
    "trace: gates are in": (
        lambda w: pp.trace(w.net, X),
        "the model has gates already: use the Pruner that put them there",
    ),
    "Pruner: gates are in": (
        lambda w: w.plain(),
        "the model has gates already: use the Pruner that put them there",
    ),
    "shrink: gates are in": (
        lambda w: pp.shrink(w.net, w.pruner.graph, {"0": [1]}),
        r"3.weight: expected shape \[6, 8\], found missing. The graph belongs to another model",
    ),
    "save: gates are in": (
        lambda w: pp.save(w.net, w.folder / "new"),
        NOT_MADE.format("Sequential"),
    ),
    "save: a pruner": (lambda w: pp.save(w.pruner, w.folder / "new"), NOT_MADE.format("Pruner")),
}


def resumed(w: World, **settings: Any) -> None:
    """From a state of a run with other settings."""
    w.pruner.load_state_dict(World(w.folder).plain(**settings).state_dict())


def changed(w: World, **parts: Any) -> None:
    """From its own state, but for some parts."""
    w.pruner.load_state_dict({**w.pruner.state_dict(), **parts})


def without(w: World, part: str) -> None:
    w.pruner.load_state_dict({k: v for k, v in w.pruner.state_dict().items() if k != part})


RETURNED = r"Pass the dict that pruner.state_dict\(\) returned"
NO_STATE = (
    r"load_state_dict: got {}\. " + RETURNED + r"\. To resume from a file, read it with torch.load"
)
ELSE = (
    "load_state_dict: the state comes from a run with {}.*"
    "Build the Pruner with the same (settings|schedule). Nothing was changed"
)
OWN = r"load_state_dict: {}.*\. " + RETURNED + r"\. Nothing was changed"
NO_GROUPS = (
    "load_state_dict: the groups of the state differ from those of this model. "
    "Build the Pruner with"
)
GATED |= {
    "load_state_dict: None": (lambda w: w.pruner.load_state_dict(None), NO_STATE.format("None")),
    "load_state_dict: a file": (
        lambda w: w.pruner.load_state_dict("run.pt"),
        NO_STATE.format("'run.pt'"),
    ),
    "load_state_dict: a tensor": (
        lambda w: w.pruner.load_state_dict(X),
        NO_STATE.format(r"a tensor of shape \[2, 3\]"),
    ),
    "load_state_dict: nothing": (
        lambda w: w.pruner.load_state_dict({}),
        OWN.format("the state has no 'settings'"),
    ),
    "load_state_dict: the model's": (
        lambda w: w.pruner.load_state_dict(w.net.state_dict()),
        OWN.format("the state has no 'settings'"),
    ),
    "load_state_dict: the optimizer's": (
        lambda w: w.pruner.load_state_dict(w.optimizer.state_dict()),
        OWN.format("the state has no 'settings'"),
    ),
    "load_state_dict: no gates": (
        lambda w: without(w, "alpha"),
        OWN.format("the state has no 'alpha'"),
    ),
    "load_state_dict: one more": (
        lambda w: changed(w, more=1),
        OWN.format("the state has the unknown key 'more'"),
    ),
    "load_state_dict: a step": (lambda w: changed(w, step="3"), OWN.format("step is '3', not a")),
    "load_state_dict: too late": (lambda w: changed(w, step=7), OWN.format("step is 7, not betw")),
    "load_state_dict: landed": (lambda w: changed(w, landed=True), OWN.format("landed is True at")),
    "load_state_dict: gates": (lambda w: changed(w, alpha=[]), OWN.format(r"alpha is \[\]")),
    "load_state_dict: another budget": (
        lambda w: resumed(w, macs=0.4),
        ELSE.format("settings {'macs': 0.4}, .*{'macs': 0.5}"),
    ),
    "load_state_dict: other steps": (
        lambda w: resumed(w, steps=7),
        ELSE.format("settings {'steps': 7}, .*{'steps': 6}"),
    ),
    "load_state_dict: lam": (
        lambda w: resumed(w, lam=1.0),
        ELSE.format("settings {'lam': 1.0, 'multiple_of': 1}"),
    ),
    "load_state_dict: another schedule": (
        lambda w: resumed(w, schedule=pp.Schedule(done=0.6)),
        ELSE.format("schedule {'done': 0.6}, .*{'done': 0.5}"),
    ),
    "load_state_dict: other groups": (lambda w: resumed(w, keep="0"), NO_GROUPS),
    "load_state_dict: another model": (
        lambda w: w.pruner.load_state_dict(pp.Pruner(other(), X, macs=0.5, steps=6).state_dict()),
        NO_GROUPS,
    ),
}

LAM: dict[str, tuple[Call, str]] = {
    "step: the rate is not known": (
        lambda w: pp.Pruner(make(), X, lam=1.0, steps=6).step(),
        r"step: with lam= the pruner has to know the gates' learning rate: build the optimizer",
    ),
    "export: lam, no step": (lambda w: w.pruner.export(), "export: 0 of 6 steps were taken. Con"),
}

AUTO: dict[str, tuple[Call, str]] = {
    "attach: gates alone": (
        lambda w: w.pruner.attach(SGD(w.optimizer.param_groups[1:])),
        r"compact: 0.weight \(and 7 more\) is in none of the optimizers.*name that too: attach",
    ),
}

for name, wrong in {
    "lr, text": {"lr": "0.1"},
    "lr, None": {"lr": None},
    "lr, below 0": {"lr": -0.1},
    "lr, NaN": {"lr": math.nan},
    "lr, several": {"lr": torch.ones(2)},
    "lr, True": {"lr": True},
    "weight decay, text": {"lr": 0.1, "weight_decay": "x"},
    "weight decay, below 0": {"lr": 0.1, "weight_decay": -1.0},
}.items():
    GATED[f"param_groups: {name}"] = (
        lambda w, wrong=wrong: w.pruner.param_groups(**wrong),
        r"param_groups: (lr|weight_decay)=.*; give a finite number of at least 0",
    )
GATED["param_groups: params"] = (
    lambda w: w.pruner.param_groups(lr=0.1, params=[]),
    "param_groups: params=... is not accepted",
)
FRESH["trace: in inference mode"] = (
    lambda w: torch.inference_mode()(lambda: pp.trace(w.net, X))(),
    r"torch.inference_mode\(\) is on, in which no operation can be followed: call this outside",
)
NO_COPY = "{}: {} is not a copy of the gated model as it is now. Copy the model after"
NO_COPIES = (
    "compact: {} given as copies; give a list of copies of the gated model, such as copies=\\["
)
TRAINED: dict[str, tuple[Call, str]] = {
    "attach: twice": (
        lambda w: w.pruner.attach(w.optimizer),
        "attach: this pruner is attached already; one optimizer is enough",
    ),
    "export: an average by position": (
        lambda w: w.pruner.export(AveragedModel(w.net)),
        r"export: got AveragedModel as a positional argument. Give arguments by name: export\(",
    ),
    "export: no copy": (
        lambda w: w.pruner.export(model=other()),
        NO_COPY.format("export", "Sequential"),
    ),
    "export: no model": (lambda w: w.pruner.export(model=3), NO_COPY.format("export", "int")),
    "compact: a number": (
        lambda w: w.pruner.compact(optimizer=3),
        "compact: int is not a torch.optim.Optimizer; give the raw optimizer",
    ),
    "compact: a list of numbers": (
        lambda w: w.pruner.compact(optimizer=[w.optimizer, 3]),
        "compact: int is not a torch.optim.Optimizer; give the raw optimizer",
    ),
    "compact: no copy": (
        lambda w: w.pruner.compact(copies=[other()]),
        NO_COPY.format("compact", "Sequential"),
    ),
    "compact: a plain copy": (
        lambda w: w.pruner.compact(copies=[AveragedModel(make())]),
        NO_COPY.format("compact", "AveragedModel"),
    ),
    "compact: one copy": (
        lambda w: w.pruner.compact(copies=AveragedModel(w.net)),
        NO_COPIES.format("AveragedModel"),
    ),
    "compact: copies, a number": (lambda w: w.pruner.compact(copies=3), NO_COPIES.format("int")),
    "compact: copies, numbers": (lambda w: w.pruner.compact(copies=[3]), NO_COPIES.format("int")),
    "compact: copies, text": (lambda w: w.pruner.compact(copies="x"), NO_COPIES.format("str")),
    "load_state_dict: NaN": (
        lambda w: changed(w, landing={"gates": 0, "macs": math.nan}),
        OWN.format(r"landing\['macs'\] is nan, not a finite number"),
    ),
}

BY_HAND: dict[str, tuple[Call, str]] = {
    "compact: no optimizer is known": (
        lambda w: w.pruner.compact(),
        r"compact: the optimizer is unknown, .*Give it: compact\(optimizer=...\). Nothing",
    ),
    "compact: another optimizer": (
        lambda w: w.pruner.compact(optimizer=SGD(other().parameters(), 0.1)),
        r"compact: 0.weight \(and 9 more\) is in none of the optimizers.*name that too: compact",
    ),
}


def rows(w: World) -> None:
    w.optimizer.state[w.net[0].weight]["rows"] = torch.zeros(3)


DIVERGED = (
    r"0: its gate has become NaN or infinite \(1 groups\). The training has diverged: lower the "
    r"learning rate or clip gradients, and start again from the last checkpoint."
)
DAMAGED: dict[str, tuple[Callable[[World], Any], Call, str]] = {
    "export: a gate is NaN": (
        lambda w: w.pruner.gates["0"].alpha.fill_(math.nan),
        lambda w: w.pruner.export(),
        DIVERGED,
    ),
    "state_dict: a gate is NaN": (
        lambda w: w.pruner.gates["0"].alpha.fill_(math.nan),
        lambda w: w.pruner.state_dict(),
        DIVERGED,
    ),
    "export: a gate is infinite": (
        lambda w: w.pruner.gates["0"].alpha.fill_(math.inf),
        lambda w: w.pruner.export(),
        DIVERGED,
    ),
    "export: a weight is NaN": (
        lambda w: w.net[0].weight.fill_(math.nan),
        lambda w: w.pruner.export(),
        "export: 0.weight has values that are NaN or infinite .*go back to a checkpoint",
    ),
    "export: gates are open again": (
        lambda w: [gate.alpha.fill_(1.0) for gate in w.pruner.gates.values()],
        lambda w: w.pruner.export(),
        r"export: the budget is not met: macs 1.000 .*load the pruner's own state too",
    ),
    "export: on meta": (
        lambda w: w.net.to("meta"),
        lambda w: w.pruner.export(),
        "export: 0.weight is on the meta device and has no values. Build the model again",
    ),
    "export: a layer is another": (
        lambda w: w.net.__setitem__(5, nn.Linear(6, 4)),
        lambda w: w.pruner.export(),
        r"5.weight: expected shape \[2, 6\], found \[4, 6\]. The graph belongs to another model",
    ),
    "export: a layer is gone": (
        lambda w: w.net.__delitem__(5),
        lambda w: w.pruner.export(),
        r"5.weight: expected shape \[2, 6\], found missing. The graph belongs to another model",
    ),
    "compact: state of another form": (
        rows,
        lambda w: w.pruner.compact(),
        r"compact: SGD keeps rows of shape \[3\] .*Nothing was changed; continue",
    ),
}

STAGES: list[tuple[Callable[[Path], World], dict[str, tuple[Call, str]]]] = [
    (fresh, FRESH),
    (gated, GATED),
    (with_lam, LAM),
    (compacting, AUTO),
    (trained, TRAINED),
    (by_hand, BY_HAND),
    *((damaged(how), {name: entry}) for name, (how, *entry) in DAMAGED.items()),
]
CALLS = {name: (stage, *entry) for stage, table in STAGES for name, entry in table.items()}
REMEDY = (
    r"\b([Gg]ive|[Pp]ass|[Uu]se|[Cc]all|[Bb]uild|[Rr]un|[Mm]ove|[Pp]rint|[Ss]et|"
    r"[Tt]rain on|[Ll]oad|[Ll]ower|[Cc]orrect|[Ll]et|[Ss]ave|[Cc]opy|[Aa]ttach|trace this|"
    r"want(ed)?|must|is enough|go back|only|leave it out|Names are as|Open groups|"
    r"Please report|[Cc]ontinue|[Uu]npack|says why|a fraction of|lowest is)\b"
)


@pytest.fixture
def calm() -> Iterator[None]:
    """torch warns of what some calls are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_one_prune_error_and_changes_nothing(name: str, tmp_path: Path) -> None:
    build, call, said = CALLS[name]
    world = build(tmp_path)
    before, around = picture(world), surroundings()
    with pytest.raises(pp.PruneError, match=f"(?s)^{said}") as error:
        call(world)
    assert type(error.value) is pp.PruneError
    assert re.search(REMEDY, str(error.value)), "what is to be done?"
    assert len(str(error.value)) < 700
    assert_same(around, surroundings())
    assert_same(before, picture(world))


def test_there_are_many_wrong_calls() -> None:
    assert len(CALLS) >= 300


# --- the command line -----------------------------------------------------------------------------

DIGITS = "polarprune.cli.demo:DigitsNet"
COMMANDS: list[tuple[str, str]] = [
    ("inspect nowhere --shape 1,3", "nowhere: give package.module:factory"),
    ("inspect nowhere:net --shape 1,3", "nowhere:net: the model could not be made"),
    (f"inspect {DIGITS}s --shape 1,1,8,8", "DigitsNets: the model could not be made"),
    (f"inspect {DIGITS} --shape 1,1,8", "the model does not run on the example inputs"),
    (f"inspect {DIGITS} --shape 1,1,8,x", "--shape 1,1,8,x: give sizes"),
    (f"inspect {DIGITS} --shape 1,1,8,8:word", "--shape 1,1,8,8:word: give sizes"),
    (f"inspect {DIGITS} --shape 1,1,8,8 --keep layer9", "keep: no module with parameters matches"),
    (f"bench {DIGITS} --shape 1,3", "it does not run on --shape"),
    (f"bench {DIGITS} --shape 1,1,8,8 --runs 0", "--runs 0: give at least 1"),
    (f"bench {DIGITS} --shape 1,1,8,8 --threads -1", "--threads -1: give a number from 0 to"),
    (f"bench {DIGITS} --shape 1,1,8,8 --device gpu", "--device gpu: give cpu or cuda"),
    (f"bench {DIGITS} --shape 1,1,8,8 --small none", "load: there is no file none. Give a file"),
    (
        f"bench {DIGITS} --shape 1,1,8,8 --small small.safetensors",
        "damaged or belongs to another model",
    ),
    ("export none --shape 1,3 --to x.pt2", "load: there is no file none. Give a file"),
    ("export text --shape 1,3 --to x.pt2", "load: text is not a safetensors file"),
    ("export small.safetensors --shape 1,3 --to x.pt2", "unknown network; pass --model"),
    (f"export small.safetensors --shape 1,3 --to x.pt2 --model {DIGITS}", "to another model"),
    ("eval none --data cifar10:x", "load: there is no file none. Give a file"),
    ("eval small.safetensors --data cifar10:x", "factory (its card names the network None"),
    ("report none", "none: not the report.json of a run"),
    ("report text", "this is not what Report.to_json() writes"),
    ("report strange.json", "this is not what Report.to_json() writes"),
    ("report report.json --html none/x.html", "none/x.html: it cannot be written: No such file"),
    ("report report.json --html folder", "folder: it cannot be written: Is a directory"),
    ("demo --epochs 0", "--epochs 0: give at least 1"),
    ("demo --macs 1.5", "macs=1.5: a budget is a fraction of the original"),
    ("demo --out text", "text: that is a file; give a folder"),
    ("train resnet99 --data cifar10:x", "unknown preset 'resnet99'"),
    ("train resnet56 --data digits", "--data digits: give cifar10:DIR"),
    ("train resnet56 --data cifar10:x", "found neither cifar-10-batches-py nor"),
    ("train resnet56 --data cifar10:x --macs 2", "macs=2.0: a budget is a fraction"),
    ("train resnet56 --data cifar10:x --set epochs", "--set epochs: give name=value"),
    ("train resnet56 --data cifar10:x --set epochs=abc", "epochs='abc' must be of type int"),
    ("train resnet56 --data cifar10:x --set schedule.done=2", "Schedule: start=0.0, done=2"),
    ("train resnet56 --data cifar10:x --set schedule.done=yes", "Schedule: done='yes'. Give"),
    ("train resnet56 --data cifar10:x --macs 0.5 --method foo", "unknown method 'foo'"),
    ("sweep resnet56 --data cifar10:x --macs 0.5 --macs 2", "macs=2.0: a budget is a fraction"),
]


@pytest.mark.parametrize(("given", "said"), COMMANDS)
def test_a_wrong_command_is_one_line(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(tmp_path)
    (tmp_path / "report.json").write_text(REPORT.to_json())
    (tmp_path / "strange.json").write_text(json.dumps({**WHOLE, "settings": 3}))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, given.split())
    lines = [line for line in done.output.splitlines() if line.strip()]
    assert done.exit_code == 1 and len(lines) == 1, done.output
    assert lines[0].startswith("PruneError: ") and said in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("prune", "No such command"),
        ("train resnet56", "Missing option"),
        ("train", "Missing argument"),
        ("export small.safetensors --shape 1,3", "Missing option"),
        ("demo --epochs many", "Invalid value"),
        ("demo --macs half", "Invalid value"),
        ("bench x:y --shape 1,3 --speed", "No such option"),
        ("sweep resnet56 --data cifar10:x", "Missing option"),
    ],
)
def test_a_command_that_is_not_understood_says_how_it_is_used(given: str, said: str) -> None:
    done = CliRunner().invoke(app, given.split())
    assert done.exit_code == 2 and said in done.output and "Usage: " in done.output
    assert "Traceback" not in done.output
