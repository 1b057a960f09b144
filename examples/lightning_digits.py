"""Prune a small network on handwritten digits with Lightning.

pip install "polarprune[lightning]" scikit-learn
python examples/lightning_digits.py
"""

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polarprune as pp
from polarprune.integrations.lightning import PruningCallback


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Classifier(lightning.LightningModule):  # knows nothing of pruning
    def __init__(self):
        super().__init__()
        self.net = make_model()

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)]


def main(epochs=20):
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:-400], labels[:-400])

    pruning = PruningCallback(images[:2], module="net", macs=0.5)
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[pruning], accelerator="cpu")
    trainer.fit(Classifier(), DataLoader(train, batch_size=64, shuffle=True))

    small = pruning.export().eval()
    print(pruning.pruner.report())
    print(f"accuracy {(small(images[-400:]).argmax(1) == labels[-400:]).float().mean():.1%}")
    pp.save(small, "small.safetensors")  # pp.load("small.safetensors", model=make_model())


if __name__ == "__main__":
    main()
