"""Attention as several libraries write it, and a block around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS = 24, 4


class Packed(nn.Module):
    """Queries, keys and values from one matrix, as in timm."""

    def __init__(self, fused: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.fused = HEADS, DIM // HEADS, fused
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.table = nn.Parameter(torch.randn(13, HEADS)) if bias else None
        place = torch.arange(7)
        self.register_buffer("place", (place[:, None] - place + 6).flatten())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            if self.table is not None:
                near = self.table[self.place].view(7, 7, -1).permute(2, 0, 1)
                scores = scores + near.unsqueeze(0)
            x = scores.softmax(-1) @ v
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


class Separate(nn.Module):
    """Three matrices, and fewer heads of keys and values (grouped queries)."""

    def __init__(self, groups: int = HEADS) -> None:
        super().__init__()
        self.head, self.groups = DIM // HEADS, groups
        self.q, self.proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.k, self.v = (nn.Linear(DIM, groups * self.head) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        k, v = (t.repeat_interleave(HEADS // self.groups, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))


class Rotary(Separate):
    """Positions as rotations of the halves of a head, as in Llama."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        angle = torch.arange(7.0, dtype=x.dtype)[:, None] * torch.ones(self.head, dtype=x.dtype)
        q, k = (t * angle.cos() + self.turned(t) * angle.sin() for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.proj(out.transpose(1, 2).reshape(*x.shape[:-1], -1))

    def turned(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat([-x[..., half:], x[..., :half]], -1)


class Pooled(nn.Module):
    """One convolution and one norm for all heads, and relative positions, as in MViT and SAM."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.width = HEADS, DIM
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.pool = nn.Conv1d(DIM // HEADS, DIM // HEADS, 3, padding=1, groups=DIM // HEADS)
        self.norm = nn.LayerNorm(DIM // HEADS)
        self.near = nn.Parameter(torch.randn(13, DIM // HEADS))

    def pooled(self, x: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        x = self.pool(x.reshape(batch * heads, length, width).transpose(1, 2))
        return self.norm(x.reshape(batch, heads, width, length).transpose(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = (self.pooled(part) for part in qkv.unbind(0))
        place = torch.arange(length)
        near = self.near[place[:, None] - place + 6]
        scores = 0.3 * q @ k.mT + torch.einsum("bhqc,qkc->bhqk", q, near)
        x = scores.softmax(-1) @ v + q
        return self.proj(x.transpose(1, 2).reshape(batch, length, self.width))


class Torch(nn.Module):
    """nn.MultiheadAttention, called in one of its ways."""

    def __init__(self, batch_first: bool, **call: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, **self.call)[0]


def masks() -> dict[str, Tensor]:
    return {
        "attn_mask": torch.ones(7, 7).triu(1).bool(),
        "key_padding_mask": torch.tensor([[False] * 6 + [True]] * 7)[:2],
    }


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(DIM, 40), nn.GELU(), nn.Linear(40, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "packed": Packed,
    "packed, by hand": lambda: Packed(fused=False),
    "relative position bias": lambda: Packed(fused=False, bias=True),
    "three matrices": Separate,
    "rotary positions": Rotary,
    "pooled heads": Pooled,
    "torch": lambda: Torch(True, need_weights=False),
    "torch with weights": lambda: Torch(True),
    "torch, length first": lambda: Torch(False, need_weights=False),
    "torch with masks": lambda: Torch(True, need_weights=False, **masks()),
}
