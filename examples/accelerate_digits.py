"""Prune a small network on handwritten digits with accelerate, in one process or in several.

pip install "polarprune[accelerate]" scikit-learn
accelerate launch --cpu examples/accelerate_digits.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polarprune as pp
from polarprune.integrations.accelerate import attach, optimizer_steps


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def main(epochs=20):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[:-400], labels[:-400]), batch_size=32, shuffle=True)

    model = make_model()
    steps = optimizer_steps(accelerator, loader, epochs)
    pruner = pp.Pruner(model, images[:2], macs=0.5, steps=steps)
    optimizer = torch.optim.AdamW(pruner.param_groups(lr=0.01, no_decay=True))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attach(pruner, accelerator, optimizer, loader=loader, epochs=epochs)

    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_state("checkpoint")  # accelerator.load_state("checkpoint") resumes

    if accelerator.is_main_process:
        small = pruner.export().eval()
        print(pruner.report())
        print(f"accuracy {(small(images[-400:]).argmax(1) == labels[-400:]).float().mean():.1%}")
        pp.save(small, "small.safetensors")  # pp.load("small.safetensors", model=make_model())


if __name__ == "__main__":
    main()
