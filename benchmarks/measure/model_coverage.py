"""Claim: every prunable group of common models can be cut, and the outputs stay equal.

Every model of coverage_models.py runs in its own process, with limits on time and memory: it is
traced, a random half of every prunable group is kept, and the cut model is compared in float64 with
the masked one. As a control, one channel too many is removed. Writes numbers/model_coverage.json,
from which it resumes; `benchmarks.pages.coverage_page` writes docs/coverage.md from it. Linux only
(limits and peaks of memory):

    python -m benchmarks.measure.model_coverage                         # all not stored yet
    python -m benchmarks.measure.model_coverage 'resnet*' 'timm/vit_*'  # these models again
    python -m benchmarks.measure.model_coverage --jobs 1                # one at a time
"""

import argparse
import fnmatch
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.measure import coverage_models
from benchmarks.measure.coverage_verdicts import passed
from benchmarks.store import read_numbers, write_numbers

NAME = "model_coverage"
SECONDS, GIGABYTES = 600, 12
BIG = ("torchvision/vit_[hl]_*", "torchvision/regnet_y_128gf")  # at the end, one at a time,
BIG_GIGABYTES = 20  # with more memory
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "diffusers",
    "segmentation-models-pytorch",
    "ultralytics",
)


def models() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Return, by name, functions that make a model and its example inputs."""
    return {name: partial(coverage_models.make, name) for name in coverage_models.names()}


def examine(name: str) -> dict[str, Any]:
    """Measure one model; if norms mix channels, measure it again with these channels prunable."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, example = coverage_models.make(name)
    model.eval()
    kind = coverage_models.kind(name, model, example)
    print(json.dumps({"kind": kind}), flush=True)  # known even if what follows fails
    row = {"kind": kind, **look(model, example, norms=False)}
    if any("mixes channels" in why or "norm over" in why for why in row["reasons"].values()):
        row["stream"] = look(model, example, norms=True)
    return row


def look(model: Any, example: Any, norms: bool) -> dict[str, Any]:
    """Trace a model, cut it, compare the outputs, and return the findings."""
    import torch

    import polarprune as pp
    from polarprune.gates.folding import fold
    from polarprune.surgery.precision import StaysDouble, in_double
    from polarprune.surgery.proof import count_macs, prove_equal

    spent: dict[str, float] = {}
    with measured(spent, "trace"):
        graph = pp.trace(model, example, norms=norms)
    plan = {}
    for group in graph.prunable.values():
        kept = torch.randperm(group.size)[: max(1, group.size // 2)]
        plan[group.name] = sorted(kept.tolist())
    n = torch.tensor([len(kept) for kept in plan.values()], dtype=torch.float64)
    masked, inputs = in_double(model, example)
    with torch.no_grad():  # heads and scales that start at zero would hide a wrong cut
        for parameter in masked.parameters():
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            parameter.add_((0.1 * spread or 0.1) * torch.randn_like(parameter))
    fold(masked, graph, graph.kept_units(plan).double())
    with measured(spent, "cut"):
        small = pp.shrink(masked, graph, plan)
    with StaysDouble():
        found = prove_equal(masked, small, inputs, 1e-10).differences
        gap = control(masked, graph, plan, inputs)
    del masked
    total = sum(group.size for group in graph.groups.values())
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return {
        "open": round(graph.units / max(total, 1), 4),
        "macs": round(graph.cost.share(n)["macs"], 4) if len(n) else 1.0,
        "macs_full": graph.cost.original()["macs"],
        "difference": max(found.values()),
        "control": gap,
        "macs_exact": count_macs(small.to(dtype), example) == graph.cost.at(n)["macs"],
        "modes": sorted(found),
        **spent,
        "rewired": len(graph.rewritten),
        "reasons": {g.name: g.reason for g in graph.groups.values() if g.frozen},
        "facts": sorted({g.reason.fact for g in graph.groups.values() if g.frozen}),
    }


@contextmanager
def measured(spent: dict[str, float], name: str) -> Iterator[None]:
    """Return the seconds, and the peak of memory (MB) above what was in use before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = megabytes("VmRSS"), time.perf_counter()
    yield
    spent[f"{name}_seconds"] = round(time.perf_counter() - start, 2)
    spent[f"{name}_mb"] = max(0, megabytes("VmHWM") - before)


def megabytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) // 1024


def control(masked: Any, graph: Any, plan: dict[str, list[int]], inputs: Any) -> float:
    """Return the difference if one channel too many is removed, which must be noticeable."""
    import polarprune as pp
    from polarprune.surgery.proof import difference

    gap = 0.0
    names = list(plan)  # late groups too: in an untrained net the signal of early ones fades
    for name in names[:: max(1, len(names) // 6)] + names[-3:]:
        if gap < 1e-6 and len(plan[name]) > 1:
            wrong = pp.shrink(masked, graph, {**plan, name: plan[name][1:]})
            gap = max(gap, difference(masked, wrong, inputs, training=False))
    return gap


def in_its_own_process(name: str) -> dict[str, Any]:
    """Return the result of `examine` in a new process, or how it failed."""
    limit = BIG_GIGABYTES if is_big(name) else GIGABYTES
    command = [sys.executable, "-m", "benchmarks.measure.model_coverage", "--one", name]
    command += ["--gigabytes", str(limit)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        out, errors = process.communicate(timeout=SECONDS)
        error = (errors.strip().splitlines() or ["no message"])[-1][:300]
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        error = f"no answer after {SECONDS} s"
    row: dict[str, Any] = {}
    for line in out.splitlines():
        row |= json.loads(line) if line.startswith("{") else {}
    return row | ({"error": error} if process.returncode else {})


def is_big(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in BIG)


def main(patterns: list[str], jobs: int) -> None:
    store = read_numbers(NAME)
    old = store.get("models", {})
    store["models"] = {name: row for name, row in old.items() if "kind" in row}
    store["date"] = time.strftime("%Y-%m-%d")
    wanted = [name for name in coverage_models.names() if matches(name, patterns, store["models"])]
    run([name for name in wanted if not is_big(name)], jobs, store)
    run([name for name in wanted if is_big(name)], 1, store)


def here() -> str:
    """Return the machine and the versions."""
    installed = []
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed.append(f"{package} {metadata.version(package)}")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, one thread a model"
    return f"{machine}, python {platform.python_version()}, {', '.join(installed)}"


def matches(name: str, patterns: list[str], done: dict[str, Any]) -> bool:
    """Return True if a pattern matches library/model or model; without patterns, if not stored."""
    if not patterns:
        return name not in done
    forms = (name, name.partition("/")[2])
    return any(fnmatch.fnmatch(form, pattern) for form in forms for pattern in patterns)


def run(names: list[str], jobs: int, store: dict[str, Any]) -> None:
    """Measure the models, several at a time, and store each result as soon as it is known."""
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(in_its_own_process, name): name for name in names}
        for done in as_completed(waiting):
            name, row = waiting[done], done.result()
            store["models"][name] = {**row, "where": here()}
            print(name, "passes" if passed(row) else f"FAILS {row.get('error', row)}", flush=True)
            write_numbers(NAME, store)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--one", help="this model, in this process")
    parser.add_argument("--gigabytes", type=int, default=GIGABYTES)
    given = parser.parse_args()
    if given.one:
        resource.setrlimit(resource.RLIMIT_AS, (given.gigabytes << 30,) * 2)
        print(json.dumps(examine(given.one)))
    else:
        main(given.patterns, given.jobs)
