"""Decoders of transformers with a cache, and with the options that people use.

Every model is cut by a random plan, and compared in float64 with the masked original, which
includes a further token with the cache; then both generate text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import polarprune as pp
from benchmarks.measure.import_torchvision import import_torchvision
from polarprune.gates.folding import fold
from polarprune.surgery.precision import StaysDouble
from polarprune.surgery.proof import ONE_MORE_TOKEN, prove_equal
from tests.helpers.training import sgd

pytestmark = pytest.mark.filterwarnings("ignore")

import_torchvision()  # which transformers imports
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
BOTH = {
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
GPT2 = {"vocab_size": 50, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4}
HEARD = {"num_mel_bins": 8, "max_source_positions": 15, "max_target_positions": 30}
IDS = torch.tensor([[3, 11, 4, 18, 5, 9, 26], [2, 7, 31, 8, 28, 1, 8]])
WORDS = {"input_ids": IDS}
PAIR = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5].contiguous()}


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **options))


def gpt2(**options: Any) -> Any:
    given = {**GPT2, "bos_token_id": 1, "eos_token_id": 2, **options}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**given))


def t5(**options: Any) -> Any:
    given = {**T5, "pad_token_id": 0, "decoder_start_token_id": 0, **options}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**given))


def made(name: str, config: str, options: dict[str, Any]) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**options))


SLIDING = {**SMALL, "sliding_window": 4}  # shorter than the example
# The groups of heads are those with these names; each family has two layers with a cache.
FAMILIES: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "gpt2": (gpt2, WORDS, "attn.c_attn"),
    "llama": (llama, WORDS, "self_attn.q_proj"),
    "mistral": (made("MistralForCausalLM", "MistralConfig", SLIDING), WORDS, "self_attn.q_proj"),
    "qwen3": (
        made("Qwen3ForCausalLM", "Qwen3Config", {**SMALL, "head_dim": 8}),
        WORDS,
        "self_attn.q_proj",
    ),
    "gemma": (
        made("GemmaForCausalLM", "GemmaConfig", {**SMALL, "head_dim": 8}),
        WORDS,
        "self_attn.q_proj",
    ),
    "bart": (
        made("BartForConditionalGeneration", "BartConfig", BOTH),
        PAIR,
        "decoder.layers.*self_attn.q_proj",
    ),
    "t5": (t5, PAIR, "decoder.*EncDecAttention.q"),
    "whisper": (
        made(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            {**BOTH, **HEARD, "begin_suppress_tokens": None},
        ),
        {
            "input_features": torch.linspace(-1, 1, 480).reshape(2, 8, 30),
            "decoder_input_ids": PAIR["decoder_input_ids"],
        },
        "decoder.layers.*self_attn.q_proj",
    ),
}


def in_double(example: dict[str, Any]) -> dict[str, Any]:
    return {k: x.double() if x.is_floating_point() else x for k, x in example.items()}


def cut(model: nn.Module, example: dict[str, Any]) -> tuple[Any, Any, nn.Module]:
    """Cut a model by a random plan; return the graph, the masked model and the small one."""
    model = model.double().eval()
    graph = pp.trace(model, example)
    generator = torch.Generator().manual_seed(0)
    plan = {}
    for name, group in graph.prunable.items():
        order = torch.randperm(group.size, generator=generator)
        plan[name] = sorted(order[: (group.size + 1) // 2].tolist())
    masked = copy.deepcopy(model)
    fold(masked, graph, graph.kept_units(plan).double())
    return graph, masked, pp.shrink(masked, graph, plan)


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_are_prunable_with_the_cache_on(name: str) -> None:
    torch.manual_seed(0)
    make, example, heads = FAMILIES[name]
    example = in_double(example)
    graph, masked, small = cut(make(), example)
    first, _, last = heads.rpartition("*")
    found = [k for k in graph.prunable if first in k and last in k]
    # The bias of positions ties the heads of all layers of a T5.
    assert len(found) == (1 if name == "t5" else 2), {
        k: g.reason for k, g in graph.groups.items() if g.frozen
    }
    assert not any("cache" in group.reason for group in graph.groups.values())
    with StaysDouble():
        gaps = prove_equal(masked, small, example, 1e-10).differences
    assert gaps.keys() == {"eval", ONE_MORE_TOKEN, "train"}
    for cached in (True, False):
        given = {k: x for k, x in example.items() if not k.startswith("decoder")}
        texts = [
            model.generate(**given, max_new_tokens=6, do_sample=False, use_cache=cached)
            for model in (masked, small)
        ]
        assert torch.equal(texts[0], texts[1])


# --- what people switch on ------------------------------------------------------------------------


def checkpointed(model: Any, reentrant: bool) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def with_hooks_of_accelerate(model: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)


PADDING = torch.ones_like(IDS)
PADDING[0, :3] = 0
LEFT = {
    "input_ids": IDS,
    "attention_mask": PADDING,
    "position_ids": (PADDING.cumsum(-1) - 1).clamp_min(0),
}
LABELS = {"input_ids": IDS, "labels": IDS}
OPTIONS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "checkpoints, reentrant": (lambda: checkpointed(llama(), True), WORDS),
    "checkpoints": (lambda: checkpointed(llama(), False), WORDS),
    "checkpoints of an encoder and a decoder": (lambda: checkpointed(t5(), False), PAIR),
    "eager attention": (lambda: llama(attn_implementation="eager"), WORDS),
    "fused attention": (lambda: llama(attn_implementation="sdpa"), WORDS),
    "tied embeddings": (lambda: llama(tie_word_embeddings=True), WORDS),
    "padding on the left": (llama, LEFT),
    "padding on the left, eager": (lambda: gpt2(attn_implementation="eager"), LEFT),
    "labels": (llama, LABELS),
    "labels for a decoder": (t5, {"input_ids": IDS, "labels": PAIR["decoder_input_ids"]}),
    "a tuple": (llama, {**WORDS, "return_dict": False}),
    "hooks of accelerate": (lambda: with_hooks_of_accelerate(llama()), WORDS),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_trained_exported_and_compared(name: str) -> None:
    torch.manual_seed(0)
    make, example = OPTIONS[name]
    model = make()
    pruner = pp.Pruner(model, example, params=0.7, steps=6)
    assert [k for k in pruner.graph.prunable if "q" in k.rpartition(".")[2] or "c_attn" in k]
    optimizer = sgd(pruner, lr=0.05)
    pruner.attach(optimizer)
    model.train()
    for _ in range(6):
        optimizer.zero_grad()
        out = model(**example)
        logits = out["logits"] if "return_dict" not in example else out[0]
        logits.square().mean().backward()
        optimizer.step()
    small = pruner.export()
    assert max(pruner.proof.values()) <= 1e-5
    assert pruner.proof.keys() >= {"eval", ONE_MORE_TOKEN, "train"}
    if name == "tied embeddings":
        assert small.lm_head.weight is small.model.embed_tokens.weight


class OnlyLoss(nn.Module):
    """A model that returns one number."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama(use_cache=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def test_a_loss_as_the_only_output_freezes_no_heads_and_is_compared_in_float64() -> None:
    torch.manual_seed(0)
    model = OnlyLoss()
    pruner = pp.Pruner(model, LABELS, params=0.7, steps=2)
    assert len([k for k in pruner.graph.prunable if k.endswith("q_proj")]) == 2
    optimizer = sgd(pruner, lr=0.05)
    pruner.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(**LABELS).backward()
        optimizer.step()
    pruner.export()
    assert all(name.endswith("in float64") for name in pruner.proof)
    assert max(pruner.proof.values()) <= 1e-10


def test_offloaded_weights_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = llama()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(pp.PruneError, match=r"offloaded by accelerate.*without offloading"):
        pp.trace(model, WORDS)


def test_a_model_on_several_devices_is_refused() -> None:
    model = llama()
    model.model.layers[1].to("meta")
    with pytest.raises(pp.PruneError, match="spread over cpu, meta: load it onto one device"):
        pp.trace(model, WORDS)


# --- the precision of the computation -------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, t5], ids=["llama", "t5"])
def test_norms_in_float32_do_not_fail_a_model_in_float64(make: Any) -> None:
    """Their rounding hides most differences of a model in float64, and enlarges the others."""
    torch.manual_seed(0)
    example = PAIR if make is t5 else WORDS
    model = make().double()
    pruner = pp.Pruner(model, example, params=0.7, steps=6)
    optimizer = sgd(pruner, lr=0.05)
    pruner.attach(optimizer)
    for step in range(6):
        optimizer.zero_grad()
        model(**example).logits.square().mean().backward()
        optimizer.step()
        if step == 3:
            pruner.compact()
    pruner.export()
    assert max(pruner.proof.values()) <= 1e-10
