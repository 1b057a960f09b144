"""Groups at the same position of repeated blocks are found, and can keep equal widths."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.analysis.trace import survey
from polarprune.channels.graph import Graph
from tests.helpers.attention_nets import DIM
from tests.helpers.nets import cbr, digits_resnet, head
from tests.helpers.repeated_nets import Feed, Tokens, feeds, made, resnet

PICTURES, TOKENS = (2, 3, 8, 8), (2, 7, 6)


def found(model: nn.Module, shape: tuple[int, ...], uniform: Any = True, **more: Any) -> Graph:
    return survey(model, torch.randn(shape), uniform=uniform, **more)


class Attributes(nn.Module):
    """A network with blocks in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.head = Feed(), Feed(), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block2(self.block1(x)).mean(1))


class Body(nn.Module):
    """A block whose layers have numbers, too."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Linear(DIM, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, DIM)]
        self.body = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Other(Feed):
    """Another class."""


# --- positions ------------------------------------------------------------------------------------


def test_sizes_tell_stages_apart_and_streams_are_in_no_family() -> None:
    assert found(resnet(), PICTURES).families == {
        "*.*.conv1": ("1.0.conv1", "1.1.conv1"),
        "*.*.conv1#2": ("2.0.conv1", "2.1.conv1", "2.2.conv1"),  # the first has a projection
    }


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("grouped queries", ["blocks.*.attention.q", "blocks.*.mlp.0"]),
        ("vision transformer", ["blocks.*.attention.qkv", "blocks.*.mlp.0"]),
        ("bottlenecks", ["*.*.conv1", "*.*.conv2"]),
    ],
)
def test_every_position_in_a_block_is_a_family(name: str, positions: list[str]) -> None:
    families = survey(*made(name), uniform=True).families
    assert list(families) == positions
    assert all(len(names) == 3 for names in families.values())


def test_other_sizes_and_other_classes_are_other_families() -> None:
    graph = found(feeds(Feed(), Feed(width=12), Feed(width=12), Feed(), Other(), Other()), TOKENS)
    assert graph.families == {
        "blocks.*.up": ("blocks.0.up", "blocks.3.up"),
        "blocks.*.up#2": ("blocks.1.up", "blocks.2.up"),
        "blocks.*.up#3": ("blocks.4.up", "blocks.5.up"),
    }


def test_layers_in_a_block_are_positions_and_no_blocks() -> None:
    graph = found(feeds(Body(), Body()), TOKENS)
    assert list(graph.families) == ["blocks.*.body.0", "blocks.*.body.2"]


def test_names_with_numbers_in_a_container_are_those_of_blocks() -> None:
    layers = OrderedDict((f"layer_{number}", Feed()) for number in range(2))
    expected = {"blocks.layer_*.up": ("blocks.layer_0.up", "blocks.layer_1.up")}
    assert found(Tokens(nn.Sequential(layers)), TOKENS).families == expected


def test_streams_of_several_stages_are_not_joined() -> None:
    """They lie at the same position of the stages, but each in several blocks."""
    stages = (nn.Sequential(Feed(skips=False), Feed(), Feed()) for _ in range(2))
    graph = found(Tokens(nn.ModuleList(stages)), TOKENS)
    assert {"blocks.0.0.down", "blocks.1.0.down"} <= graph.prunable.keys()
    assert {key: len(names) for key, names in graph.families.items()} == {"blocks.*.*.up": 6}


def test_patterns_join_what_lies_in_attributes() -> None:
    shape = (2, 7, DIM)
    with pytest.raises(pp.PruneError, match="uniform=True: no two prunable groups are at the same"):
        found(Attributes(), shape)
    with pytest.raises(
        pp.PruneError, match=r"uniform: 'block1\.\*' matches no two prunable groups"
    ):
        found(Attributes(), shape, ("block*.up", "block1.*"))
    joined = ("block1.up", "block2.up")
    assert found(Attributes(), shape, ("block*.up",)).families == {"block*.up": joined}


def test_the_first_pattern_that_matches_counts() -> None:
    graph = found(resnet(), PICTURES, ("2.[01].conv1", "*conv1"))
    assert graph.families == {
        "2.[01].conv1": ("2.0.conv1", "2.1.conv1"),
        "*conv1": ("1.0.conv1", "1.1.conv1"),
    }


def test_a_chain_of_layers_repeats_no_block() -> None:
    chain = nn.Sequential(cbr(3, 8), cbr(8, 8), cbr(8, 8), head(8, 10))
    with pytest.raises(pp.PruneError, match=r"uniform=\['block\*.conv1'\]"):
        found(chain, PICTURES)


# --- minimums -------------------------------------------------------------------------------------


def test_a_group_that_is_frozen_keeps_its_family_whole_with_the_reason() -> None:
    graph = survey(*made("grouped queries"), uniform=True, keep="blocks.1.mlp.0")
    assert [graph.groups[f"blocks.{k}.mlp.0"].minimum for k in (0, 2)] == [40, 40]
    assert graph.groups["blocks.0.attention.q"].minimum == 0  # another position
    said = "blocks.1.mlp.0 is frozen: kept by keep='blocks.1.mlp.0'"
    assert sum(said in note for note in graph.notes) == 2
    assert "blocks.0.mlp.0 (and 1 more): keeps all 40 channels, because widths" in str(graph)


def test_a_frozen_group_of_another_size_lets_the_others_be() -> None:
    graph = found(feeds(Feed(), Feed(), Feed(width=12)), TOKENS, keep="blocks.2.up")
    assert [graph.groups[f"blocks.{k}.up"].minimum for k in (0, 1)] == [0, 0]


def test_one_group_that_must_keep_a_channel_makes_all_keep_one() -> None:
    for uniform, expected in ((False, [0, 1, 0]), (True, [1, 1, 1])):
        graph = found(feeds(Feed(), Feed(skips=False), Feed()), TOKENS, uniform)
        assert [graph.groups[f"blocks.{k}.up"].minimum for k in range(3)] == expected


def test_a_layer_behind_a_family_keeps_a_channel_unless_it_closes_in_all_blocks() -> None:
    model, images = made("bottlenecks")
    for uniform, least in ((False, 0), (True, 0), (("*.conv1",), 1)):
        graph = survey(model, images, uniform=uniform)
        assert {graph.groups[f"1.{k}.conv2"].minimum for k in range(3)} == {least}, uniform


@pytest.mark.parametrize("uniform", [True, ("*.conv1",), ("*.conv2",), ("*.conv1", "1.[01].conv2")])
def test_what_closes_because_nothing_reads_it_closes_in_the_whole_family(uniform: Any) -> None:
    model, images = made("bottlenecks")
    graph = survey(model, images, uniform=uniform)
    closed = 0
    for seed in range(60):
        kept_units = uniform_plan(graph, seed)
        settled = graph.without_unread(kept_units)
        closed += int((kept_units & ~settled).any())
        for names in graph.families.values():
            assert len({int(settled[graph.groups[name].units].sum()) for name in names}) == 1
    assert closed or uniform != True  # noqa: E712  (one of the patterns is a tuple)


def uniform_plan(graph: Graph, seed: int) -> Tensor:
    """Return units at random; every second group or family closes as far as it may."""
    generator = torch.Generator().manual_seed(seed)
    kept_units = torch.zeros(graph.units, dtype=torch.bool)
    family = {name: key for key, names in graph.families.items() for name in names}
    drawn: dict[str, int] = {}
    for name, group in graph.prunable.items():
        closes = bool(torch.rand((), generator=generator) < 0.5)
        width = int(torch.randint(group.minimum, group.size + 1, (), generator=generator))
        width = drawn.setdefault(family.get(name, name), group.minimum if closes else width)
        order = torch.randperm(group.size, generator=generator)
        kept_units[group.offset + order[:width]] = True
    return kept_units


def test_a_table_shows_the_families() -> None:
    shown = str(found(resnet(), PICTURES))
    assert "uniform: *.*.conv1#2: 3 groups of 32 keep equally many" in shown


def test_without_the_option_a_graph_has_no_families() -> None:
    assert pp.trace(digits_resnet(8), torch.zeros(2, 1, 8, 8)).families == {}
