"""Layers that replace torch's own layers which cannot work with the remaining channels.

`Constant` replaces a layer that reads or makes no channel, `ZeroChannelSafe` wraps a layer that may
be given no channels, and `PrunedAttention` replaces an `nn.MultiheadAttention` that lost heads.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import conv

from ..rewriting.node_functions import no_channel, one_channel


class Constant(nn.Module):
    """A convolution or linear layer that reads no channel: returns its bias in the output's shape.

    If the layer makes no channel, its output has zero channels.
    """

    bias: nn.Parameter | None
    origin: Tensor  # empty; carries device and dtype where there is no bias

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        assert isinstance(layer, (nn.Linear, conv._ConvNd))
        self.register_parameter("bias", cast("nn.Parameter | None", layer.bias))
        origin = torch.zeros_like(layer.weight.flatten()[:0])
        self.register_buffer("origin", origin.detach(), persistent=False)
        self.space = 0  # number of spatial axes
        self.transposed = isinstance(layer, conv._ConvTransposeNd)
        if isinstance(layer, conv._ConvNd):
            self._copy_convolution(layer)
        else:
            self.channels = layer.out_features

    def _copy_convolution(self, layer: conv._ConvNd) -> None:
        """Copy what determines the spatial size of a convolution's output."""
        self.channels = layer.out_channels
        self.space = len(layer.kernel_size)
        self.stride, self.dilation = layer.stride, layer.dilation
        self.kernel_size, self.output_padding = layer.kernel_size, layer.output_padding
        twice = layer._reversed_padding_repeated_twice  # left and right, last axis first
        self.padding = [a + b for a, b in zip(twice[::2], twice[1::2], strict=True)][::-1]

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Return the bias in the shape of the output for `x`.

        Without `x`, in a branch that was removed, return it for a batch of two single points.
        """
        if x is None:
            shape: tuple[int, ...] = (2, self.channels, *[1] * self.space)
        elif not self.space:
            shape = (*x.shape[:-1], self.channels)
        else:
            sizes = [self._size(k, x.shape[k - self.space]) for k in range(self.space)]
            shape = (*x.shape[: -self.space - 1], self.channels, *sizes)
        if self.bias is None:
            return (self.origin if x is None else x).new_zeros(shape)
        return self.bias.reshape(-1, *[1] * self.space).expand(shape).clone()

    def _size(self, k: int, size: int) -> int:
        """Return the output size of spatial axis `k`, as torch documents it for convolutions."""
        reach = self.dilation[k] * (self.kernel_size[k] - 1)
        if self.transposed:
            grown = (size - 1) * self.stride[k] - self.padding[k]
            return grown + reach + self.output_padding[k] + 1
        return (size + self.padding[k] - reach - 1) // self.stride[k] + 1


class ZeroChannelSafe(nn.Module):
    """Wrap a pooling, upsampling or padding layer so that it accepts an input without channels.

    Many kernels refuse such an input. The layer then runs on one channel of zeros, which is
    dropped from its output.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer returns; with zero channels if `x` has none."""
        out: Tensor = self.layer(x if x.shape[1] else one_channel(x))
        return out if x.shape[1] else no_channel(out)


class PrunedAttention(nn.Module):
    """Multi-head attention with any number of heads over an embedding of any width.

    `nn.MultiheadAttention` computes the width of a head as embedding / heads, which no longer holds
    when heads are removed. The parameters, their names and the call are the same as there.
    """

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    _qkv_same_embed_dim = False  # torch's encoder layers then do not take their fused path

    def __init__(self, old: nn.Module, heads: list[int]) -> None:
        super().__init__()
        assert isinstance(old, nn.MultiheadAttention)
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            self.register_parameter(name, getattr(old, name))
        self.register_parameter("in_proj_bias", old.in_proj_bias)
        self.out_proj = old.out_proj
        self.num_heads, self.head_dim = len(heads), old.head_dim
        self.kept_heads = heads  # indices among the original heads
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
        """Return the output and, if `need_weights`, the attention weights.

        `is_causal` is only a hint, as in torch: the mask itself is in `attn_mask`.
        """
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        parts = [self._projected(x, part) for part, x in enumerate((query, key, value))]
        mixed, weights = parts[0], None
        if self.num_heads:  # kernels and views for zero heads are not reliable
            q, k, v = (self._split_heads(x) for x in parts)
            mask = self._mask(q, attn_mask, key_padding_mask)
            mixed, weights = self._attend(q, k, v, mask, need_weights)
            mixed = mixed.transpose(1, 2).flatten(2)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        out = self.out_proj(mixed)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return softmax(q·kᵀ / √d + mask)·v of every head, and the softmax if it is needed."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout), None
        scores = q @ k.mT * self.head_dim**-0.5
        weights = F.softmax(scores if mask is None else scores + mask, -1)
        return F.dropout(weights, dropout) @ v, weights

    def _projected(self, x: Tensor, part: int) -> Tensor:
        """Return the queries (`part` 0), keys (1) or values (2) of all heads side by side."""
        width = self.num_heads * self.head_dim
        rows = slice(part * width, (part + 1) * width)
        joint = self.in_proj_weight
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weight = separate[part] if joint is None else joint[rows]
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        return F.linear(x, weight, bias)

    def _split_heads(self, x: Tensor) -> Tensor:
        """(batch, length, heads · head) -> (batch, heads, length, head)"""
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(self, q: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Return both masks as one tensor that is added to the scores."""
        total: Tensor | None = None
        if attn_mask is not None:
            total = _additive(attn_mask, q)
            if total.dim() == 3:  # one mask for every original head
                total = total.reshape(q.shape[0], -1, *total.shape[1:])[:, self.kept_heads]
        if padding is not None:
            pad = _additive(padding, q).reshape(q.shape[0], 1, 1, -1)
            total = pad if total is None else total + pad
        return total


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Turn a boolean mask into one of zeros and -inf; a float mask keeps its values."""
    if mask.is_floating_point():
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill(mask, float("-inf"))
