"""Claim: a pruned model of transformers is a folder that plain transformers loads.

Of every family, half of the channels of a kind are removed at random, the same number in every
block: those of the MLPs, heads of attention, the channels of the residual stream (`norms=True`),
and all of these together. `save_pretrained` of polarprune.integrations.transformers writes the
folder or refuses. What `folder_settings` leaves prunable is cut twice, to half of every width that
may change and to random widths, and has to be written. Another process, which cannot import
polarprune, loads every folder with an Auto class, and compares logits and generated text with those
of the pruned model.

Writes numbers/transformers_folders.json:

    python -m benchmarks.measure.transformers_folders
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
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
from polarprune.analysis.trace import survey
from polarprune.channels.graph import Graph, Group, Plan
from polarprune.cost.budget import Budget
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
    "stream": ("stream", "other"),
    "all": ("mlp", "heads", "stream", "other"),
}
WIDTH = 64  # of the residual stream
Choose = Callable[[list[int]], int]  # chooses a width
WITHIN: dict[str, tuple[bool, Choose]] = {  # norms=, and which of the widths within the settings
    "settings": (False, lambda widths: widths[len(widths) // 2]),
    "settings_norms": (True, lambda widths: widths[len(widths) // 2]),
    "random": (False, random.choice),
    "random_norms": (True, random.choice),
}


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
    return unwrapped(pp.shrink(model, graph, plan))


def unwrapped(model: Any) -> Any:
    """Return the model of transformers in a model that leaves out some of its outputs."""
    return model if hasattr(model, "save_pretrained") else model.model


def pruned_within(
    model: nn.Module, example: Any, settings: Mapping[str, Any], choose: Choose = random.choice
) -> nn.Module:
    """Return a model with widths that a `Pruner` with these settings may reach."""
    given = {name: value for name, value in settings.items() if name != "multiple_of"}
    uniform = given.pop("uniform", False)
    same = uniform if isinstance(uniform, bool) else tuple(uniform)
    graph = survey(model, example, compare_outputs=True, uniform=same, **given)
    budget = Budget(graph, {"params": 0.5}, settings.get("multiple_of", "auto"))
    found: Plan = {}
    widths: dict[int, int] = {}
    least = zip(budget.minimum.tolist(), budget.multiple.tolist(), strict=True)
    both = zip(graph.prunable.items(), budget.families.number.tolist(), least, strict=True)
    for (name, group), family, (first, step) in both:
        allowed = [*range(first, group.size, step)] or [group.size]
        width = widths.setdefault(family, choose(allowed))
        found[name] = torch.randperm(group.size)[:width].tolist()
    return pp.shrink(model, graph, found)


def within_settings(model: nn.Module, example: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield what is left after cuts within the settings for a folder."""
    from polarprune.integrations.transformers import folder_settings

    settings = {norms: folder_settings(model, example, norms=norms) for norms in (False, True)}
    for name, (norms, choose) in WITHIN.items():
        yield name, pruned_within(model, example, settings[norms], choose)


def measure(family: str, folder: Path) -> dict[str, Any]:
    """Prune one family in all variants, and write the folders."""
    torch.manual_seed(0)
    random.seed(0)
    model, example = make_transformers(family)
    model.eval()
    graph = pp.trace(model, example, norms=True)
    kinds = kinds_of(graph)
    cuts = {
        name: cut(model, graph, kinds, chosen)
        for name, chosen in VARIANTS.items()
        if any(kind in chosen[:1] for kind in kinds.values())
    }
    cuts.update((name, unwrapped(small)) for name, small in within_settings(model, example))
    params = sum(map(torch.Tensor.numel, model.parameters()))
    found = {}
    for name, small in cuts.items():
        row = written(small, example, family, folder / f"{family}-{name}")
        left = sum(map(torch.Tensor.numel, small.parameters())) / params
        found[name] = {"params": left, **row}
    return {"variants": found}


def written(small: Any, example: Any, family: str, target: Path) -> dict[str, Any]:
    """Write a folder and what the model answers, or return why the folder is refused."""
    from polarprune.integrations.transformers import save_pretrained

    before = numbers(small.config)
    try:
        save_pretrained(small, target, example)
    except pp.PruneError as error:
        return {"refused": str(error)}
    store_answers(small, example, AUTO[family], target.with_suffix(".pt"))
    after = numbers(small.config)
    return {"config": {k: v for k, v in after.items() if before.get(k) != v}}


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
