"""Attack `load` with damaged and forged files: none may run code, and all errors are PruneErrors.

    python -m tests.helpers.attack --count 10000

Small networks are cut and saved; each attack changes one of these files, in a process whose audit
hook reports everything that runs code or touches the system.

- damaged: bytes are changed, nothing else. The file is refused, or the model is equal to the bit.
- forged, mangled: parts of the recipe or of the stored code are changed, and the checksum is made
  to fit. The file is refused, or it is some other model, which may not run on these inputs.
- hostile: a forged file that asks for something that no file may ask for. It is refused by `load`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import polarprune as pp
from tests.helpers.forgeries import (
    NETWORKS,
    Victim,
    damaged,
    forged,
    hostile,
    mangled,
    of_version_1,
    of_version_2,
    victim,
)

MEMORY = 2**30  # bytes that loading and running small networks may take on top


_armed = False
_events: list[str] = []
_WATCHED = (
    "exec",
    "compile",
    "import",
    "os.",
    "subprocess.",
    "ctypes.",
    "socket.",
    "shutil.",
    "pickle.",
    "marshal.",
    "code.",
    "tempfile.",
    "glob.",
    "webbrowser.",
    "urllib.",
    "http.",
    "sqlite3.",
    "sys.settrace",
    "sys.setprofile",
    "sys.addaudithook",
    "cpython.",
    "gc.",
    "signal.",
    "pty.",
)


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if not _armed:
        return
    writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    if writes or event.startswith(_WATCHED):
        _events.append(f"{event} {str(args)[:80]}")


@contextlib.contextmanager
def armed() -> Iterator[None]:
    global _armed
    _events.clear()
    _armed = True
    try:
        yield
    finally:
        _armed = False


def outcome(file: Path, one: Victim, kind: str) -> str:
    """Return how it ends: `refused`, `equal`, `another model`, `does not run`, or a violation."""
    fresh = one.make().eval()
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    with armed():
        result = _tried(file, fresh, one, kind)
    if _events:
        return f"VIOLATION: {_events[0]}"
    if any(not torch.equal(value, before[key]) for key, value in fresh.state_dict().items()):
        return "VIOLATION: the model that was given has changed"
    return result


def _tried(file: Path, fresh: nn.Module, one: Victim, kind: str) -> str:
    try:
        small = pp.load(file, model=fresh).eval()
    except pp.PruneError:
        return "refused"
    except BaseException as error:
        return f"VIOLATION: load raised {error!r:.200}"
    if kind == "hostile":
        return "VIOLATION: loaded"
    try:
        with torch.no_grad():
            found = small(one.x)
    except Exception as error:  # torch's, for shapes that do not fit
        return "does not run" if kind == "forged" else f"VIOLATION: forward raised {error!r:.200}"
    if isinstance(found, Tensor) and torch.equal(found, one.wanted):
        return "equal"
    return "another model" if kind == "forged" else "VIOLATION: other numbers"


def attack(count: int, seed: int, folder: Path) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Run this many attacks; return what came of them, and a line for each violation."""
    sys.addaudithook(_watch)
    victims = [victim(name, folder) for name in NETWORKS]
    victims += [of_version_1(victims[1]), of_version_2(victims[0])]
    file = folder / "attack.safetensors"
    for one in victims:  # imports that wait for their first use
        for data in (
            one.data,
            one.data[:-9],
            one.signed("{}"),
            one.signed(json.dumps(one.content)),
        ):
            file.write_bytes(data)
            with contextlib.suppress(pp.PruneError):
                pp.load(file, model=one.make()).eval()(one.x)
    found: Counter[tuple[str, str]] = Counter()
    wrong = []
    for number in range(seed, seed + count):
        dice = random.Random(number)
        one = dice.choice(victims)
        coded = bool(one.content["recipe"]["rewired"])
        ways = [
            *(["damaged"] if "sha256" in one.content else []),
            "forged",
            *(["hostile", "hostile", "mangled"] if coded else []),
        ]
        way = dice.choice(ways)
        make = {"forged": forged, "hostile": hostile, "mangled": mangled}.get(way)
        file.write_bytes(
            damaged(one.data, dice) if make is None else one.signed(make(one.content, dice))
        )
        result = outcome(file, one, "forged" if way == "mangled" else way)
        found[way, result.split(":")[0]] += 1
        if result.startswith("VIOLATION"):
            wrong.append(f"attack {number} ({way}, {one.name}): {result}")
    return found, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="attack polarprune.load")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        found, wrong = attack(given.count, given.seed, Path(folder))
    taken = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    for (way, result), number in sorted(found.items()):
        print(f"{way:10} {result:15} {number:6}")
    print(f"{given.count} attacks in {taken:.0f} s, at most {grown / 2**20:.0f} MiB more memory")
    print(*wrong[:20], sep="\n")
    if grown > MEMORY:
        print("VIOLATION: memory")
    return int(bool(wrong) or grown > MEMORY)


if __name__ == "__main__":
    sys.exit(main())
