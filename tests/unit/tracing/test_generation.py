"""A cache in the output: what counts as one, and how generation with it is traced and compared."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.surgery.precision import check_rounded
from polarprune.surgery.proof import ONE_MORE_TOKEN, prove_equal
from polarprune.tracing.generation import further_call, is_cache, split
from tests.helpers.decoder import Cache, Decoder, KeysAndValues
from tests.helpers.training import sgd

IDS = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
GENERATES = "the cache that the model returns is not compared; generation with it is"


def heads(graph: pp.Graph) -> bool:
    return "attention.q" in graph.prunable


def half(model: nn.Module, graph: Any) -> nn.Module:
    plan = {name: list(range(0, group.size, 2)) for name, group in graph.prunable.items()}
    return pp.shrink(model, graph, plan)


# --- what a cache is ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["class", "class in a tuple", "tuples"])
def test_heads_are_prunable_although_a_cache_is_returned(form: str) -> None:
    graph = pp.trace(Decoder(form), {"input_ids": IDS})
    assert heads(graph) and GENERATES in graph.notes
    plain = pp.trace(Decoder("none"), {"input_ids": IDS})
    assert graph.prunable.keys() == plain.prunable.keys()
    assert graph.cost.original() == plain.cost.original()  # the further token costs nothing


@pytest.mark.parametrize("form", ["another name", "tuples in a tuple", "unread", "two caches"])
def test_what_may_be_an_output_of_its_own_stays_one(form: str) -> None:
    """A dict with other keys, a bare tuple, a cache that the forward does not take or read."""
    graph = pp.trace(Decoder(form), {"input_ids": IDS})
    assert not heads(graph) and GENERATES not in graph.notes
    assert graph.groups["attention.q"].reason.fact == "part of the model's output"


def test_a_cache_with_which_the_model_does_not_run_counts_as_an_output_and_a_note_says_so() -> None:
    graph = pp.trace(Decoder("unread"), {"input_ids": IDS})
    (note,) = [note for note in graph.notes if "cache" in note]
    assert "counts as an output" in note and "use_cache=False" in note


def test_a_class_of_another_package_is_no_cache() -> None:
    held = KeysAndValues()
    assert is_cache(Cache(held)) and not is_cache(held)
    found = split({"logits": IDS, "past_key_values": "none"})
    assert found.cache is None and len(found.read) == 1


def test_inputs_without_tokens_are_not_continued() -> None:
    none = further_call(nn.Linear(2, 2), torch.zeros(1, 2))
    assert none.refusal.startswith("its inputs have no tokens") and not none.arguments
    given = {"input_ids": IDS, "past_key_values": Cache(KeysAndValues())}
    none = further_call(Decoder("class"), given)  # it goes on already
    assert "holds a cache itself" in none.refusal and not none.arguments


def test_arguments_that_only_share_a_name_with_those_of_transformers_are_no_tokens() -> None:
    class Own(nn.Linear):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return super().forward(input_ids * position_ids)

    example = {"input_ids": torch.randn(2, 4), "position_ids": torch.tensor(2.0)}
    none = further_call(Own(4, 2), example)
    assert "cannot be made from the example (IndexError: " in none.refusal and not none.arguments
    assert pp.trace(Own(4, 2), example).cost.original()["macs"] == 16


def test_a_note_says_why_the_arguments_of_one_more_token_cannot_be_made() -> None:
    positions = torch.tensor(2)  # without an axis, of which the last element could be taken
    graph = pp.trace(Decoder("class"), {"input_ids": IDS, "position_ids": positions})
    (note,) = [note for note in graph.notes if "cache" in note]
    assert "one more token cannot be made from the example (IndexError: " in note
    assert "have no tokens" not in note and "use_cache=False" in note


# --- the arguments of one more token --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["two axes", "added", "chosen"])
def test_one_more_token_is_what_a_longer_input_gives(kind: str) -> None:
    """Padding on the left, with positions: compare with the last row of a run on all tokens."""
    model, longer = Decoder("class").eval(), torch.cat([IDS, IDS[:, :1]], 1)
    padding = torch.ones_like(longer)
    padding[0, :2] = 0
    positions = (padding.cumsum(1) - 1).clamp_min(0)
    masks = {"two axes": padding, "chosen": _chosen(padding), "added": _added(_chosen(padding))}
    mask = masks[kind]
    short = mask[:, :5] if kind == "two axes" else mask[..., :5, :5]
    given = {"input_ids": IDS, "attention_mask": short, "position_ids": positions[:, :5]}
    with torch.no_grad():
        cache = model(**given)["past_key_values"]
        more = model(**further_call(model, given).arguments, past_key_values=cache)["logits"]
        whole = model(longer, attention_mask=mask, position_ids=positions)["logits"]
    assert torch.allclose(more[:, 0], whole[:, -1], atol=1e-6)
    assert not torch.allclose(more[0, 0], more[1, 0], atol=1e-3)


def _chosen(padding: Tensor) -> Tensor:
    size = padding.shape[1]
    return torch.ones(size, size).tril().bool() & padding.bool()[:, None, None]


def _added(chosen: Tensor) -> Tensor:
    return torch.zeros(chosen.shape).masked_fill(~chosen, -1e9)


# --- generation is followed and compared ----------------------------------------------------------


def test_a_width_that_only_generation_reads_is_followed() -> None:
    """With a cache, the code counts heads: the integer of the module follows, or nothing is cut."""
    model = Decoder("class", counts_heads=True)
    graph = pp.trace(model, {"input_ids": IDS})
    assert graph.size_attributes["attention"].keys() == {"heads"}
    small = half(model, graph)
    given = further_call(small, {"input_ids": IDS}).arguments
    with torch.no_grad():
        cache = small(IDS)["past_key_values"]
        assert small(**given, past_key_values=cache)["logits"].shape == (2, 1, 9)


def test_a_number_of_heads_in_the_code_for_generation_freezes_the_heads() -> None:
    graph = pp.trace(Decoder("class", hard_coded=True), {"input_ids": IDS})
    assert not heads(graph) and "mlp.0" in graph.prunable
    assert "does not adapt to fewer channels" in graph.groups["attention.q"].reason


def test_the_proof_compares_generation() -> None:
    model = Decoder("class")
    wrong = copy.deepcopy(model)
    wrong.attention.scale_of_cache = 1.01
    given = {"input_ids": IDS}
    found = prove_equal(model, copy.deepcopy(model), given, 1e-6)
    assert found.differences[ONE_MORE_TOKEN] == 0 and not found.skipped
    with pytest.raises(pp.PruneError, match="one more token with the cache"):
        prove_equal(model, wrong, given, 1e-6)


def test_export_and_compact_compare_generation() -> None:
    model = Decoder("class")
    pruner = pp.Pruner(model, {"input_ids": IDS}, macs=0.6, steps=6)
    optimizer = sgd(pruner, lr=0.01)
    pruner.attach(optimizer)
    for step in range(6):
        optimizer.zero_grad()
        model(IDS)["logits"].square().mean().backward()
        optimizer.step()
        if step == 4:
            pruner.compact()
    pruner.export()
    assert pruner.proof[ONE_MORE_TOKEN] <= 1e-5
    assert GENERATES in str(pruner.report())


def test_code_that_asks_whether_there_is_a_cache_keeps_one_head() -> None:
    """Without heads, `cache.keys.numel() == 0` would tell that nothing was cached."""
    graph = pp.trace(Decoder("class", asks=True), {"input_ids": IDS})
    assert graph.prunable["attention.q"].minimum == 1
    assert any("asks whether there is one" in note for note in graph.notes)


# --- low precision --------------------------------------------------------------------------------


TRAINED = """
import torch, polarprune as pp
from tests.helpers.decoder import Decoder
ids = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
for kind in (torch.bfloat16, torch.float16):
    model = Decoder("class").to(kind)
    pruner = pp.Pruner(model, {"input_ids": ids}, macs=0.6, steps=4)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.001))
    pruner.attach(optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        model(ids)["logits"].float().square().mean().backward()
        optimizer.step()
    small = pruner.export()
    assert {x.dtype for x in small.parameters()} == {kind}
    assert all("in float32" in name for name in pruner.proof), pruner.proof
    assert max(pruner.proof.values()) <= 1e-5 and len(pruner.proof) >= 5
"""


def test_weights_of_low_precision_are_proved_in_float32() -> None:
    """Run in a separate process, because not every CPU multiplies bfloat16 matrices by default."""
    given = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", TRAINED]
    run = subprocess.run(command, env=given, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_exported_weights_are_the_rounded_ones_that_were_compared(kind: torch.dtype) -> None:
    exact = Decoder("class")
    small = copy.deepcopy(exact).to(kind)
    check_rounded(small, exact)
    with torch.no_grad():
        small.head.weight[0, 0] += 0.02
    with pytest.raises(pp.PruneError, match=r"head\.weight of the pruned model is not the rounded"):
        check_rounded(small, exact)
