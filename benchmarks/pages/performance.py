"""Writes docs/performance.md from the stored numbers of the benchmarks.

python -m benchmarks.pages.performance
"""

from collections.abc import Iterable
from typing import Any

from benchmarks.measure.shrinking import CASES
from benchmarks.store import DOCS, read_numbers

PAGE = DOCS / "performance.md"


def threads(row: dict[str, Any]) -> str:
    """Return on how many threads a row was measured, as text."""
    return f"{row['threads']} thread{'s' * (row['threads'] != 1)}"


def overhead() -> list[str]:
    lines = [
        "## Cost of a gated training step",
        "",
        "How much slower is a training step with gates? A step is forward, backward, optimizer and "
        "proximal step. Medians of alternating runs "
        "([overhead.py](../benchmarks/measure/overhead.py)).",
        "",
        "- **gated**: time of a gated step as a multiple of a plain step.",
        "- **naive**: the same if gates are multiplied into activations instead of weights.",
        "- **memory**: peak memory of a gated step as a multiple of a plain step. Eager code keeps "
        "a gated copy of the weights, which matters for small batches.",
        "",
        "| network | batch | mode | plain (ms) | gated | naive | memory | runs | machine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in read_numbers("overhead").items():
        ratio, batch = row["ratio"], " × ".join(map(str, row["batch"]))
        found = row["memory_ratio"].get("gated")
        memory = "–" if found is None else f"{found:.3f}"
        lines.append(
            f"| {name} | {batch} | {row['way']} | {row['milliseconds']['plain']:.1f} | "
            f"**{ratio['gated']:.3f}** | {ratio['naive']:.3f} | {memory} | "
            f"{len(row['turns']['plain'])} | "
            f"{row['machine'].replace(' 1 threads', ' 1 thread')} |"
        )
    return lines


def shrinking() -> list[str]:
    lines = [
        "## Time of a training that prunes",
        "",
        'How long does a whole training to half of the MACs take with `compact="auto"`? One run '
        "each, on random images ([shrinking.py](../benchmarks/measure/shrinking.py)).",
        "",
        "- **pruned**: time of the whole training as a multiple of the same number of plain steps. "
        "It includes the construction of the `Pruner`, the controller, proofs, compiling and the "
        "export.",
        "- **last tenth**: the same ratio for the last tenth of the steps.",
        "- **outside steps**: the seconds that are not part of a usual step.",
        "- **mean MACs**: the MACs that were left on average over the steps.",
        "",
        "| network | batch | `multiple_of` | steps | plain (s) | pruned | last tenth | outside "
        "steps (s) | mean MACs | machine |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = read_numbers("shrinking")
    for name, row in rows.items():
        batch = " × ".join(map(str, row["shape"]))
        machine = f"{row['machine']}, {threads(row)}, torch {row['versions']['torch']}"
        outside = row["setup"] + row["beside"]["pruned"] + row["export"]
        lines.append(
            f"| {name} | {batch} | {row['multiple_of']} | {row['steps']:,} | "
            f"{row['seconds']['plain']:.0f} | **{row['ratio']:.3f}** | "
            f"{row['ratio_by_tenths'][-1]:.3f} | {outside:.0f} | {row['mean_macs']:.1%} | "
            f"{machine} |"
        )
    missing = [f"{name} on {case['device']}" for name, case in CASES.items() if name not in rows]
    return [*lines, "", f"Not run yet: {', '.join(missing)}."] if missing else lines


WAYS = {
    "eager": "eager",
    "channels_last": "eager, channels-last",
    "captured": "CUDA graph",
    "compiled": "compiled",
    "onnxruntime": "ONNX Runtime",
}


def exported() -> list[str]:
    lines = [
        "## Speed of the exported model",
        "",
        "How much faster is a model with half of the MACs? It runs at 224 × 224 in eval mode. The "
        "channels were not learned: every group keeps the same share, by magnitude. Medians of "
        "alternating runs, with the range over processes in brackets, if there were several "
        "([exported.py](../benchmarks/measure/exported.py)).",
        "",
        "- **plain (ms)**: time of the original.",
        "- **1, 8, 16, …**: speed-up over the original with this `multiple_of`. On a GPU, odd "
        "widths use slow kernels, and eager runs of small networks wait for Python.",
        "- **GMAC/s** and **memory-bound** are for the original → for the fastest export. "
        "Memory-bound is the share of the time in depthwise convolutions, norms, activations, sums "
        "and pools. It falls with the widths (to about 0.7), not with the MACs.",
        "- **~**: the fastest runs give a ratio that differs by more than 5 %, because the machine "
        "was shared.",
    ]
    for device, networks in sorted(read_numbers("exported").items()):
        rows = [
            (name, way, found[way])
            for name, found in networks.items()
            for way in WAYS
            if way in found
        ]
        multiples = sorted({key for _, _, row in rows for key in row["gain"]}, key=int)
        heads = ["network", "batch", "mode", "plain (ms)", *multiples, "GMAC/s", "memory-bound"]
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
            lines[-1] += (
                f" `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` were 4 GB for "
                f"{'; '.join(held)}."
            )
        blocked = [_blocked(name, row["why"]) for name, way, row in rows if way == "onnxruntime"]
        if blocked:
            lines += [
                "",
                "ONNX Runtime has a faster layout for convolutions of certain widths. The share of "
                f"the convolutions that use it (`multiple_of` in brackets): {'; '.join(blocked)}.",
            ]
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
        how = f"float32, {threads(row)}, {row['instructions']}"
        versions = {key: f"{key} {value}" for key, value in row["versions"].items()}
        run = {"": row["machine"], "how": "bfloat16" if device == "cuda" else how, **versions}
        for key, value in run.items():
            found.setdefault(key, set()).add(value)
    return ", ".join(" / ".join(sorted(values)) for values in found.values()) + "."


def default_widths() -> list[str]:
    found = read_numbers("default_widths")
    lines = [
        "## Widths by default",
        "",
        "Is the default of `multiple_of` a good one? The table has the speed-up of a model with "
        "half of the MACs over the original on a CPU: for any width (1), for the default "
        "(multiples of 8 in groups of at least 64 channels), and for multiples of 8 in every "
        "group. The model runs at 224 × 224 in eval mode. The channels were not learned: every "
        "group keeps the same share, by magnitude. Medians of alternating runs; ~ marks ratios "
        "that differ by more than 5 % from those of the fastest runs "
        "([default_widths.py](../benchmarks/measure/default_widths.py)).",
        "",
        "| network | batch | original (ms) | 1 | default | 8 |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        gain, fastest = row["gain"], row["gain_of_fastest"]
        cells = [
            f"{'~' * (abs(gain[key] / fastest[key] - 1) > 0.05)}{gain[key]:.2f}"
            for key in ("1", "auto", "8")
        ]
        cells[1] = f"**{cells[1]}**"
        lines.append(
            f"| {name} | {row['batch']} | {row['milliseconds']:.1f} | {' | '.join(cells)} |"
        )
    any_row = next(iter(found.values()), None)
    if any_row is not None:
        versions = ", ".join(f"{key} {value}" for key, value in any_row["versions"].items())
        lines += ["", f"{any_row['machine']}, {threads(any_row)}, {versions}."]
    return lines


def latency() -> list[str]:
    lines = [
        "## Latency as a budget",
        "",
        "Does an export take the time that `latency=` allows? Each network was trained briefly "
        "with `latency=` on random images of 224 × 224 "
        "([latency.py](../benchmarks/measure/latency.py)).",
        "",
        "- **measured**: latency of the export as a share of the original's. It is the median of "
        "five comparisons of alternating runs, with their range in brackets.",
        "- **setup**: the seconds until the latency model is fitted.",
        "- On CPUs, `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` were 4 GB.",
        "- All rows except that of resnet18, and all rows of this page on a GPU, are from before "
        "channels closed one by one. This change affects about twenty small operations per step on "
        "the vector of all gates.",
        "",
        "| network | batch | original (ms) | budget | measured | error | MACs left | setup (s) | "
        "machine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in read_numbers("latency").items():
        seen = row.get("shares", [])
        spread = f" ({min(seen):.3f}–{max(seen):.3f})" if seen else ""
        machine = f"{row['machine']}, {threads(row)}, torch {row['versions']['torch']}"
        lines.append(
            f"| {name} | {row['batch']} | {row['milliseconds']['before']:.1f} | {row['latency']} | "
            f"**{row['share']:.3f}**{spread} | {row['off']:+.1%} | {row['macs']:.1%} | "
            f"{row['ready_seconds']:.0f} | {machine} |"
        )
    return lines


def tracing() -> list[str]:
    found = read_numbers("tracing")
    versions = found["versions"]
    lines = [
        "## Time of tracing",
        "",
        "How long does it take until a model can be pruned? We compare `trace`, including its "
        "trial cuts, with the graph and pruner of Torch-Pruning. Medians of "
        f"{found['runs']} alternating runs (`Pruner`: {found['fewer_runs']}), each in its own "
        "process ([tracing.py](../benchmarks/measure/tracing.py)).",
        "",
        "- **GB**: peak memory above that of the imports.",
        "- **half cut**: whether the model runs after half of the channels were removed.",
        "- **`Pruner`**: the time to build one. It also inserts gates and compares outputs in "
        "float64.",
        "",
        "| network | `trace` (s) | GB | half cut | Torch-Pruning (s) | GB | half cut | "
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
        f"A Llama of {llama['parameters'] / 1e9:.1f} B parameters (ours: median of "
        f"{found['fewer_runs']} runs; Torch-Pruning, which needs the weights: one run):",
        "",
        "| | ready to prune (s) | GB | export in float32 (s) | GB |",
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
        f"Time of `trace` for transformers, by number of blocks: {', '.join(each)} "
        f"(×{growth:.1f} for ×{more:.0f} blocks).",
        "",
        f"{found['machine']}, {threads(found)}, torch {versions['torch']}, "
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
        "How long does the proximal step on all gates of a model take? Medians, by number of "
        'groups; bold numbers are within the limit. "Replayed" means from a CUDA graph; otherwise, '
        "Python launches the groups one by one "
        "([proximal.py](../benchmarks/measure/proximal.py)).",
        "",
        "| gates | case | ms | limit (ms) | machine |",
        "|---|---|---|---|---|",
    ]
    for row in read_numbers("proximal").values():
        machine = f"{row['machine']}, {threads(row)}, torch {row['versions']['torch']}"
        cases = row["milliseconds"].items()
        for case, value in sorted(cases, key=lambda item: (int(item[0].split()[0]), item[0])):
            limit = row["limit"]
            taken = f"**{value:.2f}**" if value <= limit else f"{value:.2f}"
            lines.append(f"| {row['channels']:,} | {case} | {taken} | {limit:.0f} | {machine} |")
    return lines


TRAININGS = {"plain": "plain", "gated": "gated", "taught": "gated, with a teacher"}


def epochs() -> list[str]:
    lines = [
        "## Time of a CIFAR-10 epoch",
        "",
        "How long does an epoch take? It has 50,000 random images of 32 × 32 on the device, with "
        "crops and flips. The whole step is captured in a CUDA graph, as in `polarprune train`. "
        "Medians ([epochs.py](../benchmarks/measure/epochs.py)).",
        "",
        "- **processes**: the number of trainings that share the GPU.",
        "- **per training**: the seconds divided by this number.",
        "",
        "| network | training | compiled | batch | processes | epoch (s) | per training (s) | "
        "200 epochs (min) | machine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in read_numbers("epochs").values():
        minutes = 200 * row["seconds"] / 60
        lines.append(
            f"| {row['network']} | {TRAININGS[row['kind']]} | "
            f"{'yes' if row['compiled'] else 'no'} | {row['batch']} | {row['together']} | "
            f"**{row['seconds']:.2f}** | "
            f"{row['seconds_for_each']:.2f} | {minutes:.1f} | {row['machine']}, torch "
            f"{row['versions']['torch']} |"
        )
    return lines


def throughput() -> list[str]:
    lines = [
        "## Training images per second",
        "",
        "How many images a second does a training on ImageNet process? The images are random and "
        "lie on the device, so the speed of a loader is not measured. The steps are those of "
        "`polarprune train`. The last ratio is the median over alternating runs, with their range "
        "in brackets ([throughput.py](../benchmarks/measure/throughput.py)).",
        "",
        "| network | batch | side | compiled | plain | gated | time gated / plain | machine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in read_numbers("throughput").items():
        plain, gated = (row["images_a_second"][kind] for kind in ("plain", "gated"))
        low, high = row["ratios"]
        lines.append(
            f"| {name.removesuffix('-compiled')} | {row['batch']} | {row['side']} | "
            f"{'yes' if row['compiled'] else 'no'} | {plain:,} | {gated:,} | "
            f"**{row['ratio']:.3f}** ({low:.3f}–{high:.3f}) | {row['machine']}, torch "
            f"{row['versions']['torch']} |"
        )
    return lines


def quantized() -> list[str]:
    lines = [
        "## int8 weights",
        "",
        "Can a pruned network also be quantized? Networks of `zoo/` before and after one line of "
        "torchao: `quantize_(network, IntxWeightOnlyConfig(weight_dtype=torch.int8, "
        "granularity=PerAxis(0)), layers)`. It stores the weights of linear layers, and of "
        "convolutions whose kernels read several channels, in int8 "
        "([quantized.py](../benchmarks/measure/quantized.py)).",
        "",
        "- **accuracy**: on the 10,000 test images of CIFAR-10, before and after.",
        "- **MB**: size of the weights in a file.",
        "- **time**: int8 / float32 on batches of 16, medians of alternating runs. torchao "
        "computes in float32 here, so the file gets smaller, but the network does not get faster.",
        "",
        "| network | MACs left | accuracy (%) | int8 | original (MB) | pruned | pruned, int8 | "
        "time, eager | compiled |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = read_numbers("quantized")
    for name, row in rows.items():
        score, size = row["score"], {k: f"{n / 1e6:.2f}" for k, n in row["bytes"].items()}
        ratio = {k: f"{t['int8'] / t['pruned']:.2f}" for k, t in row["milliseconds"].items()}
        lines.append(
            f"| {name} | {row['macs_share']:.1%} | {100 * score['pruned']:.2f} | "
            f"{100 * score['int8']:.2f} | {size['original']} | {size['pruned']} | "
            f"**{size['int8']}** | {ratio['eager']} | {ratio['compiled']} |"
        )
    return [*lines, "", *quantized_on(rows.values())]


def quantized_on(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return where the networks were quantized."""
    found = (
        f"{row['machine']}, {threads(row)}, "
        + "".join(f"{name} {version}, " for name, version in row["versions"].items())
        + f"torchao {row['torchao']}"
        for row in rows
    )
    return [f"{'; '.join(dict.fromkeys(found))}."]


PARTS = (
    overhead,
    shrinking,
    exported,
    default_widths,
    latency,
    tracing,
    proximal,
    epochs,
    throughput,
    quantized,
)


def page() -> str:
    """Return docs/performance.md."""
    parts = [part() for part in PARTS if read_numbers(part.__name__)]
    head = [
        "# Performance",
        "",
        "What gates cost during training, what pruning saves, and how fast exported models are. "
        "Numbers in one row were measured in one run, so compare within a row. This page is "
        "generated by [pages/performance.py](../benchmarks/pages/performance.py) from "
        "[stored numbers](../benchmarks/numbers).",
        "",
    ]
    lines = [line for part in parts for line in (*part, "")]
    return "\n".join([*head, *lines[:-1]]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
