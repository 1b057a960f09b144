"""Hugging Face: a pruned model as a folder that plain transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import polarprune as pp
import polarprune.integrations.pretrained_folder
from benchmarks.measure.load_folders import load_elsewhere, store_answers
from polarprune.integrations.transformers import save_pretrained
from tests.helpers.nets import digits_resnet

pytestmark = pytest.mark.filterwarnings("ignore")  # advice about padding

WORDS = {"input_ids": torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))}
PICTURES = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
LLAMA = {**SIZES, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
VIT = {**SIZES, "image_size": 16, "patch_size": 8}
GPT2 = {
    "vocab_size": 50,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "use_cache": False,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any], bool]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA), WORDS, False),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(**GPT2), WORDS, False),
    "vit": (transformers.ViTForImageClassification, transformers.ViTConfig(**VIT), PICTURES, False),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**SIZES), WORDS, True),
    "gemma": (
        transformers.GemmaForCausalLM,
        transformers.GemmaConfig(**{**LLAMA, "num_hidden_layers": 1, "head_dim": 8}),
        WORDS,
        True,
    ),
}
TRACED: dict[str, Any] = {}


class LayeredConfig(transformers.PreTrainedConfig):
    model_type = "layered"
    num_hidden_layers: int = 3
    width: int = 6
    inner: int = 10


class Layered(transformers.PreTrainedModel):
    """A model whose class reads a width for every layer."""

    config_class = LayeredConfig

    def __init__(self, config: LayeredConfig) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleList(map(self.layer, config.per_layer_config))
        self.post_init()

    def layer(self, config: LayeredConfig) -> torch.nn.Module:
        first = torch.nn.Linear(config.width, config.inner)
        return torch.nn.Sequential(
            first, torch.nn.Tanh(), torch.nn.Linear(config.inner, config.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def traced(family: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return a model, its graph and its example; each family is traced once."""
    if family not in TRACED:
        kind, config, example, norms = FAMILIES[family]
        torch.manual_seed(0)
        model = kind(config).eval()
        TRACED[family] = model, pp.trace(model, example, norms=norms), example
    return TRACED[family]  # type: ignore[no-any-return]


def halved(family: str, *kinds: str) -> tuple[Any, dict[str, Any]]:
    """Return a model with a random half of these kinds of channels, and its example."""
    model, graph, example = traced(family)
    sizes = {4: "heads", 2: "heads", 32: "stream"}
    plan = {
        name: torch.randperm(group.size)[: group.size // 2].tolist()
        for name, group in graph.prunable.items()
        if sizes.get(group.size, "mlp") in kinds
    }
    assert plan
    return pp.shrink(model, graph, plan), example


class Words:
    """A replacement for a tokenizer, which may do harm."""

    def __init__(self, harm: Any = None) -> None:
        self.harm = harm

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        if self.harm is not None:
            self.harm(folder)


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_a_process_without_polarprune_loads_equal_models(tmp_path: Path) -> None:
    cases = {
        "llama": ("AutoModelForCausalLM", ("mlp", "heads")),
        "gpt2": ("AutoModelForCausalLM", ("mlp",)),
        "vit": ("AutoModelForImageClassification", ("mlp", "heads")),
        "bert": ("AutoModelForMaskedLM", ("mlp", "heads", "stream")),
    }
    for family, (auto, kinds) in cases.items():
        small, example = halved(family, *kinds)
        save_pretrained(small, tmp_path / "new" / family, example)
        store_answers(small, example, auto, tmp_path / "new" / f"{family}.pt")
    found = load_elsewhere(tmp_path / "new")
    assert found.keys() == cases.keys()
    for family, row in found.items():
        assert row["class"] == FAMILIES[family][0].__name__
        assert row["difference"] <= 1e-6
        assert row["same_text"] is (True if family in ("llama", "gpt2") else None)
    configs = {family: read(tmp_path / "new" / family / "config.json") for family in cases}
    llama, vit, bert = (configs[family] for family in ("llama", "vit", "bert"))
    assert (llama["intermediate_size"], llama["num_attention_heads"]) == (24, 2)
    assert (llama["num_key_value_heads"], llama["head_dim"], llama["hidden_size"]) == (1, 8, 32)
    assert configs["gpt2"]["n_inner"] == 64
    assert (vit["num_attention_heads"], vit["head_dim"], vit["hidden_size"]) == (2, 8, 32)
    assert (bert["hidden_size"], bert["num_attention_heads"]) == (16, 2)
    assert (tmp_path / "new" / "llama" / "generation_config.json").exists()
    for family, tied in (("gpt2", "lm_head.weight"), ("bert", "cls.predictions.decoder.weight")):
        with safe_open(tmp_path / "new" / family / "model.safetensors", "pt") as file:
            assert tied not in file.keys()  # noqa: SIM118  # not a dict


def test_plain_saving_works_afterwards_and_weights_may_be_in_several_files(tmp_path: Path) -> None:
    small, example = halved("llama", "mlp")
    with pytest.raises(pp.PruneError, match="has the sizes before pruning"):
        small.save_pretrained(tmp_path / "plain")
    assert not list(tmp_path.iterdir())
    save_pretrained(small, tmp_path / "ours", example, processor=Words(), max_shard_size="20KB")
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    assert (tmp_path / "ours" / "tokenizer.json").exists()
    assert (
        small.config.intermediate_size == small.model.layers[0].self_attn.config.intermediate_size
    )
    small.save_pretrained(tmp_path / "plain")
    for folder in ("ours", "plain"):
        loaded = transformers.AutoModel.from_pretrained(tmp_path / folder)
        assert loaded.layers[1].mlp.gate_proj.out_features == 24


def test_heads_that_no_config_can_tell_are_refused(tmp_path: Path) -> None:
    small, example = halved("gpt2", "heads")
    with pytest.raises(pp.PruneError) as caught:
        save_pretrained(small, tmp_path / "small", example)
    message = str(caught.value)
    assert message.startswith("save_pretrained: n_embd is one number for transformer.wte.weight")
    assert 'keep=["transformer.h.*.attn.c_attn"]' in message and "polarprune.save" in message
    assert not list(tmp_path.iterdir())


def test_widths_that_differ_from_block_to_block_are_refused(tmp_path: Path) -> None:
    model, graph, example = traced("llama")
    plan = {f"model.layers.{n}.mlp.gate_proj": list(range(8 + n)) for n in range(2)}
    with pytest.raises(pp.PruneError, match=r"one number for all blocks.*uniform=True"):
        save_pretrained(pp.shrink(model, graph, plan), tmp_path / "small", example)
    assert not list(tmp_path.iterdir())


def test_constants_that_were_converted_with_the_model_count_as_rounding(tmp_path: Path) -> None:
    model, graph, example = traced("llama")
    plan = {f"model.layers.{n}.mlp.gate_proj": list(range(8)) for n in range(2)}
    small: Any = pp.shrink(model, graph, plan).half()
    assert small.model.rotary_emb.inv_freq.dtype == torch.float16
    save_pretrained(small, tmp_path / "small", example)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "small")
    assert loaded.dtype == torch.float16 and loaded.model.rotary_emb.inv_freq.dtype != loaded.dtype


def test_a_class_that_reads_the_sizes_of_every_layer_gets_them(tmp_path: Path) -> None:
    model, x = Layered(LayeredConfig()), torch.randn(4, 6)
    plan = {f"layers.{n}.0": list(range(n + 3)) for n in range(2)}
    small: Any = pp.shrink(model, pp.trace(model, x), plan)
    save_pretrained(small, tmp_path / "small", x)
    written = read(tmp_path / "small" / "config.json")
    assert written["inner"] == 10
    assert written["per_layer_config"] == {"0": {"inner": 3}, "1": {"inner": 4}}
    small.save_pretrained(tmp_path / "again")
    for folder in ("small", "again"):
        torch.testing.assert_close(Layered.from_pretrained(tmp_path / folder)(x), small(x))


def test_a_scale_that_follows_from_the_hidden_size_is_refused(tmp_path: Path) -> None:
    small, example = halved("gemma", "stream")
    with pytest.raises(pp.PruneError, match=r"hidden_size.* differ by .*tokens.*embed_scale"):
        save_pretrained(small, tmp_path / "small", example)
    assert not list(tmp_path.iterdir())


def change_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 1.001
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def damage_the_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def fill_the_disk(folder: Path) -> None:
    raise OSError(28, "No space left on device")


def test_a_loaded_model_that_fails_is_refused_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, example = halved("llama", "mlp")
    real = polarprune.integrations.pretrained_folder._loaded

    def loaded(method: str) -> Any:
        def fails(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("sizes do not fit")

        def load(*args: Any) -> nn.Module:
            model = real(*args)
            monkeypatch.setattr(model, method, fails)
            return model

        return load

    for method, message in (
        ("forward", "does not run on the example: RuntimeError: sizes do not fit"),
        ("generate", "does not generate with use_cache=False: RuntimeError: sizes do not fit"),
    ):
        monkeypatch.setattr(polarprune.integrations.pretrained_folder, "_loaded", loaded(method))
        with pytest.raises(pp.PruneError, match=message):
            save_pretrained(small, tmp_path / "small", example)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (change_a_weight, r"differs by .* on the example; at most 1e-05"),
        (lose_a_weight, r"finds \{'missing_keys': \['model.norm.weight'\]\}"),
        (damage_the_config, r"LlamaForCausalLM.from_pretrained fails"),
        (fill_the_disk, r"cannot be written: .*No space left"),
    ],
)
def test_a_folder_that_is_not_equal_never_gets_its_name(
    tmp_path: Path, harm: Any, message: str
) -> None:
    small, example = halved("llama", "mlp")
    with pytest.raises(pp.PruneError, match=message):
        save_pretrained(small, tmp_path / "small", example, processor=Words(harm))
    assert not list(tmp_path.iterdir())
    assert small.config.intermediate_size == 48


def test_wrong_calls_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    small, example = halved("llama", "mlp")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(pp.PruneError, match=r"full exists; give the name of a new or empty folder"):
        save_pretrained(small, tmp_path / "full", example)
    with pytest.raises(pp.PruneError, match="is not a model of transformers; give the part"):
        save_pretrained(digits_resnet(4), tmp_path / "small", torch.zeros(2, 1, 8, 8))
    gated = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    pp.Pruner(gated, example, macs=0.5, steps=5)
    with pytest.raises(pp.PruneError, match=r"has gates; give what pruner.export\(\) returns"):
        save_pretrained(gated, tmp_path / "small", example)
    assert [file.name for file in tmp_path.iterdir()] == ["full"]
