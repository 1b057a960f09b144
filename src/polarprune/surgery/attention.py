"""What is left of `nn.MultiheadAttention` when heads have gone.

torch's own module computes the width of a head as embedding / heads, which no longer holds. This
one keeps its parameters, their names and the way it is called.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention with any number of heads over an embedding of any width."""

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    _qkv_same_embed_dim = False  # keeps torch's encoder layers off their fused path

    def __init__(self, old: nn.MultiheadAttention, heads: list[int]) -> None:
        super().__init__()
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            self.register_parameter(name, getattr(old, name))
        self.register_parameter("in_proj_bias", old.in_proj_bias)
        self.out_proj = old.out_proj
        self.num_heads, self.head_dim = len(heads), old.head_dim
        self.kept_heads = heads  # of those that there were
        self.embed_dim, self.batch_first, self.dropout = old.embed_dim, old.batch_first, old.dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        made = [self._made(x, part) for part, x in enumerate((query, key, value))]
        mixed, weights = made[0], None
        if self.num_heads:  # kernels for no heads, and views as none, are not to be relied on
            q, k, v = (self._heads(x) for x in made)
            mask = self._mask(q, attn_mask, key_padding_mask)
            dropout = self.dropout if self.training else 0.0
            if need_weights:
                scores = q @ k.mT * self.head_dim**-0.5
                weights = F.softmax(scores if mask is None else scores + mask, -1)
                mixed = F.dropout(weights, dropout) @ v
                weights = weights.mean(1) if average_attn_weights else weights
            else:
                mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
            mixed = mixed.transpose(1, 2).flatten(2)
        out = self.out_proj(mixed)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _made(self, x: Tensor, part: int) -> Tensor:
        """Queries, keys or values of all heads side by side."""
        width = self.num_heads * self.head_dim
        rows = slice(part * width, (part + 1) * width)
        whole = self.in_proj_weight
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weight = separate[part] if whole is None else whole[rows]
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        return F.linear(x, weight, bias)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, heads · head) -> (batch, heads, length, head)"""
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(self, q: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Both masks as one that is added to the scores."""
        total: Tensor | None = None
        if attn_mask is not None:
            total = _added(attn_mask, q)
            if total.dim() == 3:  # one for every head of the original
                total = total.reshape(q.shape[0], -1, *total.shape[1:])[:, self.kept_heads]
        if padding is not None:
            pad = _added(padding, q).reshape(q.shape[0], 1, 1, -1)
            total = pad if total is None else total + pad
        return total


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill(mask, float("-inf"))
