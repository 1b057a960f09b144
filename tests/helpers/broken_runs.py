"""What `endurance` breaks: processes, a user's training loop, `polarprune train`, a disk."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from polarprune.cli import app
from polarprune.cli.demo import Block, Digits
from polarprune.experiments.settings import Settings

STEPS, EVERY, BATCH = 60, 4, 16  # of a loop; of these, a checkpoint


class Violation(Exception):
    """Something that must not happen."""


def demand(holds: Any, what: str) -> None:
    if not holds:
        raise Violation(what)


# --- processes ------------------------------------------------------------------------------------


@dataclass
class Ended:
    """A process that has ended."""

    code: int  # negative: the signal
    said: str
    seconds: float


def started(task: Callable[[], Any], log: Path, most: float | None = None) -> Ended:
    """Run a task in a separate process, and kill it after this many seconds."""
    start = time.perf_counter()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _child(task, log)
    code = None
    while code is None:
        found, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if found else None
        if code is None and most is not None and time.perf_counter() - start > most:
            os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.001)
    return Ended(code, log.read_text() if log.exists() else "", time.perf_counter() - start)


def _child(task: Callable[[], Any], log: Path) -> None:
    code = 70
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            task()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


@dataclass(frozen=True)
class Doom:
    """Kill this process while it writes the n-th checkpoint, or before or after the n-th rename."""

    moment: str  # "in the bytes", "before the name", "after the name"
    number: int
    share: float  # of the bytes

    def install(self) -> None:
        left, save, replace = self.number, torch.save, Path.replace

        def saved(content: Any, file: Any, **options: Any) -> None:
            nonlocal left
            left -= self.moment == "in the bytes"
            if left:
                return save(content, file, **options)
            size = _bytes_of(content)
            if isinstance(file, (str, Path)):
                file = open(file, "wb")  # noqa: SIM115  it is killed before
            return save(content, _Dying(file, int(self.share * size)), **options)

        def replaced(one: Path, other: Any) -> Any:
            nonlocal left
            left -= self.moment != "in the bytes"
            if not left and self.moment == "before the name":
                kill()
            found = replace(one, other)
            if not left and self.moment == "after the name":
                kill()
            return found

        torch.save, Path.replace = saved, replaced  # type: ignore[assignment,method-assign]


def _bytes_of(content: Any) -> int:
    with tempfile.TemporaryFile() as file:
        torch.serialization.save(content, file)
        return file.tell()


class _Dying:
    """A file whose process is killed after this many bytes."""

    def __init__(self, file: Any, left: int) -> None:
        self.file, self.left = file, left

    def write(self, data: Any) -> int:
        data = bytes(data)
        if len(data) > self.left:
            self.file.write(data[: self.left])
            self.file.flush()
            kill()
        self.left -= len(data)
        return int(self.file.write(data))

    def flush(self) -> None:
        self.file.flush()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- a user's training loop -----------------------------------------------------------------------


class Net(nn.Module):
    """A network whose dropout and batch norms have a state that must be restored."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6))
        self.body = nn.Sequential(Block(6, 6), Block(6, 12, 2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.drop(self.body(self.stem(x).relu()).mean((2, 3))))
        return found


@dataclass(frozen=True)
class Case:
    """Of a loop."""

    optimizer: str
    compact: str | None
    limits: tuple[tuple[str, float], ...]
    steps: int = STEPS
    every: int = EVERY

    @staticmethod
    def draw(dice: random.Random, steps: int = STEPS, every: int = EVERY) -> Case:
        goals = ((("macs", 0.4),), (("params", 0.5),), (("macs", 0.5), ("params", 0.6)))
        return Case(
            dice.choice(("sgd", "adam")),
            dice.choice(("auto", None)),
            dice.choice(goals),
            steps,
            every,
        )


Parts = tuple[pp.Pruner, nn.Module, torch.optim.Optimizer, Any]


def build(case: Case, data: Digits) -> Parts:
    torch.manual_seed(7)
    model = Net()
    pruner = pp.Pruner(
        model, data.train_x[:2], steps=case.steps, compact=case.compact, **dict(case.limits)
    )  # type: ignore[arg-type]
    optimizer: torch.optim.Optimizer
    if case.optimizer == "adam":
        optimizer = torch.optim.Adam(pruner.param_groups(lr=0.01))
    else:
        optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05, weight_decay=5e-4), momentum=0.9)
    pruner.attach(optimizer)
    return (
        pruner,
        model,
        optimizer,
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, case.steps),
    )


def write(parts: Parts, path: Path) -> None:
    """Write a checkpoint as in docs/usage.md, with random generators and a scheduler."""
    new = Path(f"{path}.new")
    torch.save([*(part.state_dict() for part in parts), torch.get_rng_state()], new)
    new.replace(path)


def read(parts: Parts, path: Path) -> None:
    *states, dice = torch.load(path, weights_only=True)
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(dice)


Batch = tuple[Tensor, Tensor]


@dataclass
class Loop:
    """Train from the last checkpoint to the end; `before` may disturb a step."""

    case: Case
    data: Digits
    folder: Path
    before: Callable[[Loop, Parts], Any] = lambda loop, parts: None
    writes: int = 0
    factor: float = 1.0  # of the loss

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def __call__(self) -> None:
        parts = build(self.case, self.data)
        pruner, model, optimizer, rates = parts
        if self.checkpoint.exists():
            read(parts, self.checkpoint)
        model.train()
        while pruner.step_count < pruner.steps:
            self.before(self, parts)
            pick = torch.randint(len(self.data.train_x), (BATCH,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(self.data.train_x[pick]), self.data.train_y[pick])
            (self.factor * loss).backward()
            optimizer.step()
            rates.step()
            if pruner.step_count % self.case.every == 0:
                self.writes += 1
                write(parts, self.checkpoint)
        small = pruner.export()
        pp.save(small, self.folder / "small.safetensors")
        result = [small.state_dict(), pruner.plan(), pruner.history, optimizer.state_dict()]
        torch.save(result, self.folder / "result.new")
        (self.folder / "result.new").replace(self.folder / "result.pt")


def same(one: Any, other: Any) -> bool:
    """Return whether two nested values are bit-equal."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


# --- polarprune train -----------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.bn = nn.Conv2d(3, 12, 3, 2, 1), nn.BatchNorm2d(12)
        self.two, self.head = nn.Conv2d(12, 16, 3, 2, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.two(self.bn(self.one(x)).relu()).relu().mean((2, 3)))
        return found


def write_images(folder: Path) -> None:
    """Write a tiny CIFAR-10 whose classes differ in colour."""
    inner = folder / "cifar-10-batches-bin"
    inner.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name in (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"):
        y = torch.arange(40) % 10
        x = torch.randint(0, 60, (40, 3, 32, 32), generator=generator)
        x[:, 0] += 18 * y[:, None, None]
        rows = torch.cat([y[:, None], x.reshape(40, -1)], 1).to(torch.uint8)
        (inner / name).write_bytes(bytes(rows.flatten().tolist()))


def command(*given: Any) -> Callable[[], None]:
    return lambda: app.app([str(part) for part in given])


def training(data: Path, out: Path, word: str = "train") -> Callable[[], None]:
    budgets = ["--macs", 0.5] if word == "train" else ["--macs", "0.6,0.4", "--no-ray"]
    return command(
        word, "endurance", "--data", f"cifar10:{data}", "--device", "cpu", "--out", out, *budgets
    )


RECIPE = Settings(
    "endurance",
    baseline_epochs=2,
    epochs=6,
    tune_epochs=1,
    batch=20,
    baseline_lr=0.05,
    lr=0.05,
    warm_up=1,
    distill=0.5,
    recalibrate=2,
    compact="auto",
)


def one_line(ended: Ended) -> str:
    """Return the error of a command, which must be the last thing that it prints."""
    demand(ended.code == 1, f"exit code {ended.code}: {ended.said[-600:]}")
    demand("Traceback" not in ended.said, f"a traceback: {ended.said[-600:]}")
    lines = [line for line in ended.said.splitlines() if line.startswith("PruneError: ")]
    demand(len(lines) == 1, f"{len(lines)} lines instead of one: {ended.said[-600:]}")
    demand(ended.said.rstrip().endswith(lines[0]), f"more is said after it: {ended.said[-600:]}")
    return lines[0]


# --- a disk that may be full ----------------------------------------------------------------------


@dataclass
class Disk:
    """A separate file system; where none can be mounted, a limit for each file of a process."""

    folder: Path
    size: int = 8 * 2**20
    limit: int | None = None
    mounted: bool = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", str(self.folder)]
        done = subprocess.run(mount, capture_output=True) if shutil.which("mount") else None
        self.mounted = done is not None and not done.returncode

    def leave(self, room: int | None) -> None:
        """Leave only this many bytes free; None frees everything."""
        filler = self.folder / "filler"
        filler.unlink(missing_ok=True)
        self.limit = room
        if not self.mounted:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            least = most if room is None else max(room, 8192)  # what is said goes to a file, too
            resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
        elif room is not None:
            state = os.statvfs(self.folder)
            with filler.open("wb") as file:
                file.write(bytes(max(0, state.f_bavail * state.f_frsize - room)))

    def close(self) -> None:
        self.leave(None)
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    found = Disk(folder / "disk")
    try:
        yield found
    finally:
        found.close()
