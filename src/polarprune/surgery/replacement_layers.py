"""What stands in for layers that have nothing left to read, to make or to pool."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules import conv

from ..rewriting.interpreter import no_channel, one_channel


class Constant(nn.Module):
    """What is left of a layer that reads no channel: its bias, at the shape of its output.

    Also stands for a layer that makes no channel: its output then has none.
    """

    bias: nn.Parameter | None
    origin: Tensor  # knows device and type where there is no bias

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.register_parameter("bias", layer.bias)  # type: ignore[arg-type]
        origin = torch.zeros_like(layer.weight.flatten()[:0])  # type: ignore[operator]
        self.register_buffer("origin", origin.detach(), persistent=False)
        self.space = 0
        self.transposed = isinstance(layer, conv._ConvTransposeNd)
        if isinstance(layer, conv._ConvNd):
            self.channels = layer.out_channels
            self.space = len(layer.kernel_size)
            self.stride, self.dilation = layer.stride, layer.dilation
            self.kernel_size, self.output_padding = layer.kernel_size, layer.output_padding
            twice = layer._reversed_padding_repeated_twice
            self.padding = [a + b for a, b in zip(twice[::2], twice[1::2], strict=True)][::-1]
        else:
            self.channels = int(layer.out_features)  # type: ignore[arg-type]

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Without an input (in a block that was taken out): on two points instead of a map."""
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
        reach = self.dilation[k] * (self.kernel_size[k] - 1)
        if self.transposed:
            return (
                (size - 1) * self.stride[k] - self.padding[k] + reach + self.output_padding[k] + 1
            )
        return (size + self.padding[k] - reach - 1) // self.stride[k] + 1


class Hollow(nn.Module):
    """A pool (and the like) that may be given no channels: then only a shape is left of it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1]:
            return self.layer(x)  # type: ignore[no-any-return]
        return no_channel(self.layer(one_channel(x)))
