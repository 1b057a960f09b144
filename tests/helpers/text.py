"""A tiny text, and networks and settings for it."""

from __future__ import annotations

import random
from pathlib import Path

from polarprune.experiments.networks.transformers import GPT
from polarprune.experiments.settings import Settings

WORDS = ("green ", "river ", "cold ", "and ", "the ", "moon\n")
CONTEXT = 16


def text(words: int = 400) -> str:
    """Return words in random order, the same ones every time."""
    draw = random.Random(0)
    return "".join(draw.choice(WORDS) for _ in range(words))


def written(folder: Path) -> str:
    """Write the text, and return its name as data."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text())
    return f"text:{folder / 'text.txt'}"


def small_gpt(tokens: int = 16) -> GPT:
    """Return a GPT of two blocks."""
    return GPT(tokens, context=CONTEXT, width=24, heads=3, blocks=2)


SMALL = Settings(
    "small_gpt",
    "text",
    baseline_epochs=3,
    epochs=4,
    batch=8,
    baseline_lr=3e-3,
    lr=3e-3,
    tune_lr=3e-3,
    warm_up=0.4,
    lr_end=0.1,
    optimizer="adamw",
    beta2=0.99,
    weight_decay=0.1,
    clip=1.0,
    context=CONTEXT,
    epoch_steps=15,
    distill=0.9,
    temperature=1.0,
    scored=1,
    best=True,
)
