"""Channels of embeddings, of recurrent layers, and of layers whose output nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polarprune as pp
from polarprune.surgery.proof import count_macs


def trained(
    pruner: pp.Pruner, draw: Callable[[], Tensor], kind: Any = torch.optim.Adam
) -> nn.Module:
    """Train a model to its budget, and return its export."""
    optimizer = kind(pruner.param_groups(lr=0.02))
    pruner.attach(optimizer)
    for _ in range(pruner.steps):
        optimizer.zero_grad()
        (pruner.model(draw()) - 1).square().mean().backward()
        optimizer.step()
    return pruner.export()


class Texts(nn.Module):
    """Convolutions of several widths over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(16, 12, k, padding=k // 2) for k in (1, 3, 5))
        self.head = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x).transpose(1, 2)
        found: Tensor = self.head(torch.cat([c(words).relu().amax(2) for c in self.convs], 1))
        return found


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(50, 16, mode=mode)
        self.hidden, self.head = nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.hidden(self.words(x)).relu())
        return found


class Ratings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 16), nn.Embedding(50, 8)
        self.hidden, self.head = nn.Linear(24, 12), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.users(x[:, 0]), self.items(x[:, 1])], 1)
        found: Tensor = self.head(self.hidden(both).relu())
        return found


MAKERS = {
    "texts": Texts,
    "mean of a bag": lambda: Bags("mean"),
    "sum of a bag": lambda: Bags("sum"),
    "maximum of a bag": lambda: Bags("max"),
    "ratings": Ratings,
}
TABLES = {"words": 16, "users": 16, "items": 8}


@pytest.mark.parametrize("name", MAKERS)
def test_embeddings_are_pruned(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = MAKERS[name]().double(), torch.randint(0, 50, (3, 9))
    pruner = pp.Pruner(model, x, macs=0.5, steps=80)
    tables = {path: group.size for path, group in pruner.graph.prunable.items() if path in TABLES}
    assert tables and tables == {path: TABLES[path] for path in tables}
    small = trained(pruner, lambda: torch.randint(0, 50, (8, 9)))
    y = torch.randint(0, 50, (5, 11))
    assert torch.allclose(small.eval()(y), model.eval()(y), rtol=0, atol=1e-12)
    assert count_macs(small, x) == pruner.cost()["macs"] <= 0.5 * pruner.report().before["macs"]
    plan = pruner.plan()
    assert any(len(plan[path]) < size for path, size in tables.items())
    for path in tables:
        assert small.get_submodule(path).embedding_dim == len(plan[path])
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=MAKERS[name]()).eval()
    assert torch.equal(loaded(y), small(y))


def test_a_table_that_is_read_as_a_product_stays_whole() -> None:
    class Product(Ratings):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = (self.users(x[:, 0])[:, :8] * self.items(x[:, 1])).sum(1)
            return found

    graph = pp.trace(Product(), torch.randint(0, 50, (3, 9)))
    assert not graph.prunable
    assert any("sum mixes channels" in group.reason for group in graph.groups.values())


class Steps(nn.Module):
    """Words one after the other, through a layer of torch or a cell in a loop."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind, self.words = kind, nn.Embedding(50, 16)
        self.steps = getattr(nn, kind)(16, 12, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, 4)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x)
        if not self.kind.endswith("Cell"):
            return self.head(self.steps(words)[0].mean(1))  # type: ignore[no-any-return]
        state: Any = None
        for step in words.unbind(1):
            state = self.steps(step, state)
        return self.head(state[0] if self.kind == "LSTMCell" else state)  # type: ignore[no-any-return]


KINDS = [
    (kind, options)
    for kind in ("LSTM", "GRU", "RNN")
    for options in ({"batch_first": True}, {"batch_first": True, "bidirectional": True})
] + [(kind, {}) for kind in ("LSTMCell", "GRUCell", "RNNCell")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_recurrent_layers_are_pruned(
    kind: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Steps(kind, **options).to(dtype), torch.randint(0, 50, (3, 5))
    pruner = pp.Pruner(model, x, macs=0.5, steps=60)
    assert {name: group.size for name, group in pruner.graph.prunable.items()} == {
        "words": 16,
        "steps": 12,
    }
    small = trained(pruner, lambda: torch.randint(0, 50, (8, 5)))
    y = torch.randint(0, 50, (5, 9))
    close = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(small.eval()(y), model.eval()(y), rtol=0, atol=close)
    assert count_macs(small, x) == pruner.cost()["macs"] <= 0.5 * pruner.report().before["macs"]
    assert small.get_submodule("steps").hidden_size == len(pruner.plan()["steps"])
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=Steps(kind, **options)).eval()
    assert torch.equal(loaded(y), small(y))


class Waves(nn.Module):
    """The last step makes something that is added to nothing, as in many a WaveNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 16, 1)
        self.gates = nn.ModuleList(nn.Conv1d(16, 24, 2, dilation=2**k) for k in range(3))
        self.back = nn.ModuleList(nn.Conv1d(12, 16, 1) for _ in range(3))
        self.skip = nn.ModuleList(nn.Conv1d(12, 10, 1) for _ in range(3))
        self.head = nn.Conv1d(10, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), torch.zeros(())
        for k in range(3):
            one, two = self.gates[k](F.pad(x, (2**k, 0))).chunk(2, 1)
            y = one.tanh() * two.sigmoid()
            total, x = total + self.skip[k](y), x + self.back[k](y)
        found: Tensor = self.head(total.relu())
        return found


class Latent(nn.Module):
    """In eval mode the output of one layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 32), nn.Linear(6, 32)
        self.mean, self.spread, self.out = nn.Linear(32, 6), nn.Linear(32, 6), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x).relu()
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * spread.exp() if self.training else mean
        found: Tensor = self.out(self.decode(code).relu())
        return found


@pytest.mark.parametrize(
    ("make", "shape", "units"), [(Waves, (1, 20), 16 + 36 + 10), (Latent, (8,), 32 + 6 + 32)]
)
def test_layers_whose_answer_nobody_reads_follow(
    make: Any, shape: tuple[int, ...], units: int
) -> None:
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(3, *shape, dtype=torch.float64)
    pruner = pp.Pruner(model, x, macs=0.5, steps=60)
    assert pruner.graph.units == units
    small = trained(pruner, lambda: x, torch.optim.SGD)
    y = torch.randn(5, *shape, dtype=torch.float64)
    assert torch.allclose(small.eval()(y), model.eval()(y), rtol=0, atol=1e-12)
    assert count_macs(small, x) == pruner.cost()["macs"] <= 0.5 * pruner.report().before["macs"]
