"""Transformers in plain torch: the character-level GPT of nanoGPT, and DeiT-Tiny for small images.

Both normalise before attention and before the MLP. Their attention is torch's fused one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_STD = 0.02  # of new weights


class Attention(nn.Module):
    """Self-attention with queries, keys and values from one matrix.

    Args:
        width: Channels of the residual stream.
        heads: Number of heads.
        causal: Whether a position sees only itself and the positions before it.
        dropout: Probability that an attention weight or an output is dropped.
        bias: Whether the linear layers have biases.
    """

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.project = nn.Linear(width, width, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        packed = self.qkv(x).view(batch, length, 3, self.heads, -1)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=self.causal)
        out: Tensor = self.drop(self.project(y.transpose(1, 2).flatten(2)))
        return out


class Block(nn.Module):
    """Attention and an MLP of four times the width, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float, bias: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, heads, causal=causal, dropout=dropout, bias=bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=bias),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=bias),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    """A decoder whose output layer is its embedding; the defaults are nanoGPT's for characters.

    The weights are drawn as in GPT-2: the layers that write to the residual stream have smaller
    ones, because the stream adds up two of them for each block.

    Args:
        tokens: Number of different tokens.
        context: Number of positions.
        width: Channels of the residual stream.
        heads: Heads of each block.
        blocks: Number of blocks.
        dropout: Probability that a value is dropped.
    """

    def __init__(
        self,
        tokens: int = 65,
        context: int = 256,
        width: int = 384,
        heads: int = 6,
        blocks: int = 6,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, causal=True, dropout=dropout, bias=False) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            y = block(y)
        return F.linear(self.norm(y), self.tokens.weight)


class DeiT(nn.Module):
    """A vision transformer with a class token and learned positions; the defaults are DeiT-Tiny/8.

    Args:
        classes: Number of outputs.
        side: Side of the images, in pixels.
        patch: Side of a patch, in pixels.
        width: Channels of the residual stream.
        heads: Heads of each block.
        blocks: Number of blocks.
    """

    def __init__(
        self,
        classes: int = 200,
        side: int = 64,
        patch: int = 8,
        width: int = 192,
        heads: int = 3,
        blocks: int = 12,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(
            Block(width, heads, causal=False, dropout=0.0, bias=True) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        for parameter in (self.token, self.positions):
            nn.init.normal_(parameter, std=_STD)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(len(y), -1, -1), y], 1) + self.positions
        for block in self.blocks:
            y = block(y)
        logits: Tensor = self.head(self.norm(y[:, 0]))
        return logits


def _initialise(model: nn.Module) -> None:
    """Draw all weights as GPT-2 does; biases are zero."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        for layer in (block.attention.project, block.mlp[2]):
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight, std=_STD / math.sqrt(2 * len(blocks)))
