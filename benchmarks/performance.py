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
        "gates multiplied into activations. Medians of turns that alternate; memory is the peak of "
        "a step of the gated model, as a multiple of the plain one's (eager code holds the gated "
        "weights once more, which small batches feel) "
        "([overhead.py](../benchmarks/overhead.py)).",
        "",
        "| network | batch | way | plain (ms) | gated | naive | memory | turns | machine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in stored("overhead").items():
        ratio, batch = row["ratio"], " × ".join(map(str, row["batch"]))
        found = row["memory_ratio"].get("gated")
        memory = "–" if found is None else f"{found:.3f}"
        lines.append(
            f"| {name} | {batch} | {row['way']} | {row['milliseconds']['plain']:.1f} | "
            f"**{ratio['gated']:.3f}** | {ratio['naive']:.3f} | {memory} | "
            f"{len(row['turns']['plain'])} | "
            f"{row['machine']} |"
        )
    return lines


def shrinking() -> list[str]:
    lines = [
        "## A training that prunes beside one that does not",
        "",
        'The whole time of a run to half of the MACs with `compact="auto"`, as a multiple of as '
        "many plain steps, and the same for the last tenth of the steps; one run. Beside: the "
        "seconds of it that did not go into steps, but into looks at the budget, proofs, compiling "
        "and capturing; 90 epochs: the ratio with the same steps, and once what came beside them, "
        "for a training of that length on ImageNet. Measured when the dearest channels still went "
        "first where images are random: in the first stages, where most of the time is spent. Now "
        "such a run thins all groups evenly ([shrinking.py](../benchmarks/shrinking.py)).",
        "",
        "| network | batch | steps | plain (s) | pruned | last tenth | beside (s) | 90 epochs | "
        "MACs left | machine |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in stored("shrinking").items():
        batch = " × ".join(map(str, row["shape"]))
        machine = f"{row['machine']}, {row['threads']} threads, torch {row['versions']['torch']}"
        total, longer = f"**{row['ratio']:.3f}**", "– | –"
        if row["device"] == "cuda":
            total = f"{row['ratio']:.3f}"
            longer = f"{row['beside']['pruned']:.0f} | **{row['ratio_of_90_epochs']:.3f}**"
        lines.append(
            f"| {name} | {batch} | {row['steps']} | {row['seconds']['plain']:.0f} | "
            f"{total} | {row['ratio_by_tenths'][-1]:.3f} | {longer} | "
            f"{row['macs']:.1%} | {machine} |"
        )
    return lines


WAYS = {
    "eager": "eager",
    "channels_last": "eager, channels-last",
    "captured": "CUDA graph",
    "compiled": "compiled",
    "onnxruntime": "ONNX Runtime",
}


def exported() -> list[str]:
    lines = [
        "## The exported model beside the original",
        "",
        "How many times as fast a model at half of the MACs is, 224 × 224, eval mode, by "
        "`multiple_of`. Which channels go was not learned: the same share of every group, by "
        "magnitude. Outside products: share of the time in depthwise convolutions, norms, "
        "activations, sums and pools, which go down with the widths (to about 0.7) and not with "
        "the MACs; like GMAC/s for the original and for the fastest. Medians of turns that "
        "alternate; in brackets the range over processes, where there were several; ~ where the "
        "fastest runs give a ratio that differs by more than 5 %, as others used the machine. On a "
        "GPU odd widths fall on slow kernels, and eager runs of small networks wait for Python "
        "([exported.py](../benchmarks/exported.py)).",
    ]
    for device, networks in sorted(stored("exported").items()):
        rows = [(name, way, found[way]) for name, found in networks.items()
                for way in WAYS if way in found]  # fmt: skip
        multiples = sorted({key for _, _, row in rows for key in row["gain"]}, key=int)
        heads = ["network", "batch", "way", "plain (ms)", *multiples, "GMAC/s", "outside products"]
        lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for name, way, row in rows:
            best = max(row["gain"], key=row["gain"].get)
            gains = [_gain(row, multiple, best) for multiple in multiples]
            speed = " → ".join(f"{row['gmacs_a_second'][key]:.0f}" for key in ("plain", best))
            cells = [name, str(row["batch"]), WAYS[way], f"{row['milliseconds']['plain']:.1f}"]
            cells += [*gains, speed, _outside(row.get("why", {}), best)]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", _machine(device, [row for _, _, row in rows])]
        held = [f"{name} {WAYS[way]}" for name, way, row in rows if row.get("malloc")]
        if held:
            lines[-1] += (f" With `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` of 4 GB: "
                          f"{'; '.join(held)}.")  # fmt: skip
        blocked = [_blocked(name, row["why"]) for name, way, row in rows if way == "onnxruntime"]
        if blocked:
            lines += ["", "ONNX Runtime has a faster layout for convolutions, which other widths "
                      f"miss. Convolutions in it: {'; '.join(blocked)}."]  # fmt: skip
    return lines


def _gain(row: dict[str, Any], multiple: str, best: str) -> str:
    if multiple not in row["gain"]:
        return "–"
    seen = [one[multiple] for one in row.get("repeats", [row["gain"]]) if multiple in one]
    unsteady = abs(seen[-1] / row["gain_of_fastest"][multiple] - 1) > 0.05
    gain = f"{'~' * unsteady}{row['gain'][multiple]:.2f}"
    if multiple != best:
        return gain
    return f"**{gain}**" + (f" ({min(seen):.2f}–{max(seen):.2f})" if len(seen) > 1 else "")


def _outside(why: dict[str, dict[str, float]], best: str) -> str:
    if not why.get("plain") or not why.get(best):
        return "–"
    return " → ".join(f"{1 - why[key]['products']:.0%}" for key in ("plain", best))


def _blocked(name: str, why: dict[str, dict[str, float]]) -> str:
    keys = ["plain", *sorted(why.keys() - {"plain"}, key=int)]
    return f"{name} " + ", ".join(f"{why[key]['blocked']:.0%} ({key})" for key in keys)


def _machine(device: str, rows: list[dict[str, Any]]) -> str:
    found: dict[str, set[str]] = {}
    for row in rows:
        how = f"float32, {row['threads']} thread(s), {row['instructions']}"
        versions = {key: f"{key} {value}" for key, value in row["versions"].items()}
        run = {"": row["machine"], "how": "bfloat16" if device == "cuda" else how, **versions}
        for key, value in run.items():
            found.setdefault(key, set()).add(value)
    return ", ".join(" / ".join(sorted(values)) for values in found.values()) + "."


def latency() -> list[str]:
    lines = [
        "## Latency as a budget",
        "",
        "The exported model's latency as a share of the original's, after a short training with "
        "`latency=` on random images, 224 × 224; medians of runs in turns; with brackets, "
        "the median of five such comparisons and their range "
        "([latency.py](../benchmarks/latency.py)). Ready: seconds until the model of the time is "
        "fitted. On the CPU with `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` of 4 GB. "
        "All figures on this page were measured before channels closed one by one, which changed "
        "some twenty small operations on the vector of all gates in a step.",
        "",
        "| network | batch | original (ms) | budget | measured | off by | MACs left | ready (s) | "
        "machine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in stored("latency").items():
        seen = row.get("shares", [])
        spread = f" ({min(seen):.3f}–{max(seen):.3f})" if seen else ""
        machine = f"{row['machine']}, {row['threads']} threads, torch {row['versions']['torch']}"
        lines.append(
            f"| {name} | {row['batch']} | {row['milliseconds']['before']:.1f} | {row['latency']} | "
            f"**{row['share']:.3f}**{spread} | {row['off']:+.1%} | {row['macs']:.1%} | "
            f"{row['ready_seconds']:.0f} | {machine} |"
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
        "medians; bold: within the limit. Replayed: from a CUDA graph; else Python hands over the "
        "groups one by one ([proximal.py](../benchmarks/proximal.py)).",
        "",
        "| gates | case | ms | limit (ms) | machine |",
        "|---|---|---|---|---|",
    ]
    for row in stored("proximal").values():
        machine = f"{row['machine']}, {row['threads']} threads, torch {row['versions']['torch']}"
        cases = row["milliseconds"].items()
        for case, value in sorted(cases, key=lambda item: (int(item[0].split()[0]), item[0])):
            limit = row["limit"]
            taken = f"**{value:.2f}**" if value <= limit else f"{value:.2f}"
            lines.append(f"| {row['channels']:,} | {case} | {taken} | {limit:.0f} | {machine} |")
    return lines


def epochs() -> list[str]:
    lines = [
        "## Epochs of CIFAR-10",
        "",
        "50,000 random images of 32 × 32 on the device, crops and flips drawn there, the whole "
        "step captured in a CUDA graph, as `polarprune train` does it; seconds are medians. "
        "Taught: gated, and with a teacher; at once: processes that share the GPU, seconds of "
        "each and divided by their number ([epochs.py](../benchmarks/epochs.py)).",
        "",
        "| network | training | compiled | batch | at once | epoch (s) | divided | "
        "200 epochs (min) | machine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in stored("epochs").values():
        minutes = 200 * row["seconds"] / 60
        lines.append(
            f"| {row['network']} | {row['kind']} | {'yes' if row['compiled'] else 'no'} | "
            f"{row['batch']} | {row['together']} | **{row['seconds']:.2f}** | "
            f"{row['seconds_for_each']:.2f} | {minutes:.1f} | {row['machine']}, torch "
            f"{row['versions']['torch']} |"
        )
    return lines


def throughput() -> list[str]:
    lines = [
        "## Images a second",
        "",
        "Training on pictures that are made up and lie on the device, step by step, as `polarprune "
        "train` does it on ImageNet; what a loader can deliver is not measured. The ratio is that "
        "of the times, with its range over turns that alternate "
        "([throughput.py](../benchmarks/throughput.py)).",
        "",
        "| network | batch | side | compiled | plain | gated | gated / plain | machine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in stored("throughput").items():
        plain, gated = (row["images_a_second"][kind] for kind in ("plain", "gated"))
        low, high = row["ratios"]
        lines.append(
            f"| {name.removesuffix('-compiled')} | {row['batch']} | {row['side']} | "
            f"{'yes' if row['compiled'] else 'no'} | {plain:,} | {gated:,} | "
            f"**{row['ratio']:.3f}** ({low:.3f}–{high:.3f}) | {row['machine']}, torch "
            f"{row['versions']['torch']} |"
        )
    return lines


PARTS = (overhead, shrinking, exported, latency, tracing, proximal, epochs, throughput)


if __name__ == "__main__":
    head = ["# Performance", "", "Measured side by side in one run. Generated by "
            "`benchmarks/performance.py` from the stored results.", ""]  # fmt: skip
    parts = [part() for part in PARTS if (HERE / f"{part.__name__}.json").exists()]
    lines = [line for part in parts for line in (*part, "")]
    PAGE.write_text("\n".join([*head, *lines[:-1]]) + "\n", encoding="utf-8")
