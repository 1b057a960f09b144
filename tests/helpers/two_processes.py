"""Two processes that train with accelerate; each writes its results."""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # optimizers do so late; here it is done once for both
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import polarprune as pp
from polarprune.integrations.accelerate import attach, optimizer_steps
from tests.helpers.nets import digits_resnet
from tests.helpers.processes import fork_two
from tests.helpers.training import batches

EPOCHS, BATCHES = 5, 8
EXAMPLE = torch.zeros(2, 1, 8, 8)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    found: dict[str, object] = {"processes": accelerator.num_processes}
    drawn = zip(*batches(BATCHES, channels=1, size=8), strict=True)
    data = DataLoader(TensorDataset(*map(torch.cat, drawn)), batch_size=8)
    found["steps"] = optimizer_steps(accelerator, data, EPOCHS)
    torch.manual_seed(0)
    model = digits_resnet(8)
    pruner = pp.Pruner(model, EXAMPLE, macs=0.5, steps=optimizer_steps(accelerator, data, EPOCHS))
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05), momentum=0.9)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    twice = copy.copy(pruner)
    twice.steps *= 2
    for one in (twice, pruner):
        try:
            attach(one, accelerator, optimizer, loader=data, epochs=EPOCHS)
        except pp.PruneError as error:
            found["refused"] = str(error)
    for _ in range(EPOCHS):
        for images, labels in data:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
    found["taken"] = pruner.step_count
    found["left"] = pruner.cost()["macs"] / pruner.graph.cost.original()["macs"]
    found["alpha"] = torch.cat([gate.alpha.detach() for gate in pruner.gates.values()]).tolist()
    pruner.export()
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(not fork_two(partial(main, Path(sys.argv[1]))))
