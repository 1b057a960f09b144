"""Claim: a large transformer is ready to prune in seconds, and trains about as fast with gates.

- Shapes of a Llama of 7 B parameters on the meta device, with as many key heads as query heads and
  with a quarter of them: the time of `trace`, of the budget, and of a plan that meets it.
- A Llama with weights: the time until it is ready to prune (`Pruner`), the step with gates beside a
  plain step (they take turns; the ratio is that of medians), the peak memory of each, a run of
  pruning on a text, and the time of the export with its proof. The example has the batch and the
  length that are trained on; the cache is on, as it is by default.

Every measurement runs in its own process. On a CPU, memory is the peak of resident memory above
that after the imports; on a GPU, what torch allocated. Results are stored by the name of the case
and the device; other results are kept. Writes numbers/large_transformers.json:

    python -m benchmarks.measure.large_transformers --text input.txt
    python -m benchmarks.measure.large_transformers --text input.txt --case 1.2B \\
        --device cuda --dtype bfloat16 --batch 4 --length 1024 --steps 200 --checkpointing
"""

import argparse
import importlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure.import_torchvision import import_torchvision
from benchmarks.store import read_numbers, write_numbers

NAME = "large_transformers"
# hidden size, intermediate size, layers, heads, heads of keys and values, size of the vocabulary
CASES: dict[str, tuple[int, int, int, int, int, int]] = {
    "7B": (4096, 11008, 32, 32, 32, 32000),
    "7B, grouped queries": (4096, 11008, 32, 32, 8, 32000),
    "1.2B": (2048, 8192, 16, 32, 8, 32000),
    "145M": (1024, 4096, 9, 16, 4, 4096),
    "2M": (192, 512, 4, 6, 3, 256),
}
META = ("7B", "7B, grouped queries")
BUDGET = 0.5
LIMITS = {"meta": 10.0, "ready": 30.0, "export": 60.0, "step": 1.05, "memory": 1.1}


def llama(case: str, device: str, dtype: str, checkpointing: bool) -> Any:
    """Return a new Llama of these sizes."""
    import torch

    import_torchvision()  # which transformers imports
    transformers = importlib.import_module("transformers")
    hidden, inner, layers, heads, keys, vocabulary = CASES[case]
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


# --- memory and time ------------------------------------------------------------------------------


class Meter:
    """Measures seconds and memory on a device.

    On a CPU the peak of a process is reset through `/proc/self/clear_refs`.
    """

    def __init__(self, device: str) -> None:
        import torch

        self.gpu = torch.cuda if device.startswith("cuda") else None
        self.start = 0 if self.gpu else _resident("VmRSS")

    def seconds(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return how long the work takes, and its result."""
        self.wait()
        start = time.perf_counter()
        result = work()
        self.wait()
        return time.perf_counter() - start, result

    def wait(self) -> None:
        if self.gpu:
            self.gpu.synchronize()

    def reset(self) -> None:
        """Forget the peak of memory so far."""
        if self.gpu:
            self.gpu.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

    def peak(self) -> float:
        """Return the peak since `reset`, in GB."""
        found = self.gpu.max_memory_allocated() if self.gpu else _resident("VmHWM") - self.start
        return found / 1e9


def _resident(what: str) -> int:
    """Return the memory of this process in bytes: now (VmRSS), or its peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(what)


# --- jobs, each in its own process ----------------------------------------------------------------


def meta(case: str) -> dict[str, Any]:
    """Trace shapes without weights, and plan the widths of a budget."""
    import torch

    import polarprune as pp
    from polarprune.cost.budget import Budget
    from polarprune.cost.other_scores import plan_by_score, random_scores

    model = llama(case, "meta", "bfloat16", False)
    meter, example = (
        Meter("cpu"),
        {"input_ids": torch.zeros(1, 64, dtype=torch.long, device="meta")},
    )
    traced, graph = meter.seconds(lambda: pp.trace(model, example))

    def plan() -> Any:
        Budget(graph, {"macs": BUDGET}, "auto").check_reachable()
        return plan_by_score(graph, random_scores(graph, 0), macs=BUDGET)

    planned, kept = meter.seconds(plan)
    return {
        "trace_seconds": traced,
        "plan_seconds": planned,
        "seconds": traced + planned,
        "parameters": sum(p.numel() for p in model.parameters()),
        "groups": len(graph.prunable),
        "channels": graph.units,
        "channels_kept": sum(map(len, kept.values())),
        "operations": len(graph.tapes[0].ops),
    }


class Training:
    """A model that takes steps on a text, with gates or without."""

    def __init__(self, given: argparse.Namespace, gated: bool) -> None:
        import torch

        import polarprune as pp

        self.given, self.pruner = given, None
        self.model = llama(given.case, given.device, given.dtype, given.checkpointing)
        self.model.train()
        self.meter = Meter(given.device)
        text = Path(given.text).read_bytes()
        vocabulary = CASES[given.case][-1]
        self.text = torch.tensor(list(text), dtype=torch.long) % vocabulary
        self.dice = torch.Generator().manual_seed(0)
        groups: Any = [{"params": list(self.model.parameters()), "lr": given.lr}]
        self.ready = 0.0
        if gated:
            example = {"input_ids": self.batch()}
            self.ready, pruner = self.meter.seconds(
                lambda: pp.Pruner(self.model, example, macs=BUDGET, steps=given.steps)
            )
            self.pruner, groups = pruner, pruner.param_groups(lr=given.lr)
        self.optimizer = torch.optim.AdamW(groups)
        if self.pruner is not None:
            self.pruner.attach(self.optimizer)

    def batch(self) -> Any:
        import torch

        given = self.given
        starts = torch.randint(
            len(self.text) - given.length, (given.batch,), generator=self.dice
        ).tolist()
        return torch.stack([self.text[k : k + given.length] for k in starts]).to(given.device)

    def step(self) -> Any:
        ids = self.batch()
        self.optimizer.zero_grad()
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def ready_steps_and_export(given: argparse.Namespace) -> dict[str, Any]:
    """Prune in a run on the text; measure the time until ready, the steps, and the export."""
    meter = Meter(given.device)
    meter.reset()
    training = Training(given, gated=True)
    found = {"ready_seconds": training.ready, "ready_memory_gb": meter.peak()}
    seconds, losses = meter.seconds(lambda: [training.step() for _ in range(given.steps)])
    pruner = training.pruner
    assert pruner is not None
    meter.reset()
    exported, small = meter.seconds(pruner.export)
    before, after = pruner.graph.cost.original(), pruner.cost()
    return {
        **found,
        "steps": given.steps,
        "seconds_of_steps": seconds,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "export_seconds": exported,
        "export_memory_gb": meter.peak(),
        "proof": pruner.proof,
        "parameters": before["params"],
        "parameters_left": after["params"] / before["params"],
        "macs_left": after["macs"] / before["macs"],
        "counted_parameters_left": sum(p.numel() for p in small.parameters()) / before["params"],
    }


def peak_of_steps(given: argparse.Namespace, gated: bool) -> dict[str, Any]:
    """Measure the peak of memory of a few steps."""
    training = Training(_endless(given), gated)
    training.step()  # makes the optimizer's state
    training.meter.reset()
    for _ in range(2):
        training.step()
    return {"memory_gb": training.meter.peak()}


def times_of_steps(given: argparse.Namespace) -> dict[str, Any]:
    """Let plain and gated steps take turns; return the medians and the ratio in milliseconds."""
    both = {name: Training(_endless(given), name == "gated") for name in ("plain", "gated")}
    times: dict[str, list[float]] = {"plain": [], "gated": []}
    for turn in range(given.turns + 1):
        for name, training in both.items():
            seconds, _ = training.meter.seconds(training.step)
            if turn:  # the first one makes the optimizer's state
                times[name].append(1e3 * seconds)
    medians = {name: statistics.median(mine) for name, mine in times.items()}
    ratios = [gated / plain for plain, gated in zip(times["plain"], times["gated"], strict=True)]
    return {**medians, "ratio": medians["gated"] / medians["plain"], "ratios": ratios}


def _endless(given: argparse.Namespace) -> argparse.Namespace:
    """Return the same settings for a run of which only the first steps are taken."""
    return argparse.Namespace(**{**vars(given), "steps": 1_000_000})


JOBS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "meta": lambda given: meta(given.case),
    "run": ready_steps_and_export,
    "plain memory": lambda given: peak_of_steps(given, gated=False),
    "gated memory": lambda given: peak_of_steps(given, gated=True),
    "times": times_of_steps,
}


# --- all of them ----------------------------------------------------------------------------------


def in_own_process(given: argparse.Namespace, job: str) -> dict[str, Any]:
    """Run a job in a new process."""
    settings = json.dumps({**vars(given), "job": job})
    command = [sys.executable, "-m", f"benchmarks.measure.{NAME}", "--settings", settings]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{job}: {run.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    print(job, found, flush=True)
    return found


def where(device: str) -> str:
    """Return the hardware and the versions."""
    import torch

    import_torchvision()
    transformers = importlib.import_module("transformers")
    threads = f"{platform.machine()}, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name() if device.startswith("cuda") else threads
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


def measure(given: argparse.Namespace) -> None:
    """Run the jobs, and store their results beside those of other cases and devices."""
    stored = read_numbers(NAME)
    stored["limits"], place = LIMITS, where(given.device)
    found: dict[str, Any]
    for case in META if "meta" in given.parts else ():
        found = in_own_process(argparse.Namespace(**{**vars(given), "case": case}), "meta")
        stored.setdefault("meta", {})[case] = {**found, "where": where("cpu")}
        write_numbers(NAME, stored)
    if "weights" in given.parts:
        found = {job: in_own_process(given, job) for job in JOBS if job != "meta"}
        memory = [found[f"{kind} memory"]["memory_gb"] for kind in ("gated", "plain")]
        found["memory_ratio"] = memory[0] / memory[1]
        settings = ("dtype", "batch", "length", "steps", "checkpointing", "turns", "lr")
        found["settings"] = {name: getattr(given, name) for name in settings}
        key = f"{given.case} on {given.device.partition(':')[0]} in {given.dtype}"
        stored.setdefault("weights", {})[key] = {**found, "where": place}
        write_numbers(NAME, stored)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="145M", choices=CASES)
    parser.add_argument("--parts", nargs="+", default=["meta", "weights"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--text", help="a text file; its bytes are the tokens")
    parser.add_argument("--settings", help="for one job in its own process")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.settings:
        settings = argparse.Namespace(**json.loads(given.settings))
        print(json.dumps(JOBS[settings.job](settings)))
        return
    if "weights" in given.parts and not given.text:
        raise SystemExit("--text: give a text file to train on")
    measure(given)


if __name__ == "__main__":
    main()
