"""Two processes that train with Hugging Face's Trainer and FSDP2; each writes its findings.

accelerate takes FSDP from trainings on accelerators only, so it is told that this is one.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers do so late; here it is done once for both
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure.import_torchvision import import_torchvision
from tests.helpers.nets import digits_resnet
from tests.helpers.processes import fork_two

import_torchvision()  # transformers imports it, and cannot do so everywhere

import transformers  # noqa: E402
from accelerate import PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from polarprune.integrations.transformers import PruningTrainer  # noqa: E402

STOP = 8  # of 20 steps: after 8 batches of 4 in each of two processes
EPOCHS, BATCH, PICTURES = 5, 4, 32
FSDP: dict[str, Any] = {"auto_wrap_policy": "NO_WRAP", "state_dict_type": "SHARDED_STATE_DICT"}


class Net(nn.Module):
    """A model that returns its loss, as `Trainer` requires."""

    def __init__(self) -> None:
        super().__init__()
        self.net = digits_resnet(8)

    def forward(self, image: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(image)
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


class StopAndSave(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STOP:
            control.should_save = control.should_training_stop = True


def pictures() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(PICTURES, 1, 8, 8, generator=generator)
    return [{"image": image, "labels": number % 10} for number, image in enumerate(images)]


def trainer(folder: Path) -> Any:
    args = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=0.01,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        fsdp=True,
        fsdp_config=FSDP,
    )
    assert args.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    torch.manual_seed(1)
    made = PruningTrainer(Net(), args, train_dataset=pictures(), pruning={"macs": 0.5})
    made.remove_callback(transformers.PrinterCallback)
    return made


def finished(made: Any) -> dict[str, Any]:
    """Return the results of a training."""
    small, pruner = made.export(), made.pruner
    return {
        "sharded": type(next(iter(pruner.gates.values())).alpha).__name__,
        "steps": [pruner.steps, pruner.step_count],
        "left": pruner.cost()["macs"] / pruner.graph.cost.original()["macs"],
        "rates": [group["initial_lr"] for group in made.optimizer.param_groups],
        "weights": [float(value.double().sum()) for value in small.parameters()],
        "proof": max(pruner.proof.values()),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    whole = trainer(folder / "whole")
    whole.train()
    found: dict[str, Any] = {"whole": finished(whole)}
    stopped = trainer(folder / "stopped")
    stopped.add_callback(StopAndSave())
    stopped.train()
    resumed = trainer(folder / "stopped")
    resumed.train(resume_from_checkpoint=True)
    found["resumed"] = finished(resumed)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(not fork_two(partial(main, Path(sys.argv[1]))))
