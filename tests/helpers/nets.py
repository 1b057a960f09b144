"""Small networks for the tests, written the way users write them, one or more per pattern.

``NETS`` maps a name to a factory. A factory seeds torch, builds the model in eval mode and float32,
and returns it with example inputs: a tuple of tensors, or a dict of keyword arguments.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = tuple[Tensor, ...] | dict[str, Tensor]
Factory = Callable[[], tuple[nn.Module, Inputs]]
Shape = tuple[int, ...]

NETS: dict[str, Factory] = {}
WHOLE_NETS = {"group_norm_one", "layer_norm_linear"}  # of which nothing is open without norms=True

IMAGE: Shape = (2, 3, 8, 8)
CLASSES = 5


# --------------------------------------------------------------------------------------------------
# helpers


def randomise(model: nn.Module) -> nn.Module:
    """Give norms, PReLUs and biases non-trivial values, and weights that preserve signals."""
    for module in model.modules():
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None:
                continue
            if name == "weight" and value.dim() > 1:
                nn.init.kaiming_normal_(value, nonlinearity="linear")
            elif name == "weight" and isinstance(module, nn.PReLU):
                nn.init.uniform_(value, 0.05, 0.5)
            elif name in ("weight", "running_var"):
                nn.init.uniform_(value, 0.5, 1.5)
            elif name in ("bias", "running_mean"):
                nn.init.normal_(value, 0.1, 0.3)
    return model


def register(name: str, build: Callable[[], nn.Module], *shapes: Shape, **named: Shape) -> None:
    """Add a net to ``NETS``. Shapes are positional inputs, or keyword inputs when named."""

    def factory() -> tuple[nn.Module, Inputs]:
        torch.manual_seed(zlib.crc32(name.encode()))
        model = randomise(build()).eval()
        if named:
            return model, {key: torch.randn(shape) for key, shape in named.items()}
        return model, tuple(torch.randn(shape) for shape in shapes or (IMAGE,))

    assert name not in NETS, name
    NETS[name] = factory


def conv(cin: int, cout: int, k: int = 3, s: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(cin, cout, k, s, k // 2, groups=groups, bias=False)


def cb(cin: int, cout: int, k: int = 3, s: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(conv(cin, cout, k, s, groups), nn.BatchNorm2d(cout))


def cbr(
    cin: int, cout: int, k: int = 3, s: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    return nn.Sequential(*cb(cin, cout, k, s, groups), act())


def head(channels: int, classes: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def around(cin: int, cout: int, *blocks: nn.Module) -> nn.Sequential:
    """A stem that gives ``cin`` channels, the blocks, and a classifier on ``cout`` channels."""
    return nn.Sequential(cbr(3, cin), *blocks, head(cout))


class LambdaLayer(nn.Module):
    def __init__(self, lambd: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lambd = lambd

    def forward(self, x: Tensor) -> Tensor:
        return self.lambd(x)


class Parts(nn.Module):
    """A module from named submodules and a function of this module and its input."""

    def __init__(self, body: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.body = body
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


# --------------------------------------------------------------------------------------------------
# plain chains


class ConvBNReLUForward(nn.Module):
    """Layers in the constructor, functional activations and pooling in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.leaky_relu(self.bn2(self.conv2(x)), 0.1)
        x = F.adaptive_avg_pool2d(x, 1)
        return self.fc(torch.flatten(x, 1))


class DropoutNet(nn.Module):
    """The only net with dropout: nn.Dropout2d, nn.Dropout and F.dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(cbr(3, 8), nn.Dropout2d(0.1), cbr(8, 12, s=2))
        self.fc1 = nn.Linear(12, 16)
        self.drop = nn.Dropout(0.2)
        self.fc2 = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.features(x).mean((2, 3)))
        x = F.dropout(F.relu(self.fc1(x)), 0.2, training=self.training)
        return self.fc2(x)


def conv_nd_net(n: int, cin: int) -> nn.Module:
    """The usual chain with 1d or 3d layers."""
    conv, norm = getattr(nn, f"Conv{n}d"), getattr(nn, f"BatchNorm{n}d")
    pool, mean = getattr(nn, f"MaxPool{n}d"), getattr(nn, f"AdaptiveAvgPool{n}d")
    first = nn.Sequential(conv(cin, 6, 3, padding=1, bias=False), norm(6), nn.ReLU(), pool(2))
    second = nn.Sequential(conv(6, 10, 3, padding=1), norm(10), nn.ReLU(), mean(1))
    return nn.Sequential(first, second, nn.Flatten(), nn.Linear(10, CLASSES))


def conv_bias_net() -> nn.Module:
    first = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True)
    second = nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.Tanh()
    return nn.Sequential(*first, *second, nn.Conv2d(12, 10, 1), nn.SiLU(), head(10))


def padded_conv_net(mode: str) -> nn.Module:
    first = nn.Conv2d(3, 8, 3, padding=1, padding_mode=mode), nn.BatchNorm2d(8), nn.ReLU()
    second = nn.Conv2d(8, 12, 5, padding=2, padding_mode=mode), nn.ReLU()
    depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12, padding_mode=mode)
    return nn.Sequential(*first, *second, depthwise, head(12))


def norm_net(norm: Callable[..., nn.Module], **options: bool) -> nn.Module:
    """Two convolutions, each followed by norm(channels)."""
    first = nn.Conv2d(3, 8, 3, padding=1), norm(8, **options), nn.ReLU()
    return nn.Sequential(*first, conv(8, 16), norm(16, **options), nn.ReLU(), head(16))


def act_net(act: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(cb(3, 8), act(8), nn.Conv2d(8, 12, 3, padding=1), act(12), head(12))


register("conv_bn_relu", lambda: around(8, 10, cbr(8, 12, s=2), cbr(12, 10)))
register("conv_bn_relu_forward", ConvBNReLUForward)
register("conv_bias", conv_bias_net)
register("conv1d", lambda: conv_nd_net(1, 4), (2, 4, 16))
register("conv3d", lambda: conv_nd_net(3, 2), (2, 2, 4, 6, 6))
register("dropout", DropoutNet)
register("padding_reflect", lambda: padded_conv_net("reflect"))
register("padding_circular", lambda: padded_conv_net("circular"))
register("prelu_channel", lambda: act_net(nn.PReLU))
register("prelu_single", lambda: act_net(lambda _: nn.PReLU()))
for key, options in {
    "plain": {},
    "affine": {"affine": True},
    "stats": {"track_running_stats": True},
    "affine_stats": {"affine": True, "track_running_stats": True},
}.items():
    register(f"instance_norm_{key}", partial(norm_net, nn.InstanceNorm2d, **options))
register("group_norm_one", lambda: norm_net(lambda c: nn.GroupNorm(1, c)))
register("group_norm_two", lambda: norm_net(lambda c: nn.GroupNorm(2, c)))
register("group_norm_four", lambda: norm_net(lambda c: nn.GroupNorm(4, c)))
register("group_norm_per_channel", lambda: norm_net(lambda c: nn.GroupNorm(c, c)))
register("group_norm_no_affine", lambda: norm_net(lambda c: nn.GroupNorm(4, c, affine=False)))


# --------------------------------------------------------------------------------------------------
# depthwise, grouped and transposed convolutions


def dw_separable(cin: int, cout: int, s: int = 1) -> nn.Sequential:
    return nn.Sequential(cbr(cin, cin, 3, s, groups=cin), cbr(cin, cout, 1))


class ResNeXtBlock(nn.Module):
    def __init__(self, cin: int, width: int, cout: int, groups: int, s: int = 1) -> None:
        super().__init__()
        self.reduce = cbr(cin, width, 1)
        self.grouped = cbr(width, width, 3, s, groups)
        self.expand = cb(width, cout, 1)
        self.shortcut = nn.Identity() if cin == cout and s == 1 else cb(cin, cout, 1, s)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.expand(self.grouped(self.reduce(x))) + self.shortcut(x))


class InvertedResidual(nn.Module):
    def __init__(self, cin: int, cout: int, s: int, expand: int) -> None:
        super().__init__()
        hidden = cin * expand
        self.use_res_connect = s == 1 and cin == cout
        layers = [] if expand == 1 else [cbr(cin, hidden, 1, act=nn.ReLU6)]
        layers += [cbr(hidden, hidden, 3, s, hidden, act=nn.ReLU6), cb(hidden, cout, 1)]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


def inverted_residual_net() -> nn.Module:
    first, strided = InvertedResidual(8, 8, 1, 1), InvertedResidual(8, 12, 2, 3)
    return around(8, 12, first, strided, InvertedResidual(12, 12, 1, 3))


def up(cin: int, cout: int, k: int, groups: int = 1, **options: Any) -> nn.Sequential:
    layer = nn.ConvTranspose2d(cin, cout, k, stride=2, groups=groups, **options)
    return nn.Sequential(layer, nn.BatchNorm2d(cout), nn.ReLU())


def decoder_net() -> nn.Module:
    decoder = up(12, 10, 2), up(10, 6, 3, padding=1, output_padding=1, bias=False)
    return nn.Sequential(cbr(3, 8, s=2), cbr(8, 12, s=2), *decoder, nn.Conv2d(6, 3, 1))


def grouped_decoder_net() -> nn.Module:
    decoder = up(12, 8, 4, groups=2, padding=1), up(8, 8, 2, groups=8)
    return nn.Sequential(cbr(3, 12, s=2), *decoder, nn.Conv2d(8, 3, 1))


register("conv_transpose", decoder_net)
register("conv_transpose_grouped", grouped_decoder_net)
register(
    "depthwise_separable",
    lambda: around(8, 16, dw_separable(8, 12), dw_separable(12, 16, 2), dw_separable(16, 16)),
)
register("depthwise_multiplier", lambda: around(6, 10, cbr(6, 12, groups=6), cbr(12, 10, 1)))
register(
    "resnext", lambda: around(12, 16, ResNeXtBlock(12, 16, 12, 4), ResNeXtBlock(12, 16, 16, 4, 2))
)
register("grouped_two_wide", lambda: around(16, 12, cbr(16, 24, s=2, groups=2), cbr(24, 12)))
register(
    "grouped_chain",
    lambda: around(12, 10, cbr(12, 16, groups=4), cbr(16, 18, groups=2), cbr(18, 10)),
)
register("inverted_residual", inverted_residual_net)


# --------------------------------------------------------------------------------------------------
# residual blocks


def pad_shortcut(cin: int, cout: int) -> LambdaLayer:
    """The "option A" shortcut of the CIFAR ResNets (planes // 4 there, as cout == 2 * cin)."""
    pad = (cout - cin) // 2
    return LambdaLayer(lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, pad, pad), "constant", 0))


class BasicBlock(nn.Module):
    """Basic block with a projection shortcut. Subclasses have another shortcut."""

    def __init__(self, cin: int, cout: int, s: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(cin, cout, 3, s), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = conv(cout, cout), nn.BatchNorm2d(cout)
        self.extra = cout - cin
        self.changes = s != 1 or cin != cout
        self.downsample = self.make_downsample(cin, cout, s) if self.changes else nn.Sequential()

    def make_downsample(self, cin: int, cout: int, s: int) -> nn.Module:
        return cb(cin, cout, 1, s)

    def shortcut(self, x: Tensor) -> Tensor:
        return self.downsample(x)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x) if self.changes else x
        return F.relu(out)


class BasicBlockPadLambda(BasicBlock):
    def make_downsample(self, cin: int, cout: int, s: int) -> nn.Module:
        return pad_shortcut(cin, cout)


class BasicBlockPoolProjection(BasicBlock):
    """Strided residual with an average pool before the 1x1 projection (ResNet-D)."""

    def make_downsample(self, cin: int, cout: int, s: int) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(2, s), cb(cin, cout, 1))


class BasicBlockCatMulZero(BasicBlock):
    def make_downsample(self, cin: int, cout: int, s: int) -> nn.Module:
        return nn.AvgPool2d(1, s)

    def shortcut(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        return torch.cat((x, x.mul(0)), 1)


class BasicBlockCatNewZeros(BasicBlock):
    def make_downsample(self, cin: int, cout: int, s: int) -> nn.Module:
        return nn.Identity()

    def shortcut(self, x: Tensor) -> Tensor:
        x = x[:, :, ::2, ::2]
        zeros = x.new_zeros(x.size(0), self.extra, x.size(2), x.size(3))
        return torch.cat([x, zeros], dim=1)


class BasicBlockPoolPad(BasicBlockCatNewZeros):
    def shortcut(self, x: Tensor) -> Tensor:
        return F.pad(F.avg_pool2d(x, 2), (0, 0, 0, 0, 0, self.extra))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, cin: int, planes: int, s: int = 1, option: str = "B") -> None:
        super().__init__()
        cout = planes * self.expansion
        self.conv1, self.bn1 = conv(cin, planes, 1), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = conv(planes, planes, 3, s), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = conv(planes, cout, 1), nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if s != 1 or cin != cout:
            self.shortcut = pad_shortcut(cin, cout) if option == "A" else cb(cin, cout, 1, s)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.shortcut(identity)
        return self.relu(out)


class PreActBlock(nn.Module):
    def __init__(self, cin: int, cout: int, s: int = 1) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(cin), conv(cin, cout, 3, s)
        self.bn2, self.conv2 = nn.BatchNorm2d(cout), conv(cout, cout)
        if s != 1 or cin != cout:
            self.shortcut = conv(cin, cout, 1, s)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        return self.conv2(F.relu(self.bn2(out))) + shortcut


class LayerScaleBlock(nn.Module):
    """Residual branch scaled by a learnable value per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(cbr(channels, 2 * channels, 1), cb(2 * channels, channels, 3))
        self.gamma = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.body(x)


class LearnedAdd(nn.Module):
    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(1, channels, size, size) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding


def residual_net(block: Callable[[int, int, int], nn.Module]) -> nn.Module:
    return around(6, 12, block(6, 6, 1), block(6, 12, 2), block(12, 12, 1))


register("residual_projection", lambda: residual_net(BasicBlock))
register("residual_pad_lambda", lambda: residual_net(BasicBlockPadLambda))
register("residual_pad_cat_zeros", lambda: residual_net(BasicBlockCatNewZeros))
register("residual_pad_cat_mul", lambda: residual_net(BasicBlockCatMulZero))
register("residual_pad_avg_pool", lambda: residual_net(BasicBlockPoolPad))
register("residual_avg_pool", lambda: residual_net(BasicBlockPoolProjection))
register("residual_preact", lambda: residual_net(PreActBlock))
register("bottleneck_projection", lambda: around(8, 16, Bottleneck(8, 4, 2), Bottleneck(16, 4)))
register(
    "bottleneck_pad_lambda",
    lambda: around(8, 24, Bottleneck(8, 6, 2, option="A"), Bottleneck(24, 6, option="A")),
)
register("layer_scale", lambda: around(8, 12, LayerScaleBlock(8), LayerScaleBlock(8), cbr(8, 12)))
register("learned_additive", lambda: around(8, 12, LearnedAdd(8, 8), cbr(8, 12)))


# --------------------------------------------------------------------------------------------------
# concatenation and parallel branches


class DenseLayer(nn.Module):
    """torchvision's dense layer: takes the list of all earlier features."""

    def __init__(self, cin: int, growth: int, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(cin), conv(cin, width, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(width), conv(width, growth)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = torch.cat(features, 1)
        x = self.conv1(F.relu(self.norm1(x)))
        return self.conv2(F.relu(self.norm2(x)))


class DenseBlockList(nn.ModuleDict):
    def __init__(self, cin: int, growth: int, layers: int) -> None:
        super().__init__()
        for i in range(layers):
            self.add_module(f"layer{i}", DenseLayer(cin + i * growth, growth, 2 * growth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseBlockCat(nn.Module):
    """Dense block that grows its input one layer after another."""

    def __init__(self, cin: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(cbr(cin + i * growth, growth) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return x


def transition(cin: int, cout: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(cin), nn.ReLU(), conv(cin, cout, 1), nn.AvgPool2d(2, 2))


def dense_net(block: Callable[[int, int, int], nn.Module]) -> nn.Module:
    norm = nn.BatchNorm2d(18)
    return around(8, 18, block(8, 4, 3), transition(20, 10), block(10, 4, 2), norm, nn.ReLU())


def inception(cin: int) -> nn.Module:
    def body(m: Parts, x: Tensor) -> Tensor:
        return torch.cat([m.branch1(x), m.branch2(x), m.branch3(x), m.branch4(x)], 1)

    return Parts(
        body,
        branch1=cbr(cin, 6, 1),
        branch2=nn.Sequential(cbr(cin, 4, 1), cbr(4, 8, 3)),
        branch3=nn.Sequential(cbr(cin, 3, 1), cbr(3, 5, 5)),
        branch4=nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), cbr(cin, 7, 1)),
    )


class UNetTranspose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = cbr(3, 6), cbr(6, 10), cbr(10, 16)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.dec2 = nn.ConvTranspose2d(16, 8, 2, stride=2), cbr(10 + 8, 10)
        self.up1, self.dec1 = nn.ConvTranspose2d(10, 6, 2, stride=2), cbr(6 + 6, 6)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        d1 = self.down1(x)
        d2 = self.down2(self.pool(d1))
        x = self.middle(self.pool(d2))
        x = self.dec2(torch.cat([d2, self.up2(x)], dim=1))
        x = self.dec1(torch.cat([d1, self.up1(x)], dim=1))
        return self.out(x)


class UNetInterpolate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = cbr(3, 6), cbr(6, 10), cbr(10, 12)
        self.dec2, self.dec1 = cbr(12 + 10, 8), cbr(8 + 6, 6)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        d1 = self.down1(x)
        d2 = self.down2(F.max_pool2d(d1, 2))
        x = self.middle(F.max_pool2d(d2, 2))
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        x = self.dec2(torch.cat((x, d2), 1))
        x = F.interpolate(x, size=d1.shape[2:], mode="bilinear", align_corners=False)
        x = self.dec1(torch.cat((x, d1), 1))
        return self.out(x)


def aspp_pooling(cin: int, cout: int) -> nn.Module:
    def body(m: Parts, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        return F.interpolate(m.project(m.pool(x)), size=size, mode="bilinear", align_corners=False)

    return Parts(body, pool=nn.AdaptiveAvgPool2d(1), project=cbr(cin, cout, 1))


class ASPP(nn.Module):
    def __init__(self, cin: int, width: int, cout: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        self.convs = nn.ModuleList([cbr(cin, width, 1)])
        for rate in rates:
            dilated = nn.Conv2d(cin, width, 3, padding=rate, dilation=rate, bias=False)
            self.convs.append(nn.Sequential(dilated, nn.BatchNorm2d(width), nn.ReLU()))
        self.convs.append(aspp_pooling(cin, width))
        self.project = cbr(width * len(self.convs), cout, 1)

    def forward(self, x: Tensor) -> Tensor:
        res = []
        for branch in self.convs:
            res.append(branch(x))
        return self.project(torch.cat(res, dim=1))


def parallel(cin: int, cout: int, body: Callable[[Parts, Tensor], Tensor]) -> nn.Module:
    return Parts(body, a=cbr(cin, cout, 3), b=cb(cin, cout, 1))


class C2f(nn.Module):
    """YOLOv8 block: chunk, append the output of each bottleneck, concatenate all."""

    def __init__(self, cin: int, cout: int, n: int = 2) -> None:
        super().__init__()
        self.c = cout // 2
        self.cv1 = cbr(cin, 2 * self.c, 1, act=nn.SiLU)
        self.cv2 = cbr((2 + n) * self.c, cout, 1, act=nn.SiLU)
        self.m = nn.ModuleList(cbr(self.c, self.c, act=nn.SiLU) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class C2fSplit(C2f):
    """The same block with the sizes of the split written down, and a skip in the bottlenecks."""

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).split((self.c, self.c), 1))
        for m in self.m:
            y.append(y[-1] + m(y[-1]))
        return self.cv2(torch.cat(y, 1))


register("densenet_list", lambda: dense_net(DenseBlockList))
register("densenet_cat", lambda: dense_net(DenseBlockCat))
register("inception", lambda: around(8, 10, inception(8), nn.MaxPool2d(2), cbr(26, 10)))
register("unet_transpose", UNetTranspose)
register("unet_interpolate", UNetInterpolate)
register("aspp", lambda: around(8, 10, ASPP(8, 6, 10, (2, 3))), (3, 3, 8, 8))
register(
    "parallel_sum",
    lambda: around(8, 10, parallel(8, 12, lambda m, x: m.a(x) + m.b(x)), cbr(12, 10)),
)
register(
    "parallel_product",
    lambda: around(8, 10, parallel(8, 12, lambda m, x: m.a(x) * m.b(x)), cbr(12, 10)),
)
register("c2f_chunk", lambda: around(8, 12, C2f(8, 12)))
register("c2f_split", lambda: around(8, 12, C2fSplit(8, 12)))


# --------------------------------------------------------------------------------------------------
# attention and gates


def se_conv(channels: int, squeeze: int, gate: nn.Module) -> nn.Module:
    fc1, fc2 = nn.Conv2d(channels, squeeze, 1), nn.Conv2d(squeeze, channels, 1)
    scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), fc1, nn.ReLU(), fc2, gate)
    return Parts(lambda m, x: m.scale(x) * x, scale=scale)


class SELinear(nn.Module):
    def __init__(self, channels: int, squeeze: int) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        fc1 = nn.Linear(channels, squeeze, bias=False)
        fc2 = nn.Linear(squeeze, channels, bias=False)
        self.fc = nn.Sequential(fc1, nn.ReLU(inplace=True), fc2, nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = self.avg_pool(x).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


def se_mean(channels: int, squeeze: int) -> nn.Module:
    """Squeeze by a mean that keeps dimensions, excite by a functional hard sigmoid."""

    def body(m: Parts, x: Tensor) -> Tensor:
        y = F.hardswish(m.reduce(x.mean((2, 3), keepdim=True)))
        return x * (F.relu6(m.expand(y) + 3.0) / 6.0)

    return Parts(
        body, reduce=nn.Conv2d(channels, squeeze, 1), expand=nn.Conv2d(squeeze, channels, 1)
    )


def spatial_attention(kernel: int = 3) -> nn.Module:
    def body(m: Parts, x: Tensor) -> Tensor:
        avg_out = torch.mean(x, dim=1, keepdim=True)
        max_out, _ = torch.max(x, dim=1, keepdim=True)
        return x * torch.sigmoid(m.conv(torch.cat([avg_out, max_out], dim=1)))

    return Parts(body, conv=conv(2, 1, kernel))


def channel_attention(channels: int, squeeze: int) -> nn.Module:
    """CBAM's channel attention: one MLP shared by the average pool and the max pool."""

    def body(m: Parts, x: Tensor) -> Tensor:
        avg_out = m.mlp(F.adaptive_avg_pool2d(x, 1))
        max_out = m.mlp(F.adaptive_max_pool2d(x, 1))
        return x * torch.sigmoid(avg_out + max_out)

    fc1, fc2 = conv(channels, squeeze, 1), conv(squeeze, channels, 1)
    return Parts(body, mlp=nn.Sequential(fc1, nn.ReLU(), fc2))


def chunk_gate(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=1)
    return a * torch.sigmoid(b)


def max_over_channels(x: Tensor) -> Tensor:
    return x.max(dim=1, keepdim=True).values


def gated_net(gate: nn.Module) -> nn.Module:
    """The gate turns 16 channels into 8."""
    return around(8, 10, cb(8, 16), gate, cbr(8, 10))


class SplitGate(nn.Module):
    """Split with the size of the halves written down."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.c = channels // 2

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.split(self.c, 1)
        return a * torch.tanh(b)


class SplitUnequal(nn.Module):
    """Only the first part goes through a convolution (partial convolution)."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.a, self.b = a, b
        self.conv = conv(a, a)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = torch.split(x, [self.a, self.b], 1)
        return torch.cat((self.conv(x1), x2), 1)


class SliceBranches(nn.Module):
    def __init__(self, channels: int, c: int, cout: int) -> None:
        super().__init__()
        self.c = c
        self.left, self.right = cbr(c, cout), cbr(channels - c, cout, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x[:, : self.c]) + self.right(x[:, self.c :, :, :])


register("se_conv", lambda: around(12, 10, se_conv(12, 4, nn.Sigmoid()), cbr(12, 10)))
register("se_linear_view", lambda: around(12, 10, SELinear(12, 4), cbr(12, 10)))
register("se_hard_sigmoid", lambda: around(12, 10, se_conv(12, 4, nn.Hardsigmoid()), cbr(12, 10)))
register("se_mean_keepdim", lambda: around(12, 10, se_mean(12, 4), cbr(12, 10)))
register("spatial_attention", lambda: around(8, 10, cbr(8, 12), spatial_attention(), cbr(12, 10)))
register("cbam", lambda: around(12, 10, channel_attention(12, 4), spatial_attention(), cbr(12, 10)))
register(
    "max_over_channels",
    lambda: around(8, 10, cbr(8, 12), LambdaLayer(max_over_channels), cbr(1, 10)),
)
register("chunk_gate", lambda: gated_net(LambdaLayer(chunk_gate)))
register("glu_functional", lambda: gated_net(LambdaLayer(lambda x: F.glu(x, dim=1))))
register("glu_module", lambda: gated_net(nn.GLU(dim=1)))
register("split_equal", lambda: gated_net(SplitGate(16)))
register("split_unequal", lambda: around(12, 10, SplitUnequal(4, 8), cbr(12, 10)))
register("slice_channels", lambda: around(12, 10, SliceBranches(12, 5, 10)))


# --------------------------------------------------------------------------------------------------
# channel shuffle, pixel shuffle, upsampling


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, height, width = x.size()
    x = x.view(batch, groups, channels // groups, height, width)
    x = torch.transpose(x, 1, 2).contiguous()
    return x.view(batch, -1, height, width)


class ShuffleV2Unit(nn.Module):
    def __init__(self, cin: int, cout: int, s: int) -> None:
        super().__init__()
        self.stride = s
        half = cout // 2
        if s > 1:
            self.branch1 = nn.Sequential(cb(cin, cin, 3, s, cin), cbr(cin, half, 1))
        self.branch2 = nn.Sequential(
            cbr(cin if s > 1 else half, half, 1), cb(half, half, 3, s, half), cbr(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat((x1, self.branch2(x2)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return channel_shuffle(out, 2)


class ShuffleV1Unit(nn.Module):
    """Grouped 1x1, shuffle with the channel numbers of the constructor, depthwise, grouped 1x1."""

    def __init__(self, channels: int, width: int, groups: int) -> None:
        super().__init__()
        self.groups, self.width = groups, width
        self.compress = cbr(channels, width, 1, groups=groups)
        self.depthwise = cb(width, width, 3, groups=width)
        self.expand = cb(width, channels, 1, groups=groups)

    def shuffle(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        x = x.reshape(b, self.groups, self.width // self.groups, h, w)
        x = x.permute(0, 2, 1, 3, 4)
        return x.reshape(b, self.width, h, w)

    def forward(self, x: Tensor) -> Tensor:
        out = self.depthwise(self.shuffle(self.compress(x)))
        return F.relu(x + self.expand(out))


def shuffle_module_net() -> nn.Module:
    grouped = cbr(12, 16, 1, groups=2)
    return around(12, 10, grouped, nn.ChannelShuffle(2), cbr(16, 12, 1, groups=2), cbr(12, 10))


def pixel_shuffle_net() -> nn.Module:
    upscale = nn.Conv2d(8, 24, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(6)
    return nn.Sequential(cbr(3, 8), *upscale, nn.Conv2d(6, 3, 3, padding=1))


def upsample_net(up1: nn.Module, up2: nn.Module) -> nn.Module:
    encoder = cbr(3, 8, s=2), cbr(8, 12, s=2)
    return nn.Sequential(*encoder, up1, cbr(12, 8), up2, cbr(8, 6), nn.Conv2d(6, 2, 1))


def bilinear_net() -> nn.Module:
    bilinear = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
    return upsample_net(bilinear, nn.UpsamplingBilinear2d(scale_factor=2))


register(
    "shuffle_dynamic", lambda: around(8, 12, ShuffleV2Unit(8, 12, 2), ShuffleV2Unit(12, 12, 1))
)
register("shuffle_baked", lambda: around(18, 10, ShuffleV1Unit(18, 12, 3), cbr(18, 10)))
register("shuffle_module", shuffle_module_net)
register("pixel_shuffle", pixel_shuffle_net)
register("pixel_unshuffle", lambda: around(6, 10, nn.PixelUnshuffle(2), cbr(24, 10)))
register("upsample_nearest", lambda: upsample_net(nn.Upsample(scale_factor=2), nn.Upsample((8, 8))))
register("upsample_bilinear", bilinear_net)


# --------------------------------------------------------------------------------------------------
# from feature maps to linear layers, and back


def layer(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return function if isinstance(function, nn.Module) else LambdaLayer(function)


def flatten_net(flatten: Callable[[Tensor], Tensor]) -> nn.Module:
    """Features of 8 x 4 x 4, flattened by the given function, then two linear layers."""
    features = cbr(3, 6), cbr(6, 8), nn.MaxPool2d(2)
    classifier = nn.Linear(8 * 4 * 4, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    return nn.Sequential(*features, layer(flatten), *classifier)


def pool_net(pool: Callable[[Tensor], Tensor]) -> nn.Module:
    """Features pooled to one vector by the given function."""
    return nn.Sequential(cbr(3, 8), cbr(8, 12, s=2), layer(pool), nn.Linear(12, CLASSES))


def mlp(norm: Callable[[int], nn.Module] | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for cin, cout in ((10, 24), (24, 16)):
        layers += [nn.Linear(cin, cout)]
        layers += [norm(cout)] if norm else []
        layers += [nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(16, CLASSES))


def generator_net(to_map: Callable[[Tensor], Tensor]) -> nn.Module:
    """A linear layer, its output viewed as 8 x 4 x 4, and convolutions."""
    decoder = nn.BatchNorm2d(8), nn.ReLU(), up(8, 6, 4, padding=1, bias=False)
    last = nn.Conv2d(6, 3, 3, padding=1), nn.Tanh()
    return nn.Sequential(nn.Linear(10, 8 * 4 * 4), layer(to_map), *decoder, *last)


def flatten_layer_norm_net() -> nn.Module:
    flat = 8 * 4 * 4
    features = nn.Sequential(cbr(3, 6), cbr(6, 8, s=2))
    return nn.Sequential(features, nn.Flatten(), nn.LayerNorm(flat), nn.Linear(flat, CLASSES))


register("flatten_method", lambda: flatten_net(lambda x: x.flatten(1)))
register("flatten_function", lambda: flatten_net(lambda x: torch.flatten(x, start_dim=1)))
register("flatten_view", lambda: flatten_net(lambda x: x.view(x.size(0), -1)))
register("flatten_view_baked", lambda: flatten_net(lambda x: x.view(-1, 8 * 4 * 4)))
register("flatten_reshape", lambda: flatten_net(lambda x: x.reshape(x.shape[0], -1)))
register("flatten_module", lambda: flatten_net(nn.Flatten()))
register("pool_module", lambda: pool_net(nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten())))
register("pool_mean", lambda: pool_net(lambda x: x.mean((2, 3))))
register("pool_mean_twice", lambda: pool_net(lambda x: x.mean(3).mean(2)))
register("pool_max", lambda: pool_net(lambda x: F.adaptive_max_pool2d(x, 1).flatten(1)))
register("pool_kernel", lambda: pool_net(lambda x: F.avg_pool2d(x, x.size(3)).view(x.size(0), -1)))
register(
    "pool_squeeze", lambda: pool_net(lambda x: F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1))
)
register("mlp", mlp, (3, 10))
register("mlp_3d", mlp, (2, 6, 10))
register("mlp_batch_norm", lambda: mlp(nn.BatchNorm1d), (3, 10))
register("generator_baked", lambda: generator_net(lambda x: x.view(-1, 8, 4, 4)), (3, 10))
register("generator_dynamic", lambda: generator_net(lambda x: x.view(x.size(0), -1, 4, 4)), (3, 10))
register("layer_norm_linear", lambda: mlp(nn.LayerNorm), (3, 10))
register("layer_norm_flatten", flatten_layer_norm_net)


# --------------------------------------------------------------------------------------------------
# shared modules, several inputs, several outputs


class SharedConv(nn.Module):
    """One convolution applied twice, each time followed by a batch norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = cbr(3, 8), conv(8, 8)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.tail = nn.Sequential(cbr(8, 12), head(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.bn1(self.conv(x)))
        x = F.relu(self.bn2(self.conv(x)))
        return self.tail(x)


class SharedHead(nn.Module):
    """A detection like head applied to two feature maps of different size."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1, self.stage2 = cbr(3, 8), cbr(8, 14, s=2)
        self.lateral1, self.lateral2 = nn.Conv2d(8, 10, 1), nn.Conv2d(14, 10, 1)
        self.head = nn.Sequential(cbr(10, 12), nn.Conv2d(12, 4, 1))

    def forward(self, x: Tensor) -> list[Tensor]:
        c1 = self.stage1(x)
        c2 = self.stage2(c1)
        return [self.head(f) for f in (self.lateral1(c1), self.lateral2(c2))]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.depth = cbr(3, 8), cbr(1, 6)
        self.fuse = nn.Sequential(cbr(14, 10), head(10))

    def forward(self, image: Tensor, depth: Tensor) -> Tensor:
        return self.fuse(torch.cat([self.image(image), self.depth(depth)], dim=1))


class ImageAndTable(nn.Module):
    """Keyword inputs; the table modulates the channels of the image features (FiLM)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(cbr(3, 8), cbr(8, 12))
        self.film = nn.Linear(7, 2 * 12)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, *, image: Tensor, table: Tensor) -> Tensor:
        scale, shift = self.film(table).chunk(2, dim=1)
        x = self.features(image) * scale[:, :, None, None] + shift[:, :, None, None]
        return self.fc(F.relu(x).mean(dim=(2, 3)))


class OutputsTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.deep = cbr(3, 8), cbr(8, 12, s=2)
        self.logits, self.boxes = head(12), nn.Conv2d(8, 4, 1)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low = self.body(x)
        deep = self.deep(low)
        return self.logits(deep), self.boxes(low), deep

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(x)[:2]


class OutputsDict(OutputsTuple):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits, boxes, _ = self.heads(x)
        return {"logits": logits, "boxes": boxes}


class OutputsNested(OutputsTuple):
    """Also returns the deep feature map itself, whose channels are then part of the interface."""

    def forward(self, x: Tensor) -> dict[str, object]:
        logits, boxes, deep = self.heads(x)
        return {"logits": logits, "extra": [boxes, (deep, {"probability": logits.softmax(1)})]}


class AuxiliaryHead(nn.Module):
    """GoogLeNet like: the auxiliary classifier runs, and is returned, in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = cbr(3, 10), nn.Sequential(cbr(10, 12, s=2), cbr(12, 12))
        self.aux = nn.Sequential(cbr(10, 6, 1), head(6))
        self.fc = head(12)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.early(x)
        aux = self.aux(x) if self.training else None
        x = self.fc(self.late(x))
        if aux is not None:
            return x, aux
        return x


register("shared_conv", SharedConv)
register("shared_head", SharedHead)
register("two_inputs", TwoInputs, IMAGE, (2, 1, 8, 8))
register("keyword_inputs", ImageAndTable, image=IMAGE, table=(2, 7))
register("outputs_tuple", OutputsTuple)
register("outputs_dict", OutputsDict)
register("outputs_nested", OutputsNested)
register("auxiliary_head", AuxiliaryHead)


# --------------------------------------------------------------------------------------------------
# whole networks


def resnet20(width: int = 16, num_classes: int = 10) -> nn.Module:
    """CIFAR ResNet-20 with option A shortcuts, for 3x32x32 images."""
    blocks, cin = [], width
    for cout, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        for i in range(3):
            blocks.append(BasicBlockPadLambda(cin, cout, stride if i == 0 else 1))
            cin = cout
    return nn.Sequential(cbr(3, width), *blocks, head(cin, num_classes))


def mobilenetv2_small(num_classes: int = 10) -> nn.Module:
    """A narrow and short MobileNetV2, for 3x32x32 images."""
    settings = ((1, 8, 1, 1), (4, 12, 2, 1), (4, 16, 2, 2), (4, 24, 3, 2))  # expand, c, n, stride
    blocks, cin = [], 8
    for expand, cout, n, stride in settings:
        for i in range(n):
            blocks.append(InvertedResidual(cin, cout, stride if i == 0 else 1, expand))
            cin = cout
    last = cbr(cin, 64, 1, act=nn.ReLU6)
    return nn.Sequential(cbr(3, 8, act=nn.ReLU6), *blocks, last, head(64, num_classes))


def digits_resnet(width: int = 16, num_classes: int = 10) -> nn.Module:
    """A small residual net for the 1x8x8 images of scikit-learn's digits."""
    wide = 2 * width
    blocks = BasicBlock(width, width), BasicBlock(width, wide, 2), BasicBlock(wide, wide)
    return nn.Sequential(cbr(1, width), *blocks, head(wide, num_classes))


register("resnet20", resnet20, (2, 3, 32, 32))
register("mobilenetv2_small", mobilenetv2_small, (2, 3, 32, 32))
register("digits_resnet", lambda: digits_resnet(width=8), (2, 1, 8, 8))
