"""Claim: one line of torchao stores a pruned network with int8 weights, in a third of its size.

Scores networks that `polarprune train` wrote, those of the zoo by default, before and after

    quantize_(small, IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)), layers)

where `layers` selects linear layers and convolutions whose kernels read several channels (so no
depth-wise ones). The size is that of a file with the `state_dict()`, also for the original network.
The networks run in turns, eager and compiled, on a batch of 16. Writes numbers/quantized.json:

    OMP_NUM_THREADS=1 python -m benchmarks.measure.quantized --data cifar10:DIR
    OMP_NUM_THREADS=1 python -m benchmarks.measure.quantized --data cifar10:DIR small.safetensors
"""

import argparse
import copy
import io
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis

from benchmarks.store import ROOT, read_numbers, write_numbers
from polarprune.cost.timing import environment, take_turns
from polarprune.experiments.data.table import open_data
from polarprune.experiments.data.task import Task
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.runs.pruned_file import rebuild
from polarprune.experiments.settings import Settings

NAME = "quantized"
BATCH, RUNS = 16, 40


def layers(module: nn.Module, name: str) -> bool:
    """Return whether a layer gets int8 weights; torchao fails where kernels read one channel."""
    del name
    several = isinstance(module, nn.Conv2d) and module.weight.shape[1] > 1
    return several or isinstance(module, nn.Linear)


def quantized(network: nn.Module) -> nn.Module:
    """Return a copy whose weights are int8, with a scale for each output channel."""
    small = copy.deepcopy(network)
    config = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    quantize_(small, config, layers)
    return small


def size(network: nn.Module) -> int:
    """Return the bytes of the weights in a file."""
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    return file.tell()


def times(networks: dict[str, nn.Module], example: Tensor) -> dict[str, float]:
    """Return the median milliseconds of networks that run in turns."""
    taken = take_turns(networks, example, runs=RUNS)
    return {name: round(statistics.median(one), 3) for name, one in taken.items()}


def measure(file: Path, data: str) -> dict[str, Any]:
    network, card = rebuild(file)
    task: Task = open_data(data, Settings(card["network"], card["recipe"]["data"]))
    original = NETWORKS[card["network"]]()
    both = {"pruned": network.eval(), "int8": quantized(network).eval()}
    example = task.example()
    batch = torch.cat([example] * (BATCH // len(example)))
    compiled: dict[str, nn.Module] = {}
    for name, one in both.items():
        torch.compiler.reset()
        compiled[name] = torch.compile(one, fullgraph=True, dynamic=False)
    return {
        "network": card["network"],
        "macs_share": card["macs_share"],
        "measure": task.measure,
        "score": {name: task.score(task.answers(one)) for name, one in both.items()},
        "bytes": {name: size(one) for name, one in {"original": original, **both}.items()},
        "milliseconds": {"eager": times(both, batch), "compiled": times(compiled, batch)},
        "batch": BATCH,
        "runs": RUNS,
        "threads": torch.get_num_threads(),
        **environment(),
        "torchao": version("torchao"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="int8 weights of pruned networks.")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--data", required=True, help="as in `polarprune train`")
    given = parser.parse_args()
    store = read_numbers(NAME)
    for file in given.files or sorted((ROOT / "zoo").glob("*.safetensors")):
        store[file.stem] = measure(file, given.data)
        print(file.stem, store[file.stem], flush=True)
        write_numbers(NAME, store)


if __name__ == "__main__":
    main()
