"""torchao: one line stores the weights of a pruned model in int8."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import polarprune as pp
from benchmarks.measure.quantized import quantized, size
from polarprune.integrations.transformers import save_pretrained
from tests.helpers.nets import digits_resnet

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations of torchao


def off(one: Tensor, other: Tensor) -> float:
    """Return the largest relative difference."""
    return float((one - other).abs().max() / other.abs().max())


def kinds(model: nn.Module) -> set[str]:
    """Return the types of the weights of convolutions and linear layers."""
    found = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    return {type(layer.weight.data).__name__ for layer in found}


def half(model: nn.Module, example: object) -> nn.Module:
    """Return the model with half of the channels of every group, taken from the front."""
    graph = pp.trace(model, example)
    plan = {name: list(range(0, group.size, 2)) for name, group in graph.prunable.items()}
    return pp.shrink(model, graph, plan).eval()


def test_a_pruned_network_gets_int8_weights() -> None:
    images = torch.randn(4, 1, 8, 8)
    small = half(digits_resnet(), images)
    less = quantized(small)
    first, rest = next(iter(less.children())), [*less.children()][1:]
    assert kinds(small) == kinds(first) == {"Tensor"}  # the first kernels read one channel
    assert all(kinds(part) <= {"IntxUnpackedToInt8Tensor"} for part in rest)
    assert rest[-1][-1].weight.qdata.dtype == torch.int8
    assert size(less) < size(small)
    with torch.no_grad():
        assert 0 < off(less(images), small(images)) < 0.05


def test_a_pruned_folder_is_loaded_with_int8_weights(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    words = {"input_ids": torch.arange(14).reshape(2, 7)}
    model = transformers.LlamaForCausalLM(config)
    graph = pp.trace(model, words)
    inner = [name for name in graph.prunable if "gate_proj" in name or "up_proj" in name]
    plan = {name: list(range(64)) for name in inner}
    small = pp.shrink(model, graph, plan).eval()
    save_pretrained(small, tmp_path / "small", words)
    int8 = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "small", quantization_config=int8
    )
    assert loaded.config.intermediate_size == 64
    assert type(loaded.model.layers[1].mlp.down_proj.weight).__name__ == "Int8Tensor"
    with torch.no_grad():
        assert 0 < off(loaded(**words).logits, small(**words).logits) < 0.05
    quantize_(small, Int8WeightOnlyConfig())
    assert "Int8Tensor" in kinds(small)
    file = io.BytesIO()
    torch.save(small.state_dict(), file)
    assert file.tell() < 0.6 * sum(4 * p.numel() for p in model.parameters())
