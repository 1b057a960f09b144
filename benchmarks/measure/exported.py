"""Claim: half of the MACs make an exported model at least 1.7 times as fast on a CPU.

The plain model and exported models at macs=0.5, with several values of `multiple_of`, run in turn
at 224 x 224 in eval mode, in every way a user would run them. Batch norms are not folded by hand.
First, the outputs of all ways are compared with those of eager mode. Ratios are those of medians.

The channels are not learned: weights are random, and `plan_by_score` keeps the same share of every
group by magnitude. Training would choose other widths for the same MACs.

The claim holds for ResNet-50, VGG-16, ViT-B/16 and MobileNetV2 in every way. For MobileNetV2, glibc
must keep memory, which the variables below ensure. Otherwise it may request pages again in every
layer, and the ratio varies from 1.7 to 2.2 between processes.

`why` explains the gain. It stores how the time of eager runs, measured by torch's profiler, divides
into products (convolutions, linear layers, attention), depthwise convolutions, and operations that
only move memory (norms, activations, sums, pooling). The time of products halves with the MACs. The
time of the others decreases with the widths, to about 0.7. GMAC/s show how well a machine is used.

On the GPU, all models are bfloat16 and channels-last. `captured` is a CUDA graph of the eager
model, `compiled` one of the compiled model, so neither waits for Python. Writes
numbers/exported.json after each network and way; an existing row gets another repetition:

    export MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=4000000000
    OMP_NUM_THREADS=1 python -m benchmarks.measure.exported  # all networks, on the CPU
    OMP_NUM_THREADS=1 python -m benchmarks.measure.exported vgg16 --way eager
    python -m benchmarks.measure.exported --cuda
"""

import argparse
import copy
import functools
import importlib.util
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import polarprune as pp
from benchmarks.measure.overhead import vision
from benchmarks.store import read_numbers, write_numbers
from polarprune.channels.graph import Graph
from polarprune.cost.other_scores import magnitude_scores, plan_by_score
from polarprune.cost.timing import environment, side_by_side
from polarprune.surgery.proof import count_macs

NAME = "exported"
NETWORKS = ("resnet50", "vit_b_16", "mobilenet_v2", "vgg16")
BATCH = {"cpu": 8, "cuda": 128}
MULTIPLES = {"cpu": (1, 8, 16, 32), "cuda": (1, 8, 16, 32, 64)}
COMPILED = {"cpu": (1, 8, 16, 32), "cuda": (1, 8, 32)}  # compiling takes its time
RUNS = {"mobilenet_v2": 60, "resnet50": 20, "vit_b_16": 8, "vgg16": 8}  # on a CPU
PRODUCTS = ("conv", "mm", "matmul", "attention")  # in the names of operations
NOTHING = {"products": 0.0, "depthwise": 0.0, "rest": 0.0}
Models = dict[str, nn.Module]


def kind_of(name: str, weight: list[int]) -> str:
    if not any(part in name for part in PRODUCTS):
        return "rest"
    return "depthwise" if "conv" in name and len(weight) == 4 and weight[1] == 1 else "products"


@functools.cache
def made(name: str) -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    model = vision(name).eval()
    for weight in [p for p in model.parameters() if p.dim() > 1 and not p.any()]:
        nn.init.normal_(weight, std=0.02)  # outputs of nothing but zeros compare with anything
    return model, pp.trace(model, torch.randn(1, 3, 224, 224))


@functools.cache
def exported(name: str, multiple: int | str) -> nn.Module:
    model, graph = made(name)
    scores = magnitude_scores(model, graph)
    plan = plan_by_score(graph, scores, macs=0.5, multiple_of=multiple)
    return pp.shrink(model, graph, plan).eval()


class Session(nn.Module):
    """A model in ONNX Runtime, with as many threads as torch has."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        super().__init__()
        program = torch.onnx.export(model, (example,), verbose=False)
        assert program is not None
        self.proto = program.model_proto.SerializeToString()
        self.session = self.start()
        self.input = self.session.get_inputs()[0].name

    def start(self, **options: Any) -> Any:
        import onnxruntime

        chosen = onnxruntime.SessionOptions()
        chosen.intra_op_num_threads = torch.get_num_threads()
        for key, value in options.items():
            setattr(chosen, key, value)
        return onnxruntime.InferenceSession(self.proto, chosen)

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(None, {self.input: x.numpy()})[0])

    def shares(self, x: Tensor) -> dict[str, float]:
        """As `shares` below; `blocked` is the number of convolutions that have the fast layout."""
        total, blocked, convolutions = dict(NOTHING), 0, 0
        with tempfile.TemporaryDirectory() as folder:
            session = self.start(enable_profiling=True, profile_file_prefix=f"{folder}/profile")
            for _ in range(4):
                session.run(None, {self.input: x.numpy()})
            events = json.loads(Path(session.end_profiling()).read_text())
        nodes = [event for event in events if "op_name" in event.get("args", {})]
        for event in nodes[len(nodes) // 4 :]:  # all but the first run
            name, tensors = event["args"]["op_name"], event["args"]["input_type_shape"]
            weight = next(iter(tensors[1].values())) if len(tensors) > 1 else []
            total[kind_of(name.lower(), weight)] += event["dur"]
            convolutions += "Conv" in name
            blocked += "Conv" in name and "nchwc" in event["name"]
        found = {kind: round(value / sum(total.values()), 4) for kind, value in total.items()}
        return {**found, "blocked": round(blocked / convolutions, 3)}


class Captured(nn.Module):
    """A model in a CUDA graph, for one input."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.model, self.example = model, example
        with torch.inference_mode():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    model(example)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = model(example)

    def forward(self, x: Tensor) -> Tensor:
        assert x is self.example
        self.graph.replay()
        return self.out


def compiled(model: nn.Module, example: Tensor) -> nn.Module:
    run: nn.Module = torch.compile(model, fullgraph=True, dynamic=False)
    return Captured(run, example) if example.is_cuda else run


# How a model is made ready, and the layout of the model and of its input.
WAYS: dict[str, dict[str, tuple[Callable[[nn.Module, Tensor], nn.Module], torch.memory_format]]] = {
    "cpu": {
        "eager": (lambda model, x: model, torch.contiguous_format),
        "channels_last": (lambda model, x: model, torch.channels_last),
        "onnxruntime": (Session, torch.contiguous_format),
        "compiled": (compiled, torch.channels_last),
    },
    "cuda": {
        "eager": (lambda model, x: model, torch.channels_last),
        "captured": (Captured, torch.channels_last),
        "compiled": (compiled, torch.channels_last),
    },
}


def measure(name: str, device: str, way: str) -> dict[str, Any]:
    prepare, layout = WAYS[device][way]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    multiples = COMPILED[device] if way == "compiled" else MULTIPLES[device]
    here: Models = {
        key: copy.deepcopy(model).to(device=device, dtype=dtype).to(memory_format=layout)
        for key, model in {
            "plain": made(name)[0],
            **{str(multiple): exported(name, multiple) for multiple in multiples},
        }.items()
    }
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH[device], 3, 224, 224, generator=generator)
    x = x.to(device=device, dtype=dtype).contiguous(memory_format=layout)
    start = time.perf_counter()
    ready = {key: prepare(model, x) for key, model in here.items()}
    compare(here, ready, x, 1e-3 if device == "cpu" else 0.2)  # bfloat16 rounds at other places
    seconds = time.perf_counter() - start
    runs = RUNS[name] if device == "cpu" else 30
    found = side_by_side(ready, x, runs=runs, warm_up=2)
    macs = {key: count_macs(model, x[:1]) * len(x) for key, model in here.items()}
    times = {key: timing.milliseconds for key, timing in found.items()}
    row: dict[str, Any] = {
        "batch": len(x),
        "seconds_to_prepare": round(seconds, 1),
        "macs": {key: round(value / macs["plain"], 4) for key, value in macs.items()},
        "milliseconds": {key: round(timing.median, 3) for key, timing in found.items()},
        "gmacs_a_second": {
            key: round(macs[key] / timing.median / 1e6, 1) for key, timing in found.items()
        },
        "gain": gains(times, statistics.median),
        "gain_of_fastest": gains(times, min),  # others may use the machine too
        "gain_of_halves": [
            gains({key: turns[half::2] for key, turns in times.items()}, statistics.median)
            for half in (0, 1)
        ],
        "runs": runs,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "malloc": {key: value for key, value in os.environ.items() if key.startswith("MALLOC_")},
        **environment(),
    }
    if all(ready[key] is here[key] for key in here):
        row["why"] = {key: shares(model, x) for key, model in here.items()}
    if way == "onnxruntime":
        import onnxruntime

        row["why"] = {key: model.shares(x) for key, model in ready.items()}
        row["versions"]["onnxruntime"] = onnxruntime.__version__
    return row


def gains(
    times: Mapping[str, list[float]], middle: Callable[[list[float]], float]
) -> dict[str, float]:
    one = {key: middle(found) for key, found in times.items()}
    return {key: round(one["plain"] / one[key], 3) for key in one if key != "plain"}


def together(row: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Merge with earlier runs on this machine: the gain is the median over all processes."""
    alike = ("machine", "versions", "batch", "threads", "malloc")
    same = all(row[key] == before.get(key) for key in alike)
    repeats = [*(before.get("repeats", [before["gain"]]) if same else []), row["gain"]]
    gain = {
        key: round(statistics.median(one[key] for one in repeats if key in one), 3)
        for key in row["gain"]
    }
    return {**row, "gain": gain, "repeats": repeats}


@torch.inference_mode()
def compare(here: Models, ready: Models, x: Tensor, tolerance: float) -> None:
    for key, model in here.items():
        if ready[key] is not model:
            expected = model(x).float()
            error = (ready[key](x).float() - expected).norm() / expected.norm()
            assert error < tolerance, f"{key}: {error}"


@torch.inference_mode()
def shares(model: nn.Module, x: Tensor) -> dict[str, float]:
    """Return the shares of time in products, depthwise convolutions and other operations."""
    activity = torch.profiler.ProfilerActivity
    wanted = [activity.CPU, activity.CUDA] if x.is_cuda else [activity.CPU]
    model(x)
    with torch.profiler.profile(activities=wanted, record_shapes=True) as profile:
        for _ in range(3):
            model(x)
        if x.is_cuda:
            torch.cuda.synchronize()
    total = dict(NOTHING)
    for event in profile.key_averages(group_by_input_shape=True):
        if event.key.startswith("aten::"):  # kernels are counted by what started them
            weight = event.input_shapes[1] if len(event.input_shapes) > 1 else []
            took = event.self_device_time_total if x.is_cuda else event.self_cpu_time_total
            total[kind_of(event.key, weight)] += took
    whole = sum(total.values())
    return {kind: round(value / whole, 4) for kind, value in total.items()} if whole else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}; all, if none")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--way", action="append", help="eager, compiled, ...; all, if none")
    options = parser.parse_args()
    device = "cuda" if options.cuda else "cpu"
    for way in options.way or WAYS[device]:  # compiled comes last: it takes longest
        if way == "onnxruntime" and importlib.util.find_spec("onnxruntime") is None:
            continue
        for name in options.networks or NETWORKS:
            if (name, way) == ("vit_b_16", "channels_last"):
                continue  # it has one convolution
            row = measure(name, device, way)
            store = read_numbers(NAME)
            found = store.setdefault(device, {}).setdefault(name, {})
            found[way] = together(row, found.get(way, {}))
            write_numbers(NAME, store)
            plain = row["milliseconds"]["plain"]
            print(device, name, way, plain, row["gain"], row["gain_of_fastest"], row.get("why", ""))
            print(f"  prepared in {row['seconds_to_prepare']} s", flush=True)
            torch._dynamo.reset()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)  # in torch's exporter
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    main()
