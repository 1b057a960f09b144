"""The style transfer network of Johnson et al. (2016), as in PyTorch's example."""

from __future__ import annotations

from torch import Tensor, nn


class StyleNet(nn.Module):
    """Three convolutions down, five residual blocks, three up; images have values of 0 … 255."""

    def __init__(self, width: int = 32, blocks: int = 5) -> None:
        super().__init__()
        wide = 4 * width
        self.down = nn.Sequential(
            *(*_conv(3, width, 9), nn.ReLU()),
            *(*_conv(width, 2 * width, 3, 2), nn.ReLU()),
            *(*_conv(2 * width, wide, 3, 2), nn.ReLU()),
        )
        self.blocks = nn.Sequential(*(ResidualBlock(wide) for _ in range(blocks)))
        self.up = nn.Sequential(
            *(nn.Upsample(scale_factor=2), *_conv(wide, 2 * width, 3), nn.ReLU()),
            *(nn.Upsample(scale_factor=2), *_conv(2 * width, width, 3), nn.ReLU()),
        )
        self.paint = nn.Sequential(nn.ReflectionPad2d(4), nn.Conv2d(width, 3, 9))

    def forward(self, x: Tensor) -> Tensor:
        image: Tensor = self.paint(self.up(self.blocks(self.down(x))))
        return image


class ResidualBlock(nn.Module):
    """Two convolutions, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_conv(width, width, 3), nn.ReLU(), *_conv(width, width, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(x)
        return y


def _conv(inputs: int, width: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.ReflectionPad2d(size // 2),
        nn.Conv2d(inputs, width, size, stride),
        nn.InstanceNorm2d(width, affine=True),
    ]
