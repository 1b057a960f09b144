"""Heads of attention close as a unit, however the attention is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import polarprune as pp
from polarprune.tracing.recorder import attempt
from polarprune.tracing.tape import Tape
from tests.helpers.attention_nets import DIM, HEADS, MAKERS, Block, Packed, Pooled, Separate, Torch
from tests.helpers.exact import VARIANTS, counted, difference, set_gates
from tests.helpers.random_cuts import cut_at_random, images


def start(name: str) -> tuple[pp.Pruner, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, DIM), Block(MAKERS[name]()), nn.Linear(DIM, 5)).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    pruner = pp.Pruner(model.eval(), x, lam=1.0, steps=1)
    pruner.param_groups(lr=0.0)
    pruner.step()
    return pruner, x


@pytest.mark.parametrize("name", MAKERS)
def test_heads_close_as_a_unit_and_the_export_is_exact(name: str) -> None:
    pruner, x = start(name)
    (heads,) = (g for g in pruner.graph.prunable.values() if g.size == HEADS)
    for kept in ([0, 2], [3], [1, 2, 3]):
        with torch.no_grad():
            for gate in pruner.gates.values():
                gate.alpha.uniform_(0.4, 1.5)
            closed = [head for head in range(HEADS) if head not in kept]
            pruner.gates[heads.name].alpha[closed] = 0
            pruner.gates["1.mlp.0"].alpha[::3] = 0
        small = pruner.export()
        for training in (False, True):
            assert difference(pruner.model, small, (x,), training=training) <= 1e-10
        claimed = pruner.cost()
        with torch.no_grad():
            fast = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            found = counted(small, (x,))
            torch.backends.mha.set_fastpath_enabled(fast)
        assert found == {key: claimed[key] for key in ("macs", "params")}


def test_attention_of_one_class_need_not_run_the_same_way() -> None:
    class Some(Pooled):
        def __init__(self, pool: bool) -> None:
            super().__init__()
            self.pools = pool

        def pooled(self, x: Tensor) -> Tensor:
            return super().pooled(x) if self.pools else x

    torch.manual_seed(0)
    blocks = [Block(Some(pool)) for pool in (False, True, True)]
    model = nn.Sequential(nn.Linear(6, DIM), *blocks, nn.Linear(DIM, 5)).eval()
    graph = pp.trace(model, torch.randn(2, 7, 6))
    assert [graph.prunable[f"{k}.attention.qkv"].size for k in (1, 2, 3)] == [HEADS] * 3


def test_a_key_head_closes_with_all_its_queries() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, DIM), Block(Separate(groups=2)), nn.Linear(DIM, 5)).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    graph = pp.trace(model.eval(), x)
    heads = graph.prunable["1.attention.q"]
    assert heads.size == 2
    small = pp.shrink(model, graph, {heads.name: [1]})
    assert small[1].attention.q.out_features == DIM // 2
    assert small[1].attention.k.out_features == DIM // HEADS


def test_all_heads_may_close_and_the_bias_stays_where_torch_runs_without_heads() -> None:
    pruner, x = start("torch")
    least = pruner.graph.groups["1.attention.attention"].minimum
    assert least == int(TorchVersion(torch.__version__) < "2.13")
    with torch.no_grad():
        pruner.gates["1.attention.attention"].alpha[least:] = 0
    assert difference(pruner.model, pruner.export(), (x,), training=False) <= 1e-10


def test_softmax_over_heads_freezes_them() -> None:
    class Talking(Packed):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).reshape(2, 7, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
            weights = (q @ k.mT).softmax(1)
            return self.proj((weights @ v).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, DIM), Block(Talking()), nn.Linear(DIM, 5))
    graph = pp.trace(model.eval(), torch.randn(2, 7, 6))
    assert "1.attention.qkv" not in graph.prunable
    assert any("mixes channels" in group.reason for group in graph.groups.values())


def test_a_pruned_attention_is_saved_and_loaded(tmp_path: Any) -> None:
    torch.manual_seed(0)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, DIM), Block(Torch(True)), nn.Linear(DIM, 5)).eval()

    model, x = make(), torch.randn(2, 7, 6)
    graph = pp.trace(model, x)
    small = pp.shrink(model, graph, {"1.attention.attention": [0, 3], "1.mlp.0": [1, 2, 5]})
    pp.save(small, tmp_path / "small.safetensors")
    again = pp.load(tmp_path / "small.safetensors", model=make())
    assert torch.equal(again(x), small(x))


def test_dropout_inside_attention_does_not_hide_equality() -> None:
    class Dropping(Separate):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                f(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
                for f in (self.q, self.k, self.v)
            )
            rate = 0.3 if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, enable_gqa=True)
            return self.proj(out.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, DIM), Block(Dropping(groups=2)), nn.Linear(DIM, 5))
    graph = pp.trace(model.eval(), torch.randn(2, 7, 6))
    assert graph.prunable["1.attention.q"].size == 2


def test_a_width_that_a_module_of_the_user_remembers_is_kept_up_to_date() -> None:
    class Remembers(nn.Module):
        """A linear layer with a transposed weight, as in GPT-2."""

        def __init__(self, nx: int, nf: int) -> None:
            super().__init__()
            self.nf = nf
            self.weight, self.bias = (
                nn.Parameter(torch.randn(nx, nf)),
                nn.Parameter(torch.randn(nf)),
            )

        def forward(self, x: Tensor) -> Tensor:
            size = (*x.size()[:-1], self.nf)
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)

    torch.manual_seed(0)
    model = nn.Sequential(Remembers(6, 16), nn.GELU(), Remembers(16, 5))
    x = torch.randn(2, 7, 6)
    graph = pp.trace(model, x)
    (group,) = graph.prunable.values()
    assert group.size == 16
    small = pp.shrink(model, graph, {group.name: [1, 4, 9]})
    assert small[0].nf == 3 and small(x).shape == (2, 7, 5)
    assert model[0].nf == 16


class OverPixels(nn.Module):
    """With one head the reshape at the end is a view, and a layout for another kernel goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.width = 2, 8
        self.qkv, self.proj = nn.Conv2d(6, 48, 1), nn.Conv2d(16, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, high, wide = x.shape
        qkv = self.qkv(x).reshape(batch, self.num_heads, 3 * self.width, high * wide)
        q, k, v = qkv.permute(0, 1, 3, 2).chunk(3, 3)
        out = F.scaled_dot_product_attention(q, k, v).permute(0, 1, 3, 2)
        return self.proj(out.reshape(batch, -1, high, wide))


def computed(net: nn.Module, x: Tensor) -> Tape:
    return attempt(net, x, training=False, with_values=True)[0]


def test_macs_are_the_same_whichever_kernel_computes_attention() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), OverPixels(), OverPixels(), nn.Flatten(2))
    model, x = model.double(), images(2, 3, 4, 4)
    kernels = [
        [op.name for op in computed(net, x).ops if "attention" in op.name]
        for net in (model, cut_at_random(model, pp.trace(model, x), (x,)).small)
    ]
    assert kernels == [[], ["_scaled_dot_product_flash_attention_for_cpu"]]


class Translator(nn.Module):
    """Encoder and decoder of torch: keys and values of the cross attention are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        settings: dict[str, Any] = {"batch_first": True, "dropout": 0.0}
        self.stem, self.out = nn.Linear(5, 16), nn.Linear(16, 3)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, **settings)
        self.decoder = nn.TransformerDecoderLayer(16, 4, 32, **settings)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(self.decoder(self.stem(x), self.encoder(self.stem(y))))


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_of_cross_attention_go(variant: str) -> None:
    torch.manual_seed(0)
    model = Translator().double()
    pruner = pp.Pruner(
        model, (torch.randn(2, 4, 5).double(), torch.randn(2, 6, 5).double()), lam=1.0, steps=1
    )
    pruner.param_groups(lr=0.0)
    assert {name: group.size for name, group in pruner.graph.prunable.items()} == {
        "encoder.self_attn": 4,
        "encoder.linear1": 32,
        "decoder.self_attn": 4,
        "decoder.multihead_attn": 4,
        "decoder.linear1": 32,
    }
    set_gates(pruner, VARIANTS[variant], variant)
    small = pruner.export().eval()
    others = torch.randn(3, 7, 5).double(), torch.randn(3, 2, 5).double()
    with torch.no_grad():
        assert torch.allclose(small(*others), model.eval()(*others), rtol=0, atol=1e-12)


class Twice(nn.Module):
    """One attention module under two names, or two modules that share a weight."""

    def __init__(self, share: str) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(16, 4, batch_first=True)
        self.second = self.first
        if share == "weight":
            self.second = nn.MultiheadAttention(16, 4, batch_first=True)
            self.second.in_proj_weight = self.first.in_proj_weight
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        for attention in (self.first, self.second):
            x = x + attention(x, x, x, need_weights=False)[0]
        return self.head(x)


@pytest.mark.parametrize("share", ["module", "weight"])
def test_attention_that_shares_its_weight_loses_the_same_heads_everywhere(share: str) -> None:
    torch.manual_seed(0)
    model, x = Twice(share).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    graph = pp.trace(model, x)
    small = pp.shrink(model, graph, {"first": [0, 2]})
    with torch.no_grad():
        for attention in {model.first, model.second}:
            attention.out_proj.weight[:, 4:8] = 0
            attention.out_proj.weight[:, 12:] = 0
    torch.testing.assert_close(small(x), model(x), rtol=1e-12, atol=1e-12)
    assert small.first.num_heads == small.second.num_heads == 2
