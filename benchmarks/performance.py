"""Writes docs/performance.md from the JSON files that the benchmarks left beside them."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return found


def overhead() -> list[str]:
    lines = [
        "## A gated step beside a plain one",
        "",
        "Forward, backward, optimizer and proximal step, as a multiple of the plain step; naive: "
        "gates multiplied into activations. Medians of turns that alternate "
        "([overhead.py](../benchmarks/overhead.py)).",
        "",
        "| network | batch | way | plain (ms) | gated | naive | turns | machine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in stored("overhead").items():
        ratio, batch = row["ratio"], " × ".join(map(str, row["batch"]))
        lines.append(
            f"| {name} | {batch} | {row['way']} | {row['milliseconds']['plain']:.1f} | "
            f"**{ratio['gated']:.3f}** | {ratio['naive']:.3f} | {len(row['turns']['plain'])} | "
            f"{row['machine']} |"
        )
    return lines


def shrinking() -> list[str]:
    lines = [
        "## A training that prunes beside one that does not",
        "",
        'The whole time of a run to half of the MACs with `compact="auto"`, as a multiple of as '
        "many plain steps, and the same for the last tenth of the steps; one run "
        "([shrinking.py](../benchmarks/shrinking.py)).",
        "",
        "| network | batch | steps | plain (s) | pruned | last tenth | MACs left | machine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in stored("shrinking").items():
        batch = " × ".join(map(str, row["shape"]))
        machine = f"{row['machine']}, {row['threads']} threads, torch {row['versions']['torch']}"
        lines.append(
            f"| {name} | {batch} | {row['steps']} | {row['seconds']['plain']:.0f} | "
            f"**{row['ratio']:.3f}** | {row['ratio_by_tenths'][-1]:.3f} | {row['macs']:.1%} | "
            f"{machine} |"
        )
    return lines


def tracing() -> list[str]:
    found = stored("tracing")
    versions = found["versions"]
    lines = [
        "## From a model to ready to prune",
        "",
        "Seconds and GB (peak above the imports) until channels can be taken: `trace`, which cuts "
        "trial copies too, beside Torch-Pruning's graph and pruner, and what happened when half of "
        "them was taken. `Pruner` has put in gates as well and compared outputs in float64. "
        f"Medians of {found['runs']} runs that alternate (`Pruner`: {found['fewer_runs']}), each "
        "in a process of its own "
        "([tracing.py](../benchmarks/tracing.py)).",
        "",
        "| network | `trace` (s) | GB | half of it | Torch-Pruning (s) | GB | half of it | "
        "`Pruner` (s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in [*found["beside"], *found["pruner"]]:
        cases.setdefault(row["model"], {})[row["case"]] = row
    for model, row in cases.items():
        cells = [cell for who in ("ours", "theirs") for cell in _ready(row[who])]
        lines.append(f"| {model} | {' | '.join(cells)} | {row['pruner']['seconds']:.1f} |")
    llama, export, theirs = found["llama"], found["export"], found["theirs_large"]
    lines += [
        "",
        f"A Llama of {llama['parameters'] / 1e9:.1f} B parameters (ours: medians of "
        f"{found['fewer_runs']} runs; Torch-Pruning: one run, as it needs the weights):",
        "",
        "| | ready (s) | GB | export in float32 (s) | GB |",
        "|---|---|---|---|---|",
        f"| polarprune, traced on the meta device | **{llama['seconds']:.1f}** | "
        f"{llama['memory_gb']:.2f} | **{export['seconds']:.1f}** | {export['memory_gb']:.1f} |",
    ]
    if "missing" not in theirs:
        lines.append(
            f"| Torch-Pruning | {theirs['seconds']:.1f} | {theirs['memory_gb']:.1f} | "
            f"{theirs['export_seconds']:.1f} | {theirs['export_memory_gb']:.1f} |"
        )
    rows = found["blocks"]
    each = [f"{row['model']}: {row['seconds']:.2f} s" for row in rows]
    growth = rows[-1]["seconds"] / rows[0]["seconds"]
    more = int(rows[-1]["model"]) / int(rows[0]["model"])
    lines += [
        "",
        f"Transformers by their number of blocks: {', '.join(each)} (×{growth:.1f} for "
        f"×{more:.0f} blocks).",
        "",
        f"{found['machine']}, {found['threads']} threads, torch {versions['torch']}, "
        f"Torch-Pruning {versions['torch-pruning']}, torchvision {versions['torchvision']}, "
        f"transformers {versions['transformers']}.",
    ]
    return lines


def _ready(row: dict[str, Any]) -> list[str]:
    if "missing" in row:
        return [row["missing"], "", ""]
    number = f"**{row['seconds']:.2f}**" if row["case"] == "ours" else f"{row['seconds']:.2f}"
    return [number, f"{row['memory_gb']:.2f}", row["half_of_it"].replace("|", "/")]


def proximal() -> list[str]:
    lines = [
        "## The proximal step",
        "",
        "All gates of a model, as a `Pruner` steps them, by the number of groups they are in; "
        "medians ([proximal.py](../benchmarks/proximal.py)).",
        "",
        "| gates | case | ms | limit (ms) | machine |",
        "|---|---|---|---|---|",
    ]
    for row in stored("proximal").values():
        machine = f"{row['machine']}, {row['threads']} threads, torch {row['versions']['torch']}"
        cases = row["milliseconds"].items()
        for case, value in sorted(cases, key=lambda item: (int(item[0].split()[0]), item[0])):
            limit = f"{row['limit']:.0f}"
            lines.append(
                f"| {row['channels']:,} | {case} | **{value:.2f}** | {limit} | {machine} |"
            )
    return lines


if __name__ == "__main__":
    head = ["# Performance", "", "Measured side by side in one run. Generated by "
            "`benchmarks/performance.py` from the stored results.", ""]  # fmt: skip
    parts = [*overhead(), "", *shrinking(), "", *tracing(), "", *proximal()]
    PAGE.write_text("\n".join([*head, *parts]) + "\n", encoding="utf-8")
