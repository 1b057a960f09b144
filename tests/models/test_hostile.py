"""What hostile users broke: code that bypasses modules, state, numbers, plans."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from polarprune.surgery.proof import count_macs

X = torch.randn(4, 6, dtype=torch.float64)


def pruned(
    model: nn.Module, x: Any = X, each: Callable[[int, pp.Pruner], Any] = lambda *_: None, **kw: Any
) -> pp.Pruner:
    """Train for forty steps to half of the MACs."""
    pruner = pp.Pruner(model, x, **{"macs": 0.5, "steps": 40, **kw})
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.01), momentum=0.9)
    pruner.attach(optimizer)
    for step in range(40):
        optimizer.zero_grad()
        y = model(*x) if isinstance(x, tuple) else model(x)
        y = y[0] if isinstance(y, tuple) else y
        y.square().mean().backward()
        optimizer.step()
        each(step, pruner)
    return pruner


def apart(one: nn.Module, other: nn.Module, *inputs: Tensor) -> float:
    with torch.no_grad():
        return float((one.eval()(*inputs) - other.eval()(*inputs)).abs().max())


class Three(nn.Module):
    """Three linear layers; `body` runs between them."""

    def __init__(self, body: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(*n).double() for n in ((6, 16), (16, 16), (16, 3)))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        if self.body is not None:
            return self.body(self, x)
        return self.c(self.b(self.a(x).relu()).relu())


# --- numbers that are no widths, though they are equal to one -------------------------------------


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.window = nn.Parameter(torch.rand(16).double() + 0.5), 16

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -self.window :] * self.scale


def test_a_number_that_happens_to_be_a_width_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), Window(), nn.Linear(16, 3)).double()
    small = pruned(model, torch.randn(4, 2, 6).double()).export()
    assert small[2].window == 16 and small[0].out_features < 16  # type: ignore[index,union-attr]
    assert apart(model, small, torch.randn(4, 12, 6).double()) < 1e-12


# --- attention ------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i, self.o = nn.Linear(6, 16), nn.Linear(16, 3)
        self.a = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.i(x)
        found: Tensor = self.o(self.a(h, h, h, attn_mask=mask, need_weights=False)[0])
        return found


@pytest.mark.parametrize("size", [0.0, 3.0])
def test_every_head_keeps_its_own_mask(size: float) -> None:
    torch.manual_seed(0)
    model, x = Masked().double(), torch.randn(2, 5, 6).double()
    pruner = pruned(model, (x, torch.randn(8, 5, 5).double() * size), macs=0.45)
    small = pruner.export()
    assert len(pruner.plan()["a"]) < 4
    assert apart(model, small, x, torch.randn(8, 5, 5).double() * 3) < 1e-12


class Causal(nn.Module):
    """The mask is part of a buffer, as in many a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.qkv, self.o = nn.Linear(6, 16), nn.Linear(16, 48), nn.Linear(16, 3)
        self.register_buffer("mask", torch.ones(16, 16).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            y.view(batch, length, 4, -1).transpose(1, 2) for y in self.qkv(self.e(x)).chunk(3, -1)
        )
        mask = self.mask[:length, :length]  # type: ignore[index]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        found: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return found


@pytest.mark.parametrize("length", [4, 6])
def test_heads_go_one_by_one_under_a_mask_from_a_buffer(length: int) -> None:
    torch.manual_seed(0)
    model = Causal().double()
    pruner = pruned(model, torch.randn(2, length, 6).double(), macs=0.7)
    assert {name: group.size for name, group in pruner.graph.prunable.items()} == {
        "e": 16,
        "qkv": 4,
    }
    assert apart(model, pruner.export(), torch.randn(3, 9, 6).double()) < 1e-12


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.i, self.e, self.o = nn.Linear(6, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        found: Tensor = self.o(self.e(self.i(x), src_key_padding_mask=pad))
        return found


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_torchs_encoder_runs_as_users_run_it() -> None:
    torch.manual_seed(0)
    model = Padded().double()
    x = (torch.randn(2, 5, 6).double(), torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]]).bool())
    small = pruned(model, x, macs=0.7).export().eval()
    with torch.no_grad():  # where torch's own layers take their fused path
        there = ~x[1]
        assert torch.allclose(small(*x)[there], model.eval()(*x)[there], rtol=0, atol=1e-12)


# --- code that goes past the modules --------------------------------------------------------------


class Merging(nn.Linear):
    """A correction of low rank, which `eval()` adds to the weight and `train()` takes away."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.left, self.right = (nn.Parameter(torch.randn(*n) / 5) for n in ((16, 2), (2, 16)))
        self.merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.left @ self.right
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if self.merged else y + F.linear(F.linear(x, self.right), self.left)


def test_weights_that_change_with_the_mode_are_put_back_and_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), Merging(), nn.ReLU(), nn.Linear(16, 3))
    model.double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pp.trace(model, X)
    with pytest.raises(pp.PruneError, match="gates have no effect in this model"):
        pp.Pruner(model, X, macs=0.5, steps=10)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


class Listed(nn.Module):
    """A network that reads its weights from a list, which has no gates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = []
        for k, (read, made) in enumerate(((6, 16), (16, 16), (16, 3))):
            weight = nn.Parameter(torch.randn(made, read).double() * 0.3)
            self.register_parameter(f"w{k}", weight)
            self.all.append(weight)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.all:
            x = F.linear(x, weight).relu()
        return x


class Strict:
    def __init_subclass__(cls, *, name: str) -> None:
        super().__init_subclass__()


class Named(Strict, nn.Module, name="named"):
    """A class that cannot be subclassed."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 16).double())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w)


def named() -> nn.Module:
    body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()).double()
    return nn.Sequential(*body, Named(), nn.ReLU(), nn.Linear(8, 3).double())


@pytest.mark.parametrize(
    ("make", "said"), [(Listed, "gates have no effect"), (named, "gates cannot be installed in")]
)
def test_a_model_that_takes_no_gates_is_refused_unchanged(make: Any, said: str) -> None:
    model = make()
    before, types = model(X), [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    for _ in range(2):  # the second time as the first
        with pytest.raises(pp.PruneError, match=said):
            pp.Pruner(model, X, macs=0.5, steps=10)
    assert list(model.state_dict()) == keys and torch.equal(model(X), before)
    assert [type(module) for module in model.modules()] == types


class Hooked(nn.Module):
    """Features are picked up by hooks that know the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head, self.seen = nn.Linear(16, 3), dict[int, Tensor]()
        for k in (1, 3):
            self.body[k].register_forward_hook(lambda m, a, y, k=k: self.seen.__setitem__(k, y))

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        found: Tensor = self.head(torch.cat([self.seen[1], self.seen[3]], 1))
        return found


class Chosen(Three):
    """A function that knows the model is one of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = lambda x: self.b(x).relu()

    def forward(self, x: Tensor) -> Any:
        return self.c(self.middle(self.a(x).relu()))


@pytest.mark.parametrize("make", [Hooked, Chosen])
def test_functions_that_know_the_model_know_its_copy(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, y = make().double(), torch.randn(7, 6).double()
    pruner = pruned(model, macs=0.7)
    small = pruner.export()
    assert not vars(model).get("seen") or model.seen[1].shape == (4, 8)
    assert apart(model, small, y) < 1e-12
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=make())
    assert apart(small, loaded, y) == 0
    wanted = small(y)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(small(y), wanted)  # it has nothing to do with the model any more


def test_numbers_that_change_while_it_trains_are_those_of_the_end() -> None:
    def split(self: Any, x: Tensor) -> Tensor:
        u, v = self.a(x).split(8, -1)
        found: Tensor = self.d(u * torch.sigmoid(v * self.heat))
        return found

    model = Three(split)
    model.d, model.heat = nn.Linear(8, 3).double(), 1.0
    pruner = pruned(model, each=lambda step, _: setattr(model, "heat", 1 + step / 20))
    with pytest.raises(pp.PruneError, match=r"compact: .*heat changed since tracing"):
        pruner.compact()
    small = pruner.export()
    assert pruner.graph.rewritten and apart(model, small, torch.randn(9, 6).double()) < 1e-12
    with pytest.raises(pp.PruneError, match=r"heat = 7.0: .* was rewritten with 2.95"):
        small.heat = 7.0
    small.heat, small.note = 2.95, "new"  # the same, and what was not there


# --- what comes out -------------------------------------------------------------------------------


class Table(dict[str, Any]):
    __getattr__ = dict.__getitem__


@dataclass(slots=True)
class Slots:
    features: Tensor


class Pair(tuple[Tensor, Tensor]):
    __slots__ = ()


@pytest.mark.parametrize(
    "wrap",
    [lambda f: Table(features=f), Slots, lambda f: Pair((f, f))],
    ids=["dict", "slots", "pair"],
)
def test_outputs_in_any_container_stay_whole(wrap: Any) -> None:
    def body(self: Any, x: Tensor) -> Any:
        features = self.b(self.a(x).relu()).relu()
        return self.c(features), wrap(features)

    graph = pp.trace(Three(body), X)
    assert list(graph.prunable) == ["a"] and "output" in graph.groups["b"].reason


# --- fillings that are none -----------------------------------------------------------------------


def one_hot(like: Tensor) -> Tensor:
    return F.one_hot(torch.tensor(0), like.shape[-1]).to(like)


def counted(like: Tensor) -> Tensor:
    return like.new_ones(like.shape[-1]).cumsum_(0)


def placed(like: Tensor) -> Tensor:
    filling = like.new_zeros(like.shape[-1])
    filling[torch.tensor([0])] = 3.0
    return filling


@pytest.mark.parametrize("make", [one_hot, counted, placed])
def test_a_filling_that_was_written_to_is_none(make: Any) -> None:
    graph = pp.trace(Three(lambda self, x: self.c((h := self.a(x).relu()) * make(h))), X)
    assert not graph.prunable


def test_groups_of_a_shuffle_stay_as_wide_as_one_another() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8).double()
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ChannelShuffle(2), nn.Conv2d(8, 3, 1)).double()
    pruner = pruned(model, x, macs=0.7)
    assert pruner.graph.units == 4
    assert apart(model, pruner.export(), torch.randn(2, 3, 5, 5).double()) < 1e-12


def test_channels_of_one_group_that_cost_differently_stay_whole() -> None:
    def body(self: Any, x: Tensor) -> Any:
        h = self.a(x).relu()
        small = F.linear(h[:, :8], self.b.weight[:8, :8], self.b.bias[:8]).relu()
        return self.c(self.b(h).relu()), F.linear(small, self.c.weight[:, :8])

    graph = pp.trace(Three(body), X)
    assert any("cost more than others" in group.reason for group in graph.groups.values())
    for name, group in graph.prunable.items():
        small = pp.shrink(Three(body), graph, {name: list(range(1, group.size))})
        assert (
            count_macs(small, X)
            == graph.cost.at(
                torch.tensor([g.size - (n == name) for n, g in graph.prunable.items()])
            )["macs"]
        )


def test_a_product_with_one_channel_that_torch_does_not_count_is_no_breach() -> None:
    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.l, self.o = nn.Linear(6, 32), nn.Linear(32, 3)
            self.down, self.up = (nn.Parameter(torch.randn(*n) * 0.3) for n in ((32, 4), (4, 32)))

        def forward(self, x: Tensor) -> Tensor:
            h = self.l(x).relu()
            low = torch.einsum("btd,dr->btr", h, self.down)
            found: Tensor = self.o(h + torch.einsum("btr,rd->btd", low, self.up))
            return found

    model = Low().double()
    small = pruned(model, torch.randn(2, 5, 6).double(), macs=0.3).export()
    assert apart(model, small, torch.randn(3, 4, 6).double()) < 1e-12


# --- dice, plans, files ---------------------------------------------------------------------------


def test_pythons_dice_are_put_back_and_not_written_down() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = nn.Linear(6, 16), nn.Linear(16, 3)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16)) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            for block in self.blocks:
                if not self.training or random.random() > 0.3:
                    x = x + block(x)
            found: Tensor = self.o(x)
            return found

    for seed in range(6):
        random.seed(seed)
        state = random.getstate()
        graph = pp.trace(Dropped(), torch.randn(4, 6))
        assert random.getstate() == state
        assert {f"blocks.{k}.0" for k in range(4)} <= set(graph.prunable)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"a": [True] * 16}, "use the indices of the channels to keep"),
        ({"a": torch.ones(16).bool()}, "mask.nonzero"),
        ({"a": [0.5, 1.7]}, "use the indices"),
        ({"a": 8}, "use a list of the channels"),
        (None, "expected a dict; use group names"),
        ([0, 1], "expected a dict; use group names"),
    ],
)
def test_a_plan_that_is_none_is_refused(plan: Any, said: str) -> None:
    model = Three()
    with pytest.raises(pp.PruneError, match=said):
        pp.shrink(model, pp.trace(model, X), plan)


def test_a_plan_of_tensors_is_a_plan() -> None:
    model = Three()
    small = pp.shrink(model, pp.trace(model, X), {"a": torch.arange(5)})  # type: ignore[dict-item]
    assert small.a.out_features == 5  # type: ignore[union-attr]


def test_what_a_file_cannot_hold_is_said(tmp_path: Path) -> None:
    class Extra(Three):
        def get_extra_state(self) -> Any:
            return {"x": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    model = Extra()
    small = pp.shrink(model, pp.trace(model, X), {"a": [0, 1]})
    with pytest.raises(pp.PruneError, match="_extra_state is not a tensor"):
        pp.save(small, tmp_path / "x.safetensors")
    model = Three()
    small = pp.shrink(model, pp.trace(model, X), {"a": [0, 1]})
    for card, path in (({"x": X}, "x.safetensors"), ({}, "none/x.safetensors")):
        with pytest.raises(pp.PruneError, match="cannot be written"):
            pp.save(small, tmp_path / path, card=card)
    pp.save(small, tmp_path / "x.safetensors")
    with pytest.raises(pp.PruneError, match="give an instance"):
        pp.load(tmp_path / "x.safetensors", model=Three)  # type: ignore[arg-type]


def test_an_empty_example_is_refused() -> None:
    with pytest.raises(pp.PruneError, match="the example inputs are empty"):
        pp.trace(Three(), X[:0])


def test_compact_wants_to_know_the_optimizer() -> None:
    model = Three()
    pruner = pp.Pruner(model, X, macs=0.5, steps=40)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.01), momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        pruner.step()
    before = model(X)
    for wrong, said in ((None, "the optimizer is unknown"), ("sgd", "not a torch.optim")):
        with pytest.raises(pp.PruneError, match=said):
            pruner.compact(optimizer=wrong)  # type: ignore[arg-type]
    assert torch.equal(model(X), before)
    pruner.compact(optimizer=optimizer)
    assert pruner.compactions == 1 and torch.allclose(model(X), before)
    optimizer.step()


def test_a_state_of_another_schedule_is_refused() -> None:
    state = pp.Pruner(Three(), X, macs=0.5, steps=40).state_dict()
    other = pp.Pruner(Three(), X, macs=0.5, steps=40, schedule=pp.Schedule(done=0.4))
    with pytest.raises(pp.PruneError, match="from a run with schedule"):
        other.load_state_dict(state)
    with pytest.raises(pp.PruneError, match=r"read it with torch\.load first"):
        other.load_state_dict("state.pt")  # type: ignore[arg-type]


def test_weights_that_are_not_finite_are_named_at_export() -> None:
    model = Three()
    pruner = pruned(model)
    with torch.no_grad():
        model.c.bias[0] = torch.nan
    with pytest.raises(pp.PruneError, match=r"export: c.bias has values that are NaN"):
        pruner.export()


def test_gates_in_one_group_with_weights_are_warned_of() -> None:
    model = Three()
    pruner = pp.Pruner(model, X, macs=0.5, steps=40)
    with pytest.warns(UserWarning, match="gates share a parameter group with weights"):
        pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))


# --- what had stayed whole for no reason ----------------------------------------------------------


class Unfolded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Linear(72, 18)
        self.c, self.o = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(self.a(x).relu(), 3, padding=1).transpose(1, 2)
        x = F.fold(self.b(patches).relu().transpose(1, 2), x.shape[2:], 3, padding=1)
        found: Tensor = self.o(self.c(x).relu())
        return found


class Warped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.linspace(-1, 1, 5, dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(places, places, indexing="xy"), -1)
        warped = F.grid_sample(self.a(x), grid.expand(len(x), -1, -1, -1), align_corners=False)
        found: Tensor = self.o(warped + warped.flatten(2).median(2).values[..., None, None])
        return found


class Unpooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, places = F.max_pool2d(self.a(x).relu(), 2, return_indices=True)
        found: Tensor = self.o(F.max_unpool2d(self.b(x).relu(), places, 2))
        return found


class Scored(nn.Module):
    """Weights of places by a product with a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.query, self.o = (
            nn.Conv2d(3, 8, 1),
            nn.Parameter(torch.randn(8)),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).tanh().flatten(2).transpose(1, 2)
        found: Tensor = self.o(((x @ self.query).softmax(1)[..., None] * x).sum(1))
        return found


class Twice(nn.Module):
    """Two depth-wise convolutions and two norms share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(2))
        self.convs[1].weight, self.norms[1].weight = self.convs[0].weight, self.norms[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + norm(conv(x)).relu()
        found: Tensor = self.o(x)
        return found


class Mirrored(nn.Module):
    """An autoencoder whose decoder uses the encoder's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 3, 3, padding=1)
        self.o.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.o(self.a(x).relu())
        return found


class Noisy(nn.Module):
    """A network with its own dropout and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        if self.training:
            x = x * (torch.rand_like(x) > 0.3) / 0.7 + 0.1 * torch.randn_like(x)
        x = self.b(x).relu()
        if self.training:
            x = x * x.new_empty(x.shape[:2]).bernoulli_(0.8)[..., None, None]
        found: Tensor = self.o(x)
        return found


FOLLOWED = {
    Unfolded: 8 + 2 + 8,
    Warped: 8,
    Unpooled: 8,
    Scored: 8,
    Twice: 4,
    Mirrored: 8,
    Noisy: 16,
}


@pytest.mark.parametrize("make", FOLLOWED, ids=lambda make: make.__name__)
def test_what_can_be_followed_is_pruned(make: Any) -> None:
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(2, 3, 8, 8).double()
    pruner = pruned(model, x, macs=0.7)
    assert pruner.graph.units == FOLLOWED[make]
    small = pruner.export()
    assert apart(model, small, torch.randn(3, 3, 10, 6).double()) < 1e-12
    assert count_macs(small, x) == pruner.cost()["macs"] <= 0.7 * pruner.report().before["macs"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("slices", {"a.weight": {"7": [0]}}),
        ("slices", {"a.weight": {"0": ["x"]}}),
        ("slices", {"a.weight": [1]}),
        ("attributes", {"nothing": {"x": 1}}),
        ("shapes", 3),
        ("constants", ["nothing"]),
        ("heads", {"a": [0]}),
        ("rewired", {"a": {}}),
        ("computed", 5),
    ],
)
def test_a_recipe_that_is_damaged_is_said_to_be(key: str, value: Any, tmp_path: Path) -> None:
    model = Three()
    small = pp.shrink(model, pp.trace(model, X), {"a": [0, 1]})
    recipe = {**small.polarprune_recipe, key: value}  # type: ignore[dict-item]
    object.__setattr__(small, "polarprune_recipe", recipe)
    pp.save(small, tmp_path / "x.safetensors")
    with pytest.raises(pp.PruneError, match=r"is damaged|another model|does not fit"):
        pp.load(tmp_path / "x.safetensors", model=Three())


class Spiking(nn.Module):
    """A spiking neuron that keeps its potential from call to call; there is none at first."""

    def __init__(self, buffer: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.o = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        if buffer:
            self.register_buffer("potential", None, persistent=False)
        else:
            self.potential = None

    def forward(self, x: Tensor) -> Tensor:
        now = self.b(self.a(x).relu())
        before = self.potential
        self.potential = now if before is None else 0.9 * before.detach() + now
        found: Tensor = self.o(self.potential.relu())
        return found


@pytest.mark.parametrize("buffer", [False, True])
def test_state_that_is_kept_from_call_to_call_begins_anew(buffer: bool) -> None:
    model = Spiking(buffer).double()
    pruner = pruned(model)
    held = model.potential
    small = pruner.export()
    assert model.potential is held is not None and small.potential is None
    model.potential = None
    for _ in range(3):
        y = torch.randn(4, 6).double()
        assert apart(model, small, y) < 1e-12
    model.potential = held
    pruner.compact()
    assert model.potential is None and model.b.out_features < 16
    model(torch.randn(4, 6).double())


class Neighbours(nn.Module):
    """Features of the nearest points, and back to those by addition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(3, 16), nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.a(x).relu()
        near = torch.cdist(x, x).topk(3, largest=False).indices.flatten(1)[..., None]
        picked = torch.gather(features, 1, near.expand(-1, -1, features.shape[2]))
        made = self.b(picked).relu()
        total = made.new_zeros(len(x), x.shape[1], made.shape[2])
        total = total.scatter_add(1, near.expand_as(made), made)
        found: Tensor = self.o(total)
        return found


def test_rows_that_are_picked_and_added_keep_their_channels() -> None:
    torch.manual_seed(0)
    model, x = Neighbours().double(), torch.randn(2, 8, 3).double()
    pruner = pruned(model, x)
    assert {name: group.size for name, group in pruner.graph.prunable.items()} == {"a": 16, "b": 12}
    assert apart(model, pruner.export(), torch.randn(3, 11, 3).double()) < 1e-12
    own = pp.trace(
        Three(lambda self, x: self.c(self.a(x).gather(1, self.b.weight.argsort(1)[:4]))), X
    )
    assert "a" not in own.prunable  # an index for every channel


class Blanked(nn.Module):
    """Some places are overwritten with a vector that is learned; numpy draws which."""

    def __init__(self, drawn: bool) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(6, 16), nn.Linear(16, 12), nn.Linear(12, 3)
        self.blank, self.drawn = nn.Parameter(torch.randn(16)), drawn

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        mask = x[..., 0] > 0.5
        if self.drawn and self.training:
            mask = torch.tensor(numpy.random.rand(*x.shape[:2]) < 0.3)
        h[mask] = self.blank
        found: Tensor = self.o(self.b(h).relu())
        return found


@pytest.mark.parametrize("drawn", [False, True])
def test_places_that_are_overwritten_keep_their_channels(drawn: bool) -> None:
    torch.manual_seed(0)
    model, x = Blanked(drawn).double(), torch.randn(3, 5, 6).double()
    numpy.random.seed(3)
    state = numpy.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    pruner = pp.Pruner(model, x, macs=0.5, steps=40)
    assert numpy.random.get_state()[1].tolist() == state  # type: ignore[index,union-attr]
    assert {name: group.size for name, group in pruner.graph.prunable.items()} == {"a": 16, "b": 12}
    model = Blanked(drawn).double()
    assert apart(model, pruned(model, x).export(), torch.randn(2, 7, 6).double()) < 1e-12
