"""Hugging Face: settings with which a pruned model can be written as a folder."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import polarprune as pp
from benchmarks.measure.load_folders import load_elsewhere, store_answers
from benchmarks.measure.transformers_folders import AUTO, pruned_within, unwrapped
from benchmarks.measure.transformers_models import TRANSFORMERS, make_transformers
from polarprune.analysis.trace import survey
from polarprune.integrations.transformers import PruningTrainer, folder_settings, save_pretrained
from tests.helpers.sized_nets import EvenSizes, perceptrons

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # advice about padding
    pytest.mark.usefixtures("quick_collections"),
]

X = torch.randn(4, 6)
WORDS = {"input_ids": torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))}


def llama(device: str = "cpu", **sizes: Any) -> Any:
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 50,
            "hidden_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 12,
            "num_key_value_heads": 6,
            "intermediate_size": 128,
            "pad_token_id": 0,
            **sizes,
        }
    )
    with torch.device(device):
        return transformers.LlamaForCausalLM(config)


def layers(groups: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in groups}


def shallow(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a config with two blocks in each stack."""
    stacks = {"num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"}
    found = {k: shallow(v) if isinstance(v, dict) else v for k, v in options.items()}
    return found | dict.fromkeys((stacks | {"n_layer", "n_layers"}) & found.keys(), 2)


@pytest.mark.parametrize("family", AUTO)
def test_random_plans_within_the_settings_are_folders(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, config, options, inputs = TRANSFORMERS[family]
    monkeypatch.setitem(TRANSFORMERS, family, (kind, config, shallow(options), inputs))
    random.seed(0)
    torch.manual_seed(0)
    model, example = make_transformers(family)
    settings = folder_settings(model.eval(), example, norms=True)
    small = pruned_within(model, example, settings)
    assert sum(map(torch.Tensor.numel, small.parameters())) < sum(
        map(torch.Tensor.numel, model.parameters())
    )
    save_pretrained(unwrapped(small), tmp_path / "small", example)


def test_a_process_without_polarprune_loads_the_result_of_a_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama()
    settings = folder_settings(model, WORDS, norms=True)
    pruner = pp.Pruner(model, WORDS, params=0.7, steps=12, **settings)
    optimizer = torch.optim.AdamW(pruner.param_groups(lr=1e-3, no_decay=True))
    pruner.attach(optimizer)
    for _ in range(12):
        optimizer.zero_grad()
        model(**WORDS, labels=WORDS["input_ids"]).loss.backward()
        optimizer.step()
    small: Any = pruner.export()
    save_pretrained(small, tmp_path / "small", WORDS)
    store_answers(small, WORDS, "AutoModelForCausalLM", tmp_path / "small.pt")
    (row,) = load_elsewhere(tmp_path).values()
    assert row["difference"] <= 1e-6 and row["same_text"]


def test_heads_that_the_config_refuses_are_frozen_and_the_reason_is_shown() -> None:
    model = llama()
    settings = folder_settings(model, WORDS)
    assert layers(settings["frozen"]) == {"q_proj"} and settings["uniform"] is True
    graph = survey(model, WORDS, frozen=settings["frozen"])
    group = graph.groups["model.layers.0.self_attn.q_proj"]
    assert group.frozen and "LlamaConfig refuses" in group.reason
    assert "multiple of the number of attention heads (10)" in group.reason
    assert not group.reason.endswith(".") and "polarprune.save" in group.reason


def test_a_frozen_group_leaves_the_channels_that_its_layers_read() -> None:
    frozen = folder_settings(llama(), WORDS)["frozen"]
    graph = survey(llama(), WORDS, norms=True, frozen=frozen)
    assert layers(graph.prunable) == {"embed_tokens", "gate_proj"}


def test_a_larger_multiple_is_chosen_where_the_config_refuses_widths_of_the_stream() -> None:
    settings = folder_settings(llama(), WORDS, norms=True)  # 12 heads divide multiples of 24
    assert settings["multiple_of"] == 24
    kept = folder_settings(llama(), WORDS, norms=True, multiple_of=8)
    assert kept["multiple_of"] == 8 and "embed_tokens" in layers(kept["frozen"])


def test_weights_are_not_needed_and_the_model_is_not_changed() -> None:
    model = llama("meta")
    words = {"input_ids": WORDS["input_ids"].to("meta")}
    before = model.config.to_dict()
    assert folder_settings(model, words, norms=True) == folder_settings(llama(), WORDS, norms=True)
    assert model.config.to_dict() == before


def test_encoder_and_decoder_of_t5_get_one_width() -> None:
    model, example = make_transformers("t5")
    uniform = folder_settings(model.eval(), example)["uniform"]
    graph = survey(model, example, uniform=tuple(uniform), min_channels=1)
    assert sorted(map(len, graph.families.values())) == [3, 8]
    assert "decoder" in str(graph.families) and "encoder" in str(graph.families)


def test_widths_that_lists_in_a_config_tell_are_free() -> None:
    settings = folder_settings(perceptrons(), X)
    assert settings == {"min_channels": 1, "uniform": True}
    assert "uniform" not in folder_settings(perceptrons(depth=1), X)


def test_odd_widths_that_a_config_refuses_need_a_multiple() -> None:
    settings = folder_settings(perceptrons(EvenSizes), X, multiple_of=2)
    assert "frozen" not in settings and settings["multiple_of"] == 2
    assert layers(folder_settings(perceptrons(EvenSizes), X)["frozen"]) == {"0"}


def test_settings_of_the_user_are_returned_with_the_others() -> None:
    settings = folder_settings(perceptrons(), X, keep="stages.*", min_channels=3)
    assert settings["keep"] == ["stages.*"] and settings["min_channels"] == 3


def test_a_model_of_which_nothing_can_be_told_is_refused() -> None:
    model = perceptrons(scaled=0.1, depth=0, stages=[8])
    with pytest.raises(
        pp.PruneError, match="folder_settings: no config of Perceptrons can express"
    ):
        folder_settings(model, X)
    with pytest.raises(pp.PruneError, match="no module in it has a config"):
        folder_settings(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), X)


def test_the_trainer_finds_the_settings(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        str(tmp_path / "run"),
        num_train_epochs=4,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"input_ids": row, "labels": row} for row in WORDS["input_ids"].repeat(3, 1)]
    trainer = PruningTrainer(
        llama(), args, train_dataset=data, pruning={"params": 0.7, "folder": True}
    )
    trainer.train()
    assert trainer.pruner.graph.groups["model.layers.1.self_attn.q_proj"].frozen
    save_pretrained(trainer.export(), tmp_path / "small", WORDS)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert loaded.config.intermediate_size < 128
