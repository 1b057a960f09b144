"""Claim: even a large model is ready to prune in seconds, about as fast as with Torch-Pruning.

- ResNet-50, DenseNet-121 and ViT-B/16 at 224 x 224: the time of `trace` (operations, groups, cost,
  trial cuts), compared with Torch-Pruning (graph and pruner; an optional dependency). Then half of
  the channels are removed, and the small model is run.
- The time of `Pruner`, with gates and the comparison in float64.
- A Llama of 1.2 B parameters on the meta device, which Torch-Pruning does not support, and its
  export with real weights in float32.
- Transformers of 12 to 96 blocks.

Every run has its own process, and the two libraries take turns. Results are medians. Memory is the
peak above what the process had after its imports. CPU seconds are stored, too, because the machine
may have other work. Writes numbers/tracing.json:

    python -m benchmarks.measure.tracing
"""

import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.store import write_numbers

MODELS = ("resnet50", "densenet121", "vit_b_16")
BLOCKS = (12, 24, 48, 96)
RUNS = 5  # of the vision models
FEWER = 3  # of `Pruner` and of the large ones; one of theirs
LIMITS = {"llama": [3.0, 1.0], "export": [10.0, None]}  # seconds, GB above the imports


def memory(what: str) -> float:
    """Return the memory of this process in GB: now (VmRSS), or its peak so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise LookupError(what)


imported = 0.0  # GB, after the imports


def begin() -> None:
    global imported
    imported = memory("VmRSS")


def measured(work: Callable[[], Any]) -> tuple[Any, dict]:
    """Return the result, the seconds (wall and CPU), and the peak in GB above the imports."""
    start, busy = time.perf_counter(), time.process_time()
    result = work()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    gb = max(0.0, memory("VmHWM") - imported)
    return result, {"seconds": seconds, "cpu_seconds": busy, "memory_gb": gb}


def vision(name: str) -> tuple[Any, Any]:
    import torch

    from benchmarks.measure.import_torchvision import import_torchvision

    models = import_torchvision().models
    begin()
    torch.manual_seed(0)
    return models.get_model(name), torch.randn(1, 3, 224, 224)


def llama() -> tuple[Any, Any]:
    """Return a Llama of the size of Llama 3.2 1B, with eager attention, on the meta device."""
    import torch

    from benchmarks.measure.import_torchvision import import_torchvision

    import_torchvision()  # which transformers imports
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="eager",
    )
    begin()
    with torch.device("meta"):
        ids, mask = torch.zeros(1, 64, dtype=torch.long), torch.zeros(1, 1, 64, 64)
        return LlamaForCausalLM(config), {"input_ids": ids, "attention_mask": mask}


def with_weights(model: Any) -> Any:
    import torch

    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02)
    return model


# --- one run, in its own process ------------------------------------------------------------------


def half(graph: Any) -> dict:
    return {name: list(range(max(1, group.size // 2))) for name, group in graph.prunable.items()}


def runs(model: Any, example: Any) -> str:
    try:
        model(example)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return "runs"


def ours(name: str) -> dict:
    import polarprune as pp

    model, example = vision(name)
    graph, facts = measured(lambda: pp.trace(model, example))
    small = pp.shrink(model, graph, half(graph))
    return {**facts, "units": graph.units, "half_of_it": runs(small, example)}


def pruner(name: str) -> dict:
    import polarprune as pp

    model, example = vision(name)
    return measured(lambda: pp.Pruner(model, example, macs=0.5, steps=1000))[1]


def theirs(name: str) -> dict:
    import torch_pruning as tp

    model, example = vision(name)
    _, graph = measured(lambda: tp.DependencyGraph().build_dependency(model, example))
    pruner, made = measured(
        lambda: tp.pruner.MagnitudePruner(
            model, example, tp.importance.MagnitudeImportance(p=2), pruning_ratio=0.5
        )
    )
    facts = {
        "graph_seconds": graph["seconds"],
        "pruner_seconds": made["seconds"],
        "seconds": graph["seconds"] + made["seconds"],
        "cpu_seconds": graph["cpu_seconds"] + made["cpu_seconds"],
        "memory_gb": max(graph["memory_gb"], made["memory_gb"]),
    }
    try:
        pruner.step()
    except Exception as error:
        return {**facts, "half_of_it": f"{type(error).__name__}: {str(error)[:100]}"}
    return {**facts, "half_of_it": runs(model, example)}


def large(_: str) -> dict:
    import polarprune as pp

    model, example = llama()
    graph, facts = measured(lambda: pp.trace(model, example))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {**facts, "parameters": parameters, "units": graph.units}


def export(_: str) -> dict:
    import polarprune as pp

    model, example = llama()
    graph = pp.trace(model, example)
    model = with_weights(model)
    small, facts = measured(lambda: pp.shrink(model, graph, half(graph)))
    return {**facts, "parameters": sum(parameter.numel() for parameter in small.parameters())}


def theirs_large(_: str) -> dict:
    import torch
    import torch_pruning as tp

    model, ids = with_weights(llama()[0]), torch.zeros(1, 64, dtype=torch.long)
    blocks = [layer.self_attn for layer in model.model.layers]
    heads = {block.q_proj: 32 for block in blocks}
    heads |= {proj: 8 for block in blocks for proj in (block.k_proj, block.v_proj)}
    pruner, ready = measured(
        lambda: tp.pruner.MagnitudePruner(
            model,
            ids,
            tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=0.5,
            num_heads=heads,
            ignored_layers=[model.lm_head],
            root_module_types=[torch.nn.Linear],
            forward_fn=lambda model, ids: model(ids).logits,
        )
    )
    _, cut = measured(pruner.step)
    left = sum(parameter.numel() for parameter in model.parameters())
    facts = {"export_seconds": cut["seconds"], "export_memory_gb": cut["memory_gb"]}
    return {**ready, **facts, "parameters": left, "half_of_it": runs(model, ids)}


def deep(blocks: str) -> dict:
    import torch

    import polarprune as pp
    from benchmarks.measure.norms import ViT

    begin()
    model, x = ViT(3, 32, 4, 192, int(blocks), 3), torch.randn(1, 3, 32, 32)
    return measured(lambda: pp.trace(model, x))[1]


CASES = {
    "ours": ours,
    "theirs": theirs,
    "pruner": pruner,
    "large": large,
    "export": export,
    "theirs_large": theirs_large,
    "deep": deep,
}


# --- all runs -------------------------------------------------------------------------------------


def alone(case: str, name: str) -> dict:
    if case.startswith("theirs") and version("torch-pruning") is None:
        return {"missing": "torch-pruning is not installed"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.measure.tracing", case, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def repeated(names: list[tuple[str, str]], times: int) -> list[dict]:
    """Return the medians of each case; they take turns, so noise affects all equally."""
    found: list[list[dict]] = [[] for _ in names]
    for _ in range(times):
        for mine, (case, name) in zip(found, names, strict=True):
            mine.append(alone(case, name))
    rows = []
    for mine, (case, name) in zip(found, names, strict=True):
        seconds = [facts["seconds"] for facts in mine if "seconds" in facts]
        middle = {
            key: statistics.median(facts[key] for facts in mine)
            for key, value in mine[0].items()
            if not isinstance(value, str)
        }
        words = {key: value for key, value in mine[0].items() if isinstance(value, str)}
        rows.append({"case": case, "model": name, **middle, **words, "all_seconds": seconds})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    import torch

    from polarprune.cost.timing import environment

    result = {
        "claim": __doc__.split("\n\n")[0],
        **environment(),
        "threads": torch.get_num_threads(),
        "runs": RUNS,
        "fewer_runs": FEWER,
        "beside": [
            row for model in MODELS for row in repeated([("ours", model), ("theirs", model)], RUNS)
        ],
        "pruner": repeated([("pruner", model) for model in MODELS], FEWER),
        "llama": repeated([("large", "")], FEWER)[0],
        "export": repeated([("export", "")], FEWER)[0],
        "theirs_large": repeated([("theirs_large", "")], 1)[0],
        "blocks": repeated([("deep", str(blocks)) for blocks in BLOCKS], FEWER),
    }
    packages = ("torchvision", "transformers", "torch-pruning")
    result["versions"].update({name: version(name) for name in packages})
    result["limits"] = LIMITS
    write_numbers("tracing", result, sort_keys=False)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(CASES[sys.argv[1]](sys.argv[2])))
    else:
        main()
