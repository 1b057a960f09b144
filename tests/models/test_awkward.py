"""Models that are written in awkward ways, each cut and compared by numbers.

A random part of every open group is silenced in a copy (`masked`) and cut out of another
(`small`): both must compute the same, at the cost that was claimed. What has to be open and what
has to stay whole is written down for every model, so that freezing is no way to pass.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import polarprune as pp
from polarprune.surgery.proof import difference, outputs
from tests.helpers.exact import VARIANTS, pruner_of, set_gates
from tests.helpers.nets import cbr, head, randomise
from tests.helpers.random_cuts import OUTPUT, Inputs, cut, cut_at_random, images, some_plan, trains

INPUT = "reads channels that come from no known layer"


# --------------------------------------------------------------------------------------------------
# weights with several uses


class Tied(nn.Module):
    """A language model with one matrix for input and output embeddings."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


@pytest.mark.parametrize("norm", [True, False])
def test_embedding_and_head_share_a_weight(norm: bool) -> None:
    tokens = torch.randint(11, (2, 5))
    if norm:
        whole = {"embed": OUTPUT, "down": "layer norm mixes channels"}
        this = cut(Tied(norm), (tokens,), {"up": 16}, whole)
    else:
        this = cut(Tied(norm), (tokens,), {"up": 16, "down": 8}, {"embed": OUTPUT})
    assert this.small.head.weight is this.small.embed.weight
    assert this.small.embed.weight.shape[0] == 11
    trains(this.small, (tokens,))


class Twice(nn.Module):
    """One block, called at two places, known by two names, and one of its layers by a third."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.tail = cbr(3, 8), head(8)
        self.block = nn.Sequential(*cbr(8, 12), cbr(12, 8))
        self.again = self.block
        self.last = self.block[3][0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.stem(x))
        return self.tail(self.again(F.max_pool2d(x, 2)) + self.block[0](x).mean())


def test_same_module_is_used_twice_under_two_names() -> None:
    """The mean over all channels of an extra call of one layer holds that layer's channels."""
    whole = {"block.0": "mean mixes channels", "tail.2": OUTPUT}
    this = cut(Twice(), (images(),), {"stem.0": 8}, whole)
    assert this.small.again is this.small.block
    assert this.small.last is this.small.block[3][0]
    assert this.small.last.out_channels == len(this.plan["stem.0"])
    trains(this.small, (images(),))


def test_one_mlp_serves_two_streams() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 6), nn.Linear(5, 6)
            self.shared = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7))
            self.score = nn.Linear(7, 2)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            a, b = self.shared(self.left(a)), self.shared(self.right(b))
            return self.score(a * b), (a - b).square().sum(0)

    inputs = (images(3, 4), images(3, 5))
    opened = {"left": 6, "shared.0": 10}
    cut(Siamese(), inputs, opened, {"shared.2": OUTPUT, "score": OUTPUT})


# --------------------------------------------------------------------------------------------------
# parameters and buffers outside of layers


class Zeros(nn.Module):
    """One tensor of zeros is added to two layers, as T5 does with its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.tail = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        zeros = x.new_zeros(x.shape[1], 1, 1)
        return self.tail(self.second((x + zeros).relu()).relu() + zeros)


def test_layers_that_meet_the_same_zeros_shrink_alike() -> None:
    this = cut(Zeros(), (images(),), {"first": 8}, {"tail": OUTPUT})
    assert this.small.first.out_channels == this.small.second.out_channels


class Tokens(nn.Module):
    """A class token, positions, a layer scale and a bare scale, none of them in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 12, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, 12))
        self.place = nn.Parameter(torch.randn(1, 5, 12))
        self.gamma = nn.Parameter(torch.randn(12))
        self.scale = nn.Parameter(torch.randn(12))
        self.heat = nn.Parameter(torch.tensor(0.7))
        self.up, self.down, self.head = nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.place
        x = x + self.gamma * self.down(F.gelu(self.up(x)))
        return self.head(x[:, 0] * self.scale) / self.heat


def test_parameters_outside_of_layers_follow_their_channels() -> None:
    this = cut(Tokens(), (images(),), {"patch": 12, "up": 20}, {"head": OUTPUT})
    width = len(this.plan["patch"])
    shapes = {name: tuple(p.shape) for name, p in this.small.named_parameters(recurse=False)}
    expected = {"cls": (1, 1, width), "place": (1, 5, width), "gamma": (width,)}
    assert shapes == {**expected, "scale": (width,), "heat": ()}
    trains(this.small, (images(),))


class Lists(nn.Module):
    """Weights in plain lists and dicts of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(o, i) for i, o in ((6, 10), (10, 8), (8, 4)))
        self.shifts = nn.ParameterDict({f"b{o}": torch.randn(o) for o in (10, 8, 4)})
        self.names = ["b10", "b8", "b4"]

    def forward(self, x: Tensor) -> Tensor:
        for weight, name in zip(self.matrices, self.names, strict=True):
            x = torch.tanh(F.linear(x, weight, self.shifts[name]))
        return x


class ByWidth(Lists):
    """The name of a parameter is computed from the width of another."""

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.matrices:
            x = torch.tanh(F.linear(x, weight, self.shifts[f"b{len(weight)}"]))
        return x


def test_parameters_in_lists_and_dicts_follow_their_channels() -> None:
    opened = {"matrices": 10, "matrices#2": 8}
    this = cut(Lists(), (images(3, 6),), opened, {"matrices#3": OUTPUT})
    first, second = (len(kept) for kept in this.plan.values())
    shapes = [tuple(weight.shape) for weight in this.small.matrices]
    assert shapes == [(first, 6), (second, first), (4, second)]
    assert [len(this.small.shifts[name]) for name in this.small.names] == [first, second, 4]
    trains(this.small, (images(3, 6),))


def test_parameters_that_are_looked_up_by_their_width_are_found_again() -> None:
    """`self.shifts[f"b{len(weight)}"]` would find nothing once the weight is cut."""
    opened = {"matrices": 10, "matrices#2": 8}
    this = cut(ByWidth(), (images(3, 6),), opened, {"matrices#3": OUTPUT})
    assert list(this.graph.rewritten) == [""]
    trains(this.small, (images(3, 6),))


class Normalise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("std", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean[:, None, None]) / self.std.view(1, -1, 1, 1)


class InPlace(nn.Module):
    """An average over the batches of a training, as centre losses and quantisers keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
        return x - self.average[:, None, None]


class Replaced(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = torch.lerp(self.average, x.detach().mean((0, 2, 3)), 0.1)
        return x - self.average[:, None, None]


@pytest.mark.parametrize("middle", [Normalise, InPlace, Replaced])
def test_buffers_follow_their_channels(middle: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(cbr(3, 8), middle(), cbr(8, 6), head(6))
    x = images()
    this = cut(model, (x,), {"0.0": 8, "2.0": 6}, {"3.2": OUTPUT})
    for net in (this.masked.train(), this.small.train()):
        net(x), net(x)  # averages move
    kept = this.plan["0.0"]
    before, after = (dict(net[1].named_buffers()) for net in (this.masked, this.small))
    assert before.keys() == after.keys() and before
    for name, buffer in after.items():
        assert torch.allclose(buffer, before[name][kept], rtol=1e-10, atol=0)


# --------------------------------------------------------------------------------------------------
# ways to run


class Residual(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.drop = cbr(8, 12), nn.Conv2d(12, 8, 3, padding=1), DropPath(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.b(self.a(x)))


class DropPath(nn.Module):
    """Stochastic depth: a branch is left out for some samples, in train mode."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        return x * torch.rand(shape, dtype=x.dtype).ge(self.rate) / (1 - self.rate)


class Bernoulli(DropPath):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(1 - self.rate)
        return x * keep.div_(1 - self.rate)


class Stage(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.tail = cbr(3, 8), nn.ModuleList(blocks), head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


STAGE = {"stem.0": 8, "blocks.0.a.0": 12, "blocks.1.a.0": 12}


def test_checkpointed_blocks_are_cut_like_others() -> None:
    class Checkpointed(Stage):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.tail(x)

    this = cut(Checkpointed(Residual(), Residual()), (images(),), STAGE, {"tail.2": OUTPUT})
    trains(this.small, (images(),))


@pytest.mark.parametrize("drop", [DropPath, Bernoulli])
def test_stochastic_depth_draws_the_same_samples(drop: type[DropPath]) -> None:
    blocks = Residual(), Residual()
    for block in blocks:
        block.drop = drop(0.5)
    x = images(6, 3, 8, 8)
    this = cut(Stage(*blocks), (x,), STAGE, {"tail.2": OUTPUT})
    one, other = (outputs(this.small, (x,), training=mode)[0] for mode in (True, False))
    assert not torch.allclose(one, other)  # samples were left out
    this.small.train()
    assert not torch.equal(this.small(x), this.small(x))


def test_dropout_of_every_kind_is_kept_and_compared() -> None:
    model = nn.Sequential(
        cbr(3, 8),
        nn.Dropout2d(0.3),
        cbr(8, 6),
        nn.AlphaDropout(0.2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(24, 10),
        nn.FeatureAlphaDropout(0.2),
        nn.ReLU(),
        nn.Linear(10, 5),
    )
    this = cut(model, (images(),), {"0.0": 8, "2.0": 6, "7": 10}, {"10": OUTPUT})
    kinds = [type(module) for module in this.small if "Dropout" in type(module).__name__]
    assert kinds == [nn.Dropout2d, nn.AlphaDropout, nn.Dropout, nn.FeatureAlphaDropout]
    this.small.train()
    x = images()
    assert not torch.equal(this.small(x), this.small(x))


class Ways(nn.Module):
    """A model in which an argument decides which of two branches runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = cbr(3, 8)
        self.a, self.b = nn.Sequential(cbr(8, 10), head(10)), nn.Sequential(cbr(8, 12), head(12))

    def forward(self, x: Tensor, mode: str = "a") -> Tensor:
        x = self.stem(x)
        return self.a(x) if mode == "a" else self.b(x)


@pytest.mark.parametrize(("mode", "size"), [("a", 10), ("b", 12)])
def test_only_the_way_that_was_taken_is_cut(mode: str, size: int) -> None:
    inputs = {"x": images(), "mode": mode}
    opened, other = {"stem.0": 8, f"{mode}.0.0": size}, "b" if mode == "a" else "a"
    this = cut(Ways(), inputs, opened, {f"{mode}.1.2": OUTPUT})
    before, after = this.masked.get_submodule(other), this.small.get_submodule(other)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before.state_dict().values(), after.state_dict().values(), strict=True)
    )


def test_half_of_the_weights_want_no_gradient() -> None:
    model = Stage(Residual(), Residual())
    for part in (model.stem, model.blocks[0]):
        part.requires_grad_(False)
    this = cut(model, (images(),), STAGE, {"tail.2": OUTPUT})
    wants = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: p.requires_grad for name, p in this.small.named_parameters()} == wants
    assert set(wants.values()) == {True, False}
    trains(this.small, (images(),))


def test_forward_takes_keywords_only() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.table, self.tail = cbr(3, 8), nn.Linear(4, 8), head(8)

        def forward(self, *, image: Tensor, table: Tensor, shift: float = 0.0) -> Tensor:
            return self.tail(self.image(image) * self.table(table)[..., None, None] + shift)

    inputs = {"table": images(2, 4), "image": images(), "shift": 0.5}
    this = cut(Keywords(), inputs, {"image.0": 8}, {"tail.2": OUTPUT})
    assert this.small.table.out_features == this.small.image[0].out_channels


def test_modules_in_lists_and_dicts_are_indexed_in_loops() -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(cbr(c, c + 2) for c in (3, 5, 7))
            self.norms = nn.ModuleDict({"in": nn.BatchNorm2d(5), "out": nn.BatchNorm2d(9)})
            self.tails = nn.ModuleList([head(9), nn.Identity()])

        def forward(self, x: Tensor) -> Tensor:
            for i in range(len(self.layers)):
                x = self.layers[i](x)
                if i != 1:
                    x = self.norms["out" if i else "in"](x)
            return self.tails[-1](self.tails[0](x))

    opened = {"layers.0.0": 5, "layers.1.0": 7, "layers.2.0": 9}
    cut(Indexed(), (images(),), opened, {"tails.0.2": OUTPUT})


# --------------------------------------------------------------------------------------------------
# what comes out


@dataclass
class Detections:
    scores: Tensor
    features: list[Tensor]
    label: str = "cat"


Pair = namedtuple("Pair", ["scores", "more"])


class Packed(nn.Module):
    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.scores, self.boxes, self.pack = cbr(3, 8), head(8), cbr(8, 4), pack

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return self.pack(self.scores(x), self.boxes(x))


@pytest.mark.parametrize(
    "pack",
    [
        lambda scores, boxes: Detections(scores, [boxes]),
        lambda scores, boxes: {"scores": scores, "boxes": {"deep": boxes}},
        lambda scores, boxes: (scores, ((boxes, 3), [scores, None])),
        lambda scores, boxes: Pair(scores, Pair("boxes", boxes)),
    ],
    ids=["dataclass", "dict", "nested tuples", "named tuples"],
)
def test_outputs_of_every_form_keep_their_form(pack: Callable[[Tensor, Tensor], Any]) -> None:
    this = cut(Packed(pack), (images(),), {"body.0": 8}, {"scores.2": OUTPUT, "boxes.0": OUTPUT})
    before, after = (net.eval()(images()) for net in (this.masked, this.small))

    def form(out: Any) -> Any:
        out = vars(out) if isinstance(out, Detections) else out
        return tree_map_only(Tensor, lambda x: tuple(x.shape), out)

    assert type(before) is type(after)
    assert form(before) == form(after)


# --------------------------------------------------------------------------------------------------
# with gates


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: Tied(True), (torch.randint(11, (2, 5)),)),
        (lambda: Tied(False), (torch.randint(11, (2, 5)),)),
        (Twice, (images(),)),
        (Tokens, (images(),)),
        (Lists, (images(3, 6),)),
        (lambda: nn.Sequential(cbr(3, 8), Replaced(), cbr(8, 6), head(6)), (images(),)),
        (lambda: Stage(Residual(), Residual(0.5)), (images(),)),
        (Ways, {"x": images(), "mode": "b"}),
        (lambda: Recurrent("LSTM"), (images(2, 4, 7),)),
        (lambda: Recurrent("GRU"), (images(2, 4, 7),)),
    ],
    ids=[
        "tied-norm",
        "tied",
        "twice",
        "tokens",
        "lists",
        "buffer",
        "stochastic",
        "ways",
        "lstm",
        "gru",
    ],
)
def test_export_equals_the_gated_model(make: Callable[[], nn.Module], inputs: Inputs) -> None:
    pruner = pruner_of(randomise(make()).double(), inputs)
    set_gates(pruner, VARIANTS["half"], "awkward")
    small = pruner.export()
    assert pruner.proof.keys() > {"eval", "train"}
    for training in (False, True):
        assert difference(pruner.model, small, inputs, training=training) <= 1e-10
    assert pruner.cost()["macs"] < pruner.graph.cost.original()["macs"]


# --------------------------------------------------------------------------------------------------
# without memory


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: Stage(Residual(), Residual(0.5)), (images(),)),
        (Tokens, (images(),)),
        (Lists, (images(3, 6),)),
        (lambda: Tied(True), (torch.randint(11, (2, 5)),)),
    ],
    ids=["residual", "tokens", "lists", "tied"],
)
def test_model_on_the_meta_device_has_the_same_groups_and_costs(
    make: Callable[[], nn.Module], inputs: tuple[Tensor, ...]
) -> None:
    known = pp.trace(make().double(), inputs)
    with torch.device("meta"):
        model = make().double()
    graph = pp.trace(model, tree_map_only(Tensor, lambda x: x.to("meta"), inputs))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert graph.groups == known.groups and graph.prunable
    assert graph.cost.original() == known.cost.original()
    plan = some_plan(graph)
    widths = torch.tensor([len(kept) for kept in plan.values()])
    assert graph.cost.at(widths) == known.cost.at(widths)
    assert graph.cost.at(widths)["macs"] < graph.cost.original()["macs"]
    small = pp.shrink(model, graph, plan)
    params = sum(p.numel() for p in small.parameters())
    assert params == graph.cost.at(widths)["params"]


# --------------------------------------------------------------------------------------------------
# recurrent layers


class Recurrent(nn.Module):
    """A convolution, a recurrent layer over time, and a small classifier."""

    def __init__(self, cell: str, **options: Any) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(4, 10, 3, padding=1), nn.ReLU())
        self.cell = getattr(nn, cell)(10, 6, batch_first=True, **options)
        width = 12 if options.get("bidirectional") else 6
        self.tail = nn.Sequential(nn.Linear(width, 14), nn.ReLU(), nn.Linear(14, 3))

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.cell(self.front(x).transpose(1, 2))
        return self.tail(out[:, -1])


LAYERS = ({}, {"bidirectional": True}, {"num_layers": 2}, {"bidirectional": True, "num_layers": 2})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_net_is_cut(cell: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """In float32, too, where torch has a fused path for all steps at once."""
    model = randomise(Recurrent(cell, **options)).to(dtype)
    graph = pp.trace(model, images(2, 4, 7).to(dtype))
    sizes = {name: group.size for name, group in graph.prunable.items()}
    assert sizes == {"front.0": 10, "cell": 6, "tail.0": 14}
    cut_at_random(model.double(), graph, (images(2, 4, 7),))


# --------------------------------------------------------------------------------------------------
# torch's own transformer


def test_encoder_layers_of_torch_with_dropout_are_compared() -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 20, dropout=0.1, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(5, 12), body, nn.Linear(12, 3))
    heads = {f"1.layers.{k}.self_attn": 4 for k in range(2)}
    hidden = {f"1.layers.{k}.linear1": 20 for k in range(2)}
    whole = {"0": "layer norm mixes channels", "2": OUTPUT}
    cut(model, (images(2, 7, 5),), {**heads, **hidden}, whole)
