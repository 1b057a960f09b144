"""Claim: what is called open can be cut, checked by numbers, on models as people use them.

Every model runs in a process of its own, with limits on time and memory: it is traced, a random
half of every open group is kept, and the cut model is compared in float64 with the masked one; as a
control, one channel too many is dropped. Writes coverage.json beside this file (resumed where it
stopped) and docs/coverage.md:

    python benchmarks/coverage.py                # all that is not in coverage.json yet
    python benchmarks/coverage.py 'resnet*'      # these, again
"""

import fnmatch
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STORE = HERE / "coverage.json"
PAGE = HERE.parent / "docs" / "coverage.md"
SECONDS, GIGABYTES = 600, 12
SMALL = {"vit": 224, "maxvit": 224, "inception": 128, "swin": 128}


def import_torchvision() -> Any:
    """Where its compiled part does not load, declare the operators that its import asks for."""
    try:
        import torchvision
    except (RuntimeError, ImportError, OSError):
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_library"] = library  # kept alive
        import torchvision
    return torchvision


def models() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Name -> what makes the model and its example inputs."""
    return {f"torchvision/{name}": make for name, make in classifiers().items()}


def classifiers() -> dict[str, Callable[[], tuple[Any, Any]]]:
    import torch

    vision = import_torchvision()

    def maker(name: str) -> Callable[[], tuple[Any, Any]]:
        def make() -> tuple[Any, Any]:
            size = next((size for key, size in SMALL.items() if key in name), 96)
            return vision.models.get_model(name, weights=None), torch.randn(2, 3, size, size)

        return make

    names = vision.models.list_models(module=vision.models)
    return {name: maker(name) for name in names}


def examine(name: str) -> dict[str, Any]:
    """Trace one model, cut it, compare, and say what was found."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    import polarprune as pp
    from polarprune.proof import in_double, prove_equal
    from polarprune.surgery import fold
    from polarprune.tape import open_attention

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, example = models()[name]()
    model.eval()
    start = time.perf_counter()
    graph = pp.trace(model, example)
    traced = time.perf_counter() - start
    plan = {}
    for group in graph.open.values():
        kept = torch.randperm(group.size)[: max(1, group.size // 2)]
        plan[group.name] = sorted(kept.tolist())
    n = torch.tensor([len(kept) for kept in plan.values()], dtype=torch.float64)
    masked, inputs = in_double(model, example)
    with torch.no_grad():  # heads and scales that start at zero would hide a wrong cut
        for parameter in masked.parameters():
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            parameter.add_((0.1 * spread or 0.1) * torch.randn_like(parameter))
    fold(masked, graph, graph.alive(plan).double())
    start = time.perf_counter()
    small = pp.shrink(masked, graph, plan)
    cut = time.perf_counter() - start
    found = prove_equal(masked, small, inputs, 1e-10)
    with torch.no_grad(), open_attention(), FlopCounterMode(display=False) as counter:
        small.eval()(inputs)
    frozen = [group for group in graph.groups.values() if group.frozen]
    total = sum(group.size for group in graph.groups.values())
    return {
        "open": round(sum(group.size for group in graph.open.values()) / max(total, 1), 4),
        "macs": round(graph.cost.share(n)["macs"], 4) if len(n) else 1.0,
        "difference": max(found.values()),
        "control": control(masked, graph, plan, inputs),
        "macs_exact": counter.get_total_flops() // 2 == graph.cost.at(n)["macs"],
        "modes": sorted(found),
        "trace_seconds": round(traced, 2),
        "cut_seconds": round(cut, 2),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rewired": len(graph.rewired),
        "reasons": sorted({group.reason.split(" in ")[0] for group in frozen}),
    }


def control(masked: Any, graph: Any, plan: dict[str, list[int]], inputs: Any) -> float:
    """The difference when one channel too many goes: it must be seen."""
    import polarprune as pp
    from polarprune.proof import difference

    gap = 0.0
    names = list(plan)  # late groups too: in an untrained net the signal of early ones fades
    for name in names[:: max(1, len(names) // 6)] + names[-3:]:
        if gap < 1e-6 and len(plan[name]) > 1:
            wrong = pp.shrink(masked, graph, {**plan, name: plan[name][1:]})
            gap = max(gap, difference(masked, wrong, inputs, training=False))
    return gap


def in_its_own_process(name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name]
    limit = GIGABYTES << 30
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no answer after {SECONDS} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def passed(row: dict[str, Any]) -> bool:
    if "error" in row or not row["macs_exact"]:
        return False
    return row["difference"] <= 1e-10 and (row["control"] > 1e-7 or row["open"] == 0)


def write_page(store: dict[str, Any]) -> None:
    rows = dict(sorted(store["models"].items()))
    good = sum(passed(row) for row in rows.values())
    lines = [
        "# Coverage", "",
        f"{good} of {len(rows)} models pass: a random half of every open group was kept, and the "
        f"cut model equals the masked one in float64 (largest relative difference ≤ 1e-10), with "
        f"MACs as torch counts them. Control: the difference when one channel too many goes. "
        f"Generated by `make coverage` on {store['date']}, "
        f"{store['machine']}, {store['versions']}.", "",
        "| model | passes | channels open | MACs left | difference | control | trace (s) | "
        "peak (MB) | stays whole because |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | **no**: {row['error']} | | | | | | | |")
            continue
        reasons = "; ".join(row["reasons"]).replace("|", "/")
        lines.append(
            f"| {name} | {'yes' if passed(row) else '**no**'} | {row['open']:.0%} | "
            f"{row['macs']:.1%} | {row['difference']:.0e} | {row['control']:.0e} | "
            f"{row['trace_seconds']} | {row['peak_mb']} | {reasons} |"
        )
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(patterns: list[str]) -> None:
    store = json.loads(STORE.read_text()) if STORE.exists() else {"models": {}}
    import torch

    store["date"] = time.strftime("%Y-%m-%d")
    store["machine"] = f"{platform.machine()}, one thread"
    store["versions"] = f"python {platform.python_version()}, torch {torch.__version__}"
    for name in models():
        wanted = any(fnmatch.fnmatch(name, f"*/{pattern}") for pattern in patterns)
        if wanted if patterns else name not in store["models"]:
            row = in_its_own_process(name)
            store["models"][name] = row
            print(name, "passes" if passed(row) else f"FAILS {row.get('error', row)}", flush=True)
            STORE.write_text(json.dumps(store, indent=1, sort_keys=True) + "\n")
            write_page(store)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(examine(sys.argv[2])))
    else:
        main(sys.argv[1:])
