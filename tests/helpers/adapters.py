"""One small training for every adapter: the same network and data, in each framework's own way.

A training of another framework is one more class here, and one more line in the table.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch as lightning
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import polarprune as pp
from polarprune.integrations.accelerate import attach, optimizer_steps
from polarprune.integrations.lightning import PruningCallback
from polarprune.integrations.transformers import PruningTrainer
from tests.helpers.nets import digits_resnet

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

EPOCHS, BATCH, BATCHES = 5, 8, 8
STEPS = EPOCHS * BATCHES
EXAMPLE = torch.zeros(2, 1, 8, 8)


class Digits(Dataset[Any]):
    """Random images with random labels, as dicts or tuples."""

    def __init__(self, as_dicts: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(BATCH * BATCHES, 1, 8, 8, generator=generator)
        self.labels = torch.randint(10, (BATCH * BATCHES,), generator=generator)
        self.as_dicts = as_dicts

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image, label = self.images[index], self.labels[index]
        return {"image": image, "labels": label} if self.as_dicts else (image, label)


def loader() -> DataLoader[Any]:
    return DataLoader(Digits(), batch_size=BATCH)


class Training(ABC):
    """A training in one framework.

    Args:
        folder: where the framework writes its checkpoints.
        seed: of the weights.
        **settings: of the pruner.
    """

    def __init__(self, folder: Path, seed: int = 1, **settings: Any) -> None:
        self.folder = folder
        torch.manual_seed(seed)
        self.net = digits_resnet(8)

    @property
    @abstractmethod
    def pruner(self) -> pp.Pruner:
        """Return the pruner; it exists once the training has begun."""

    @abstractmethod
    def train(self, until: int = EPOCHS, *, resume: bool = False) -> None:
        """Train, write a checkpoint after `until` epochs and stop there.

        With `resume`, continue from the checkpoint in the folder. Nothing in it knows of pruning.
        """

    def export(self) -> nn.Module:
        """Return the small model as users of the framework get it."""
        return self.pruner.export()

    def outputs(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the outputs of the gated or the small model in eval mode."""
        with torch.no_grad():
            found: Tensor = model.eval()(images)
            return found


class PlainLoop(Training):
    """Train with the loop of the README; store only the states of the model and the optimizer."""

    def __init__(self, folder: Path, seed: int = 1, **settings: Any) -> None:
        super().__init__(folder, seed)
        self._pruner = pp.Pruner(self.net, EXAMPLE, steps=STEPS, **settings)
        groups = self._pruner.param_groups(lr=0.05, weight_decay=5e-4)
        self.optimizer = torch.optim.SGD(groups, momentum=0.9)
        self._pruner.attach(self.optimizer)

    @property
    def pruner(self) -> pp.Pruner:
        return self._pruner

    def train(self, until: int = EPOCHS, *, resume: bool = False) -> None:
        first, file = 0, self.folder / "checkpoint.pt"
        if resume:
            first, model, optimizer = torch.load(file, weights_only=True)
            self.net.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
        for _ in range(first, until):
            for images, labels in loader():
                self.optimizer.zero_grad()
                F.cross_entropy(self.net.train()(images), labels).backward()
                self.optimizer.step()
        torch.save([until, self.net.state_dict(), self.optimizer.state_dict()], file)


class Classifier(lightning.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.example_input_array = net, EXAMPLE

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.net(images)
        return found

    def training_step(self, batch: Any, index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class StopAfter(lightning.Callback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 == self.epochs


class Lightning(Training):
    def __init__(self, folder: Path, seed: int = 1, **settings: Any) -> None:
        super().__init__(folder, seed)
        self.module, self.callback = Classifier(self.net), PruningCallback(**settings)

    @property
    def pruner(self) -> pp.Pruner:
        return self.callback.pruner

    def train(self, until: int = EPOCHS, *, resume: bool = False) -> None:
        keep = lightning.callbacks.ModelCheckpoint(self.folder, filename="c", save_top_k=-1)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=EPOCHS,
            callbacks=[self.callback, StopAfter(until), keep],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(self.module, loader(), ckpt_path=self.folder / "c.ckpt" if resume else None)

    def export(self) -> nn.Module:
        return self.callback.export()


class WithLoss(nn.Module):
    """A model that returns its loss, as Hugging Face's `Trainer` requires."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(image)
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


class StopAndSave(transformers.TrainerCallback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.epochs * BATCHES:
            control.should_save = control.should_training_stop = True


class HuggingFace(Training):
    def __init__(self, folder: Path, seed: int = 1, **settings: Any) -> None:
        super().__init__(folder, seed)
        args = transformers.TrainingArguments(
            str(folder),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            learning_rate=0.01,
            weight_decay=0.01,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            logging_strategy="no",
        )
        self.trainer = PruningTrainer(
            WithLoss(self.net), args, train_dataset=Digits(as_dicts=True), pruning=settings
        )

    @property
    def pruner(self) -> pp.Pruner:
        found: pp.Pruner = self.trainer.pruner
        return found

    def train(self, until: int = EPOCHS, *, resume: bool = False) -> None:
        self.trainer.add_callback(StopAndSave(until))
        self.trainer.remove_callback(transformers.PrinterCallback)
        self.trainer.train(resume_from_checkpoint=resume)

    def export(self) -> nn.Module:
        return self.trainer.export()

    def outputs(self, model: nn.Module, images: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model.eval()(images)["logits"]
            return found


class Accelerate(Training):
    def __init__(self, folder: Path, seed: int = 1, **settings: Any) -> None:
        super().__init__(folder, seed)
        self.accelerator = accelerate.Accelerator(cpu=True)
        steps = optimizer_steps(self.accelerator, loader(), EPOCHS)
        self._pruner = pp.Pruner(self.net, EXAMPLE, steps=steps, **settings)
        optimizer = torch.optim.SGD(self._pruner.param_groups(lr=0.05), momentum=0.9)
        self.prepared = self.accelerator.prepare(self.net, optimizer, loader())
        attach(
            self._pruner,
            self.accelerator,
            self.prepared[1],
            loader=self.prepared[2],
            epochs=EPOCHS,
        )

    @property
    def pruner(self) -> pp.Pruner:
        return self._pruner

    def train(self, until: int = EPOCHS, *, resume: bool = False) -> None:
        model, optimizer, batches = self.prepared
        if resume:
            self.accelerator.load_state(str(self.folder))
        for _ in range(self._pruner.step_count // BATCHES, until):
            for images, labels in batches:
                optimizer.zero_grad()
                self.accelerator.backward(F.cross_entropy(model.train()(images), labels))
                optimizer.step()
        self.accelerator.save_state(str(self.folder))


TRAININGS: dict[str, type[Training]] = {
    "plain loop": PlainLoop,
    "lightning": Lightning,
    "transformers": HuggingFace,
    "accelerate": Accelerate,
}
