"""Claim: a pruned model of transformers is a folder that plain transformers loads.

Of every family, half of the channels of a kind are removed at random, the same number in every
block: those of the MLPs, heads of attention, the channels of the residual stream (`norms=True`),
and all of these together. `save_pretrained` of polarprune.integrations.transformers writes the
folder or refuses. Another process, which cannot import polarprune, loads every folder with an Auto
class, and compares logits and generated text with those of the pruned model.

Writes numbers/transformers_folders.json:

    python -m benchmarks.measure.transformers_folders
"""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import polarprune as pp
from benchmarks.measure.import_torchvision import import_torchvision
from benchmarks.measure.load_folders import load_elsewhere, store_answers
from benchmarks.measure.transformers_models import make_transformers
from benchmarks.store import write_numbers
from polarprune.channels.graph import Graph, Group
from polarprune.cost.timing import environment

NAME = "transformers_folders"
AUTO = {
    "bert": "AutoModelForSequenceClassification",
    "roberta": "AutoModelForSequenceClassification",
    "distilbert": "AutoModelForSequenceClassification",
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "mistral": "AutoModelForCausalLM",
    "qwen3": "AutoModelForCausalLM",
    "gemma": "AutoModelForCausalLM",
    "gemma2": "AutoModelForCausalLM",
    "gemma3": "AutoModelForCausalLM",
    "t5": "AutoModelForSeq2SeqLM",
    "bart": "AutoModelForSeq2SeqLM",
    "whisper": "AutoModelForSpeechSeq2Seq",
    "vit": "AutoModelForImageClassification",
    "deit": "AutoModelForImageClassification",
    "clip": "AutoModel",
}
VARIANTS = {
    "mlp": ("mlp",),
    "heads": ("heads",),
    "other": ("other",),  # not in the table: what is as wide as the stream, and prunable without it
    "stream": ("stream", "other"),
    "all": ("mlp", "heads", "stream", "other"),
}
WIDTH = 64  # of the residual stream


def kinds_of(graph: Graph) -> dict[str, str]:
    """Return what the channels of each prunable group are: mlp, heads, stream or other."""

    def kind(group: Group) -> str:
        if group.size > WIDTH:
            return "mlp"
        if group.size < WIDTH:
            return "heads"
        return "stream" if len(group.consumers) > 2 else "other"

    return {name: kind(group) for name, group in graph.prunable.items()}


def cut(model: nn.Module, graph: Graph, kinds: dict[str, str], chosen: tuple[str, ...]) -> Any:
    """Return a model with a random half of the channels of these kinds."""
    plan = {
        name: torch.randperm(group.size)[: group.size // 2].tolist()
        for name, group in graph.prunable.items()
        if kinds[name] in chosen
    }
    small: Any = pp.shrink(model, graph, plan)
    return small if hasattr(small, "save_pretrained") else small.model


def measure(family: str, folder: Path) -> dict[str, Any]:
    """Prune one family in all variants, and write the folders."""
    from polarprune.integrations.transformers import save_pretrained

    torch.manual_seed(0)
    model, example = make_transformers(family)
    model.eval()
    graph = pp.trace(model, example, norms=True)
    kinds, found = kinds_of(graph), {}
    for name, chosen in VARIANTS.items():
        if not any(kind in chosen[:1] for kind in kinds.values()):
            continue
        small = cut(model, graph, kinds, chosen)
        params = sum(map(torch.Tensor.numel, small.parameters()))
        row: dict[str, Any]
        row = {"params": params / sum(map(torch.Tensor.numel, model.parameters()))}
        before = numbers(small.config)
        target = folder / f"{family}-{name}"
        try:
            save_pretrained(small, target, example)
        except pp.PruneError as error:
            row["refused"] = str(error)
        else:
            after = numbers(small.config)
            row["config"] = {k: v for k, v in after.items() if before.get(k) != v}
            store_answers(small, example, AUTO[family], folder / f"{target.name}.pt")
        found[name] = row
    fixed = {kind for kind in ("heads", "other") if "refused" in found.get(kind, {})}
    found.pop("other", None)
    names = [name for name, kind in kinds.items() if kind in fixed]
    wrapped = not hasattr(model, "save_pretrained")
    return {"variants": found, "keep": sorted({pattern_of(name, wrapped) for name in names})}


def pattern_of(name: str, wrapped: bool) -> str:
    """Return a name with * for the numbers of blocks, as the model itself knows it."""
    parts = name.split(".")[1 if wrapped else 0 :]
    return ".".join("*" if part.isdigit() else part for part in parts)


def numbers(config: Any) -> dict[str, Any]:
    """Return the numbers in a config and in those that it holds, by their dotted names."""
    found = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            found.update({f"{name}.{key}": number for key, number in numbers(value).items()})
        elif type(value) is int:
            found[name] = value
    return found


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import_torchvision()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = {family: measure(family, folder) for family in sys.argv[1:] or AUTO}
        loaded = load_elsewhere(folder)
    for place, found in loaded.items():
        family, variant = place.split("-")
        if variant in rows[family]["variants"]:
            rows[family]["variants"][variant] |= found
    if not sys.argv[1:]:
        found = environment()
        found["versions"]["transformers"] = version("transformers")  # type: ignore[index]
        write_numbers(NAME, {"families": rows, **found}, sort_keys=False)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
