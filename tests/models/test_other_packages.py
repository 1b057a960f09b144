"""A part of `make coverage`: models of other packages (the dev extra has these), by numbers."""

import pytest
import torch

from benchmarks.measure import coverage_models, model_coverage
from benchmarks.pages import coverage as coverage_page

MODELS = [
    "torchvision/resnet18", "torchvision/mobilenet_v2", "torchvision/shufflenet_v2_x0_5",
    "torchvision/swin_t", "torchvision/lraspp_mobilenet_v3_large",
    "torchvision/fasterrcnn_mobilenet_v3_large_fpn", "torchvision/r3d_18", "timm/convnext_atto",
    "timm/deit_tiny_patch16_224", "timm/mixer_s32_224", "timm/skresnet18",
    "timm/efficientnet_b0", "timm/eva02_tiny_patch14_224", "transformers/bert",
    "transformers/gpt2", "transformers/llama", "transformers/t5", "transformers/mixtral",
    "transformers/whisper", "transformers/detr", "rnn/lstm_text", "rnn/gru_speech",
]  # fmt: skip
# A shuffle ties channels to cycles.
NOT_LOW = {"torchvision/shufflenet_v2_x0_5"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_model_is_cut_exactly_and_by_much(name: str) -> None:
    torch.manual_seed(0)
    model, example = coverage_models.make(name)
    model.eval()
    kind = coverage_models.kind(name, model, example)
    row = {"kind": kind, **model_coverage.look(model, example, norms=False)}
    if kind in ("transformer", "hybrid") or "convnext" in name:
        row["stream"] = model_coverage.look(model, example, norms=True)
    assert coverage_page.passed(row), {key: row[key] for key in row if key != "reasons"}
    assert coverage_page.small_enough(row) == (name not in NOT_LOW), row["macs"]
