"""Layers: convolutions, linear, recurrent, norms, activations, pools, blocks of these."""

from __future__ import annotations

from .program import Choices, Impossible, Value, Writer, kind


def _divisors(number: int, low: int = 2) -> list[int]:
    return [k for k in range(low, number + 1) if number % k == 0]


def _size(size: int, kernel: int, stride: int, pad: int) -> int:
    left = (size + 2 * pad - kernel) // stride + 1
    if left < 1 or size + 2 * pad < kernel:
        raise Impossible("too small a picture")
    return left


def _conv(w: Writer, x: Value, p: Choices, out: int, groups: int = 1) -> Value:
    n = 2 if x.layout == "image" else 1
    kernel, stride = p.pick("kernel", 1, 3), p.pick("stride", 1, 1, 2)
    pad = p.pick("pad", kernel // 2, 0)
    more = f", groups={groups}" if groups > 1 else ""
    more += "" if p.flag("bias") else ", bias=False"
    layer = w.module(
        f"nn.Conv{n}d({x.channels}, {out}, {kernel}, stride={stride}, padding={pad}{more})"
    )
    rest = tuple(_size(size, kernel, stride, pad) for size in x.shape[1:])
    return w.put(x.layout, (out, *rest), f"{layer}({x.name})")


@kind("image", weight=5)
def conv(w: Writer, x: Value, p: Choices) -> Value:
    return _conv(w, x, p, p.width())


@kind("line", weight=3)
def conv1d(w: Writer, x: Value, p: Choices) -> Value:
    return _conv(w, x, p, p.width())


@kind("image", weight=2)
def grouped_conv(w: Writer, x: Value, p: Choices) -> Value:
    groups = p.pick("groups", *_divisors(x.channels))
    return _conv(w, x, p, p.width("out", groups, 12, groups), groups)


@kind("image", weight=2)
def depthwise_conv(w: Writer, x: Value, p: Choices) -> Value:
    return _conv(w, x, p, x.channels * p.pick("multiplier", 1, 2), x.channels)


@kind("line")
def depthwise_conv1d(w: Writer, x: Value, p: Choices) -> Value:
    return _conv(w, x, p, x.channels, x.channels)


@kind("image")
def transposed_conv(w: Writer, x: Value, p: Choices) -> Value:
    groups = p.pick("groups", 1, 1, *_divisors(x.channels))
    out = p.width("out", groups, 12, groups)
    layer = w.module(f"nn.ConvTranspose2d({x.channels}, {out}, 2, stride=2, groups={groups})")
    return w.put("image", (out, x.shape[1] * 2, x.shape[2] * 2), f"{layer}({x.name})")


@kind("line", weight=0.5)
def transposed_conv1d(w: Writer, x: Value, p: Choices) -> Value:
    out = p.width()
    layer = w.module(f"nn.ConvTranspose1d({x.channels}, {out}, 3, padding=1)")
    return w.like(x, f"{layer}({x.name})", out)


def _linear(w: Writer, x: Value, p: Choices) -> Value:
    out = p.width()
    bias = "" if p.flag("bias") else ", bias=False"
    layer = w.module(f"nn.Linear({x.channels}, {out}{bias})")
    return w.like(x, f"{layer}({x.name})", out)


@kind("vec", weight=4)
def linear(w: Writer, x: Value, p: Choices) -> Value:
    return _linear(w, x, p)


@kind("seq", weight=4)
def linear_of_tokens(w: Writer, x: Value, p: Choices) -> Value:
    return _linear(w, x, p)


@kind("seq")
def recurrent(w: Writer, x: Value, p: Choices) -> Value:
    hidden = p.width("hidden", 2, 6)
    cell = p.pick("cell", "GRU", "LSTM", "RNN")
    both, layers = p.flag("bidirectional"), p.pick("layers", 1, 2)
    project = p.pick("proj_size", 0, hidden - 1) if cell == "LSTM" else 0
    more = ", bidirectional=True" if both else ""
    more += f", proj_size={project}" if project else ""
    layer = w.module(
        f"nn.{cell}({x.channels}, {hidden}, num_layers={layers}, batch_first=True{more})"
    )
    out = (project or hidden) * (1 + both)
    if p.flag("last state"):
        hidden_state = f"{layer}({x.name})[1]" + ("[0]" if cell == "LSTM" else "")
        return w.put("vec", (project or hidden,), f"{hidden_state}[-1]")
    return w.like(x, f"{layer}({x.name})[0]", out)


@kind("any", weight=4)
def batch_norm(w: Writer, x: Value, p: Choices) -> Value:
    if x.layout == "seq":
        raise Impossible("layout")
    n = 2 if x.layout == "image" else 1
    more = "" if p.pick("affine", True, True, False) else ", affine=False"
    more += "" if p.pick("track", True, True, True, False) else ", track_running_stats=False"
    return w.like(x, f"{w.module(f'nn.BatchNorm{n}d({x.channels}{more})')}({x.name})")


@kind("image", weight=1.5)
def group_norm(w: Writer, x: Value, p: Choices) -> Value:
    groups = p.pick("groups", *_divisors(x.channels, 1))
    return w.like(x, f"{w.module(f'nn.GroupNorm({groups}, {x.channels})')}({x.name})")


@kind("image", weight=0.7)
def instance_norm(w: Writer, x: Value, p: Choices) -> Value:
    if x.shape[1] * x.shape[2] < 2:
        raise Impossible("one pixel")
    affine, track = p.flag("affine"), p.flag("track")
    layer = f"nn.InstanceNorm2d({x.channels}, affine={affine}, track_running_stats={track})"
    return w.like(x, f"{w.module(layer)}({x.name})")


@kind("seq", weight=2)
def layer_norm(w: Writer, x: Value, p: Choices) -> Value:
    t, c = x.shape
    made = p.pick(
        "form",
        f"nn.LayerNorm({c})",
        f"nn.RMSNorm({c})",
        f"nn.LayerNorm({c}, elementwise_affine=False)",
        f"nn.LayerNorm(({t}, {c}))",
    )
    return w.like(x, f"{w.module(made)}({x.name})")


@kind("vec", weight=0.7)
def layer_norm_of_vector(w: Writer, x: Value, p: Choices) -> Value:
    if p.flag("functional"):
        scale = w.parameter(f"torch.rand({x.channels}) + 0.5")
        return w.like(x, f"F.layer_norm({x.name}, ({x.channels},), {scale})")
    return w.like(x, f"{w.module(f'nn.LayerNorm({x.channels})')}({x.name})")


@kind("image", weight=0.7)
def layer_norm_of_pixels(w: Writer, x: Value, p: Choices) -> Value:
    norm = w.module(f"nn.LayerNorm({x.channels})")
    return w.like(x, f"{norm}({x.name}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)")


@kind("seq", weight=0.7)
def hand_written_rms_norm(w: Writer, x: Value, p: Choices) -> Value:
    scale = w.parameter(f"torch.rand({x.channels}) + 0.5")
    mean = f"{x.name}.pow(2).mean(-1, keepdim=True)"
    return w.like(x, f"{scale} * {x.name} * torch.rsqrt({mean} + 1e-6)")


_ACTIVATIONS = (
    "F.relu({x})",
    "torch.tanh({x})",
    "F.gelu({x})",
    "F.silu({x})",
    "F.leaky_relu({x}, 0.1)",
    "F.softplus({x})",
    "torch.sigmoid({x})",
    "F.hardswish({x})",
    "{x}.clamp(-1, 2)",
    "F.elu({x}, inplace=False)",
    "torch.exp(-{x} * {x})",
    "{x}.abs()",
    "F.relu({x}) ** 2",
    "torch.where({x} > 0, {x}, 0.1 * {x})",
    "{x}.masked_fill({x} < -1, -1.0)",
)


@kind("any", weight=5)
def activation(w: Writer, x: Value, p: Choices) -> Value:
    return w.like(x, p.pick("function", *_ACTIVATIONS).format(x=x.name))


@kind("any", weight=1.5)
def activation_module(w: Writer, x: Value, p: Choices) -> Value:
    made = ["nn.ReLU()", "nn.GELU()", "nn.PReLU()"]
    if x.layout != "seq":
        made.append(f"nn.PReLU({x.channels})")
    return w.like(x, f"{w.module(p.pick('module', *made))}({x.name})")


@kind("any")
def activation_in_place(w: Writer, x: Value, p: Choices) -> Value:
    y = w.like(x, f"{x.name} * 1.1")
    w.run(
        p.pick(
            "how",
            f"F.relu_({y.name})",
            f"{y.name}.clamp_(-1, 1)",
            f"{y.name}.tanh_()",
            f"{y.name} += 0.3",
            f"{y.name} *= {y.name}.detach().sigmoid()",
        )
    )
    return y


@kind("any")
def gated_linear_unit(w: Writer, x: Value, p: Choices) -> Value:
    if x.channels % 2 or x.channels < 4:
        raise Impossible("odd")
    return w.like(x, f"F.glu({x.name}, {x.axis})", x.channels // 2)


@kind("image", weight=2)
def pool(w: Writer, x: Value, p: Choices) -> Value:
    if min(x.shape[1:]) < 2:
        raise Impossible("too small")
    made = p.pick("how", "F.max_pool2d({x}, 2)", "F.avg_pool2d({x}, 2)", "{m}({x})")
    layer = w.module("nn.MaxPool2d(2)") if "{m}" in made else ""
    rest = tuple(size // 2 for size in x.shape[1:])
    return w.put("image", (x.channels, *rest), made.format(x=x.name, m=layer))


@kind("image", weight=0.7)
def adaptive_pool(w: Writer, x: Value, p: Choices) -> Value:
    made, size = p.pick("how", "avg", "max"), p.pick("size", 1, 2)
    if min(x.shape[1:]) < size:
        raise Impossible("too small")
    expression = f"F.adaptive_{made}_pool2d({x.name}, {size})"
    return w.put("image", (x.channels, size, size), expression)


@kind("image", weight=0.7)
def upsample(w: Writer, x: Value, p: Choices) -> Value:
    mode = p.pick("mode", '"nearest"', '"bilinear", align_corners=False')
    expression = f"F.interpolate({x.name}, scale_factor=2, mode={mode})"
    return w.put("image", (x.channels, x.shape[1] * 2, x.shape[2] * 2), expression)


@kind("image", weight=3)
def residual(w: Writer, x: Value, p: Choices) -> Value:
    c, inner = x.channels, p.width("inner")
    first = w.module(f"nn.Conv2d({c}, {inner}, 3, padding=1, bias=False)")
    norm = w.module(f"nn.BatchNorm2d({inner})")
    last = w.module(f"nn.Conv2d({inner}, {c}, 1)")
    y = f"{last}(F.relu({norm}({first}({x.name}))))"
    return w.like(x, p.pick("sum", f"{x.name} + {y}", f"F.relu({x.name} + {y})"))


@kind("image")
def inverted_residual(w: Writer, x: Value, p: Choices) -> Value:
    c, inner = x.channels, x.channels * 2
    grow = w.module(f"nn.Conv2d({c}, {inner}, 1)")
    each = w.module(f"nn.Conv2d({inner}, {inner}, 3, padding=1, groups={inner})")
    last = w.module(f"nn.Conv2d({inner}, {c}, 1, bias=False)")
    return w.like(x, f"{x.name} + {last}(F.relu6({each}({grow}({x.name}))))")


@kind("any", weight=1.5)
def residual_of_linear(w: Writer, x: Value, p: Choices) -> Value:
    if x.layout not in ("seq", "vec"):
        raise Impossible("layout")
    inner = p.width("inner")
    block = w.module(
        f"nn.Sequential(nn.Linear({x.channels}, {inner}), nn.GELU(), "
        f"nn.Linear({inner}, {x.channels}))"
    )
    return w.like(x, f"{x.name} + {block}({x.name})")


@kind("image", weight=1.5)
def dense_block(w: Writer, x: Value, p: Choices) -> Value:
    growth, layers = p.width("growth", 2, 4), p.pick("layers", 1, 2, 3)
    names = [x.name]
    for number in range(layers):
        before = x.channels + number * growth
        layer = w.module(f"nn.Conv2d({before}, {growth}, 3, padding=1)")
        made = w.name()
        w.run(f"{made} = F.relu({layer}(torch.cat([{', '.join(names)}], 1)))")
        names.append(made)
    total = x.channels + layers * growth
    return w.like(x, f"torch.cat([{', '.join(names)}], 1)", total)


@kind("image")
def squeeze_and_excite(w: Writer, x: Value, p: Choices) -> Value:
    c, inner = x.channels, p.width("inner", 2, 6)
    first, last = w.module(f"nn.Linear({c}, {inner})"), w.module(f"nn.Linear({inner}, {c})")
    scale = f"torch.sigmoid({last}(F.relu({first}({x.name}.mean((2, 3))))))"
    return w.like(x, f"{x.name} * {scale}[:, :, None, None]")


@kind("any")
def scale_by_parameter(w: Writer, x: Value, p: Choices) -> Value:
    tail = "" if x.layout in ("seq", "vec") else ", 1" * (len(x.shape) - 1)
    made = f"torch.rand({x.channels}{tail}) + 0.5"
    scale = w.buffer(made) if p.flag("buffer") else w.parameter(made)
    return w.like(x, p.pick("how", f"{x.name} * {scale}", f"{x.name} + {scale}"))


@kind("image", weight=0.7)
def shared_layer(w: Writer, x: Value, p: Choices) -> Value:
    """Write the same layer twice."""
    layer = w.module(f"nn.Conv2d({x.channels}, {x.channels}, 3, padding=1)")
    y = w.like(x, f"F.relu({layer}({x.name}))")
    return w.like(x, f"{layer}({y.name})" + p.pick("skip", "", f" + {x.name}"))


@kind("any", weight=0.7)
def tied_layers(w: Writer, x: Value, p: Choices) -> Value:
    """Write two layers with one weight."""
    if x.layout not in ("seq", "vec"):
        raise Impossible("layout")
    c = x.channels
    first, second = w.module(f"nn.Linear({c}, {c})"), w.module(f"nn.Linear({c}, {c})")
    w.init.append(f"{second}.weight = {first}.weight")
    return w.like(x, f"{second}(F.relu({first}({x.name})))")


@kind("any", weight=0.7)
def transposed_tie(w: Writer, x: Value, p: Choices) -> Value:
    """Write an autoencoder whose decoder is the transposed encoder."""
    if x.layout not in ("seq", "vec"):
        raise Impossible("layout")
    layer = w.module(f"nn.Linear({x.channels}, {p.width('inner')})")
    return w.like(x, f"F.linear(F.relu({layer}({x.name})), {layer}.weight.t())")


@kind("any", weight=0.5)
def normed_weight(w: Writer, x: Value, p: Choices) -> Value:
    if x.layout not in ("seq", "vec"):
        raise Impossible("layout")
    out = p.width()
    norm = p.pick("norm", "weight_norm", "spectral_norm")
    made = f"nn.utils.parametrizations.{norm}(nn.Linear({x.channels}, {out}))"
    return w.like(x, f"{w.module(made)}({x.name})", out)


@kind("any", weight=0.7)
def unused_branch(w: Writer, x: Value, p: Choices) -> Value:
    """Write a result that is not returned."""
    if x.layout == "image":
        layer = w.module(f"nn.Conv2d({x.channels}, {p.width()}, 1)")
    elif x.layout == "line":
        layer = w.module(f"nn.Conv1d({x.channels}, {p.width()}, 1)")
    else:
        layer = w.module(f"nn.Linear({x.channels}, {p.width()})")
    y = w.name()
    w.run(f"{y} = F.relu({layer}({x.name}))")
    more = p.pick("then", "", "view", "norm", "second")
    if more == "view":
        w.run(f"{y} = {y}.reshape({y}.shape[0], -1).sum(1)")
    elif more == "norm":
        w.run(f"{y} = F.normalize({y}, dim={x.axis})")
    elif more == "second":
        w.run(f"{y} = {y}.mean() * {x.name}.mean()")
    return w.like(x, f"{x.name} * 1.0")
