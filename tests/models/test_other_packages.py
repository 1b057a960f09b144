"""A part of `make coverage`: models of other packages (the dev extra has these), by numbers."""

import pytest
import torch
from torch import nn

from benchmarks.measure import coverage_models, coverage_verdicts, model_coverage

# For each model, the lists of equal blocks of which two are enough here.
MODELS: dict[str, list[str]] = {
    "torchvision/resnet18": [],
    "torchvision/mobilenet_v2": [],
    "torchvision/shufflenet_v2_x0_5": [],
    "torchvision/swin_t": ["features.5"],
    "torchvision/lraspp_mobilenet_v3_large": [],
    "torchvision/fasterrcnn_mobilenet_v3_large_fpn": [],
    "torchvision/r3d_18": [],
    "timm/convnext_atto": ["stages.2.blocks"],
    "timm/deit_tiny_patch16_224": ["blocks"],
    "timm/mixer_s32_224": ["blocks"],
    "timm/skresnet18": [],
    "timm/efficientnet_b0": [],
    "timm/eva02_tiny_patch14_224": ["blocks"],
    "transformers/bert": ["bert.encoder.layer"],
    "transformers/gpt2": ["transformer.h"],
    "transformers/llama": ["model.layers"],
    "transformers/t5": ["model.encoder.block", "model.decoder.block"],
    "transformers/mixtral": ["model.layers"],
    "transformers/whisper": ["model.model.encoder.layers", "model.model.decoder.layers"],
    "transformers/detr": ["model.model.encoder.layers", "model.model.decoder.layers"],
    "rnn/lstm_text": [],
    "rnn/gru_speech": [],
}
# A shuffle ties channels to cycles.
NOT_LOW = {"torchvision/shufflenet_v2_x0_5"}


def keep_two(model: nn.Module, path: str) -> None:
    """Drop all blocks of a list but the first two."""
    parent, _, name = path.rpartition(".")
    blocks = model.get_submodule(path)
    assert isinstance(blocks, (nn.ModuleList, nn.Sequential)) and len(blocks) > 2
    setattr(model.get_submodule(parent), name, blocks[:2])


def few_classes(model: nn.Module) -> None:
    """Let a detector tell three classes: it compares the boxes of each class in Python."""
    head = model.get_submodule("roi_heads.box_predictor")
    wide = head.get_submodule("cls_score").in_features
    head.cls_score, head.bbox_pred = nn.Linear(wide, 4), nn.Linear(wide, 16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_model_is_cut_exactly_and_by_much(name: str) -> None:
    torch.manual_seed(0)
    model, example = coverage_models.make(name)
    for path in MODELS[name]:
        keep_two(model, path)
    if name.startswith("torchvision/fasterrcnn"):
        few_classes(model)
    if name == "torchvision/r3d_18":
        example = example[:, :, :4, :32, :32]  # convolutions in float64 over video are slow
    model.eval()
    kind = coverage_models.kind(name, model, example)
    row = {"kind": kind, **model_coverage.look(model, example, norms=False)}
    if kind in ("transformer", "hybrid") or "convnext" in name:
        row["stream"] = model_coverage.look(model, example, norms=True)
    assert coverage_verdicts.passed(row), {key: row[key] for key in row if key != "reasons"}
    assert coverage_verdicts.small_enough(row) == (name not in NOT_LOW), row["macs"]
