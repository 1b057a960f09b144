"""Operations that move channels: sums, concatenations, splits, shuffles, changes of layout."""

from __future__ import annotations

from .layers import _divisors
from .program import Choices, Impossible, Value, Writer, kind


def _same(x: Value, y: Value) -> None:
    if x.layout != y.layout or x.shape != y.shape or x.name == y.name:
        raise Impossible("shapes differ")


@kind("any", "any", weight=3)
def add(w: Writer, x: Value, y: Value, p: Choices) -> Value:
    _same(x, y)
    a, b = x.name, y.name
    return w.like(
        x,
        p.pick(
            "how",
            f"{a} + {b}",
            f"{a} - 0.5 * {b}",
            f"torch.add({a}, {b})",
            f"{a} * torch.sigmoid({b})",
            f"torch.maximum({a}, {b})",
            f"torch.lerp({a}, {b}, 0.3)",
        ),
    )


@kind("image", "vec")
def add_vector(w: Writer, x: Value, y: Value, p: Choices) -> Value:
    if x.channels != y.channels:
        raise Impossible("shapes differ")
    return w.like(x, f"{x.name} + {y.name}[:, :, None, None]")


@kind("seq", "vec")
def add_vector_to_tokens(w: Writer, x: Value, y: Value, p: Choices) -> Value:
    if x.channels != y.channels:
        raise Impossible("shapes differ")
    return w.like(x, f"{x.name} + {y.name}.unsqueeze(1)")


@kind("any", "any", weight=3)
def concatenate(w: Writer, x: Value, y: Value, p: Choices) -> Value:
    if x.layout != y.layout or x.wide(1) != y.wide(1):
        raise Impossible("shapes differ")
    return w.like(x, f"torch.cat([{x.name}, {y.name}], {x.axis})", x.channels + y.channels)


@kind("any", weight=2)
def split(w: Writer, x: Value, p: Choices) -> Value:
    if x.channels < 4:
        raise Impossible("too few")
    first = p.pick("first", *range(1, x.channels))
    a, b, d = w.name(), w.name(), x.axis
    rest = x.channels - first
    how = p.pick(
        "how",
        f"{x.name}.split([{first}, {rest}], {d})",
        f"torch.tensor_split({x.name}, ({first},), {d})",
        f"({x.name}.narrow({d}, 0, {first}), {x.name}.narrow({d}, {first}, {rest}))",
        f"torch.split({x.name}, ({first}, {x.name}.shape[{d}] - {first}), dim={d})",
    )
    w.run(f"{a}, {b} = {how}")
    use = p.pick("use", "cat", "first", "second")
    if use == "first":
        return w.like(x, f"F.relu({a})", first)
    if use == "second":
        return w.like(x, f"F.relu({b})", rest)
    return w.like(x, f"torch.cat([{b}, torch.tanh({a})], {d})")


@kind("any", weight=1.5)
def chunk(w: Writer, x: Value, p: Choices) -> Value:
    if x.channels % 2 or x.channels < 4:
        raise Impossible("odd")
    a, b, d, half = w.name(), w.name(), x.axis, x.channels // 2
    how = p.pick(
        "how",
        f"{x.name}.chunk(2, {d})",
        f"{x.name}.unflatten({d}, (2, {half})).unbind({d})",
        f"{x.name}.split({half}, {d})",
        f"{x.name}.unflatten({d}, ({half}, 2)).unbind({d + 1})",
    )
    w.run(f"{a}, {b} = {how}")
    return w.like(x, p.pick("use", f"{a} * torch.sigmoid({b})", f"{a} + {b}", f"{b}"), half)


@kind("any", weight=1.5)
def slice_(w: Writer, x: Value, p: Choices) -> Value:
    if x.channels < 3:
        raise Impossible("too few")
    k, c = p.pick("k", *range(1, x.channels - 1)), x.channels
    lead = ":, " * (x.axis)
    form = p.pick("form", ":{k}", "{k}:", "::2", "-{k}:", "1:-1")
    left = {":{k}": k, "{k}:": c - k, "::2": (c + 1) // 2, "-{k}:": k, "1:-1": c - 2}[form]
    return w.like(x, f"{x.name}[{lead}{form.format(k=k)}]", left)


@kind("any")
def reorder(w: Writer, x: Value, p: Choices) -> Value:
    d, c = x.axis, x.channels
    order = w.buffer(f"torch.arange({c}).flip(0)")
    lead = ":, " * d
    return w.like(
        x,
        p.pick(
            "how",
            f"{x.name}.flip({d})",
            f"{x.name}.roll(1, {d})",
            f"{x.name}[{lead}{order}]",
            f"{x.name}.index_select({d}, {order})",
            f"{x.name}[{lead}[{', '.join(str((k * 3 + 1) % c) for k in range(c))}]]",
            f"{x.name}[{lead}torch.arange({c} - 1, -1, -1)]",
        ),
    )


@kind("image")
def shuffle(w: Writer, x: Value, p: Choices) -> Value:
    c, (h, v) = x.channels, x.shape[1:]
    g = p.pick("groups", *_divisors(c)[:-1])
    sizes = p.pick("sizes", "read", "fixed", "module")
    if sizes == "module":
        return w.like(x, f"{w.module(f'nn.ChannelShuffle({g})')}({x.name})")
    if sizes == "read":
        b, n, h_, v_ = (f"{x.name}.shape[{k}]" for k in range(4))
        made = f"{x.name}.view({b}, {g}, {n} // {g}, {h_}, {v_})"
        return w.like(x, f"{made}.transpose(1, 2).reshape({b}, {n}, {h_}, {v_})")
    made = f"{x.name}.reshape(-1, {g}, {c // g}, {h}, {v}).transpose(1, 2)"
    return w.like(x, f"{made}.reshape(-1, {c}, {h}, {v})")


@kind("image")
def pixel_shuffle(w: Writer, x: Value, p: Choices) -> Value:
    c, h, v = x.shape
    if c % 4 == 0 and not p.flag("back"):
        how = p.pick("how", f"F.pixel_shuffle({x.name}, 2)", f"{{m}}({x.name})")
        layer = w.module("nn.PixelShuffle(2)") if "{m}" in how else ""
        return w.put("image", (c // 4, h * 2, v * 2), how.format(m=layer))
    if h % 2 or v % 2:
        raise Impossible("odd")
    return w.put("image", (c * 4, h // 2, v // 2), f"F.pixel_unshuffle({x.name}, 2)")


@kind("image")
def pad(w: Writer, x: Value, p: Choices) -> Value:
    c, h, v = x.shape
    if p.flag("channels"):
        more = p.pick("more", 1, 2, 3)
        return w.like(x, f"F.pad({x.name}, (0, 0, 0, 0, {more}, 1))", c + more + 1)
    mode = p.pick("mode", '"constant"', '"reflect"', '"replicate"')
    if min(h, v) < 2:
        raise Impossible("too small")
    return w.put("image", (c, h, v + 2), f"F.pad({x.name}, (1, 1, 0, 0), mode={mode})")


@kind("any", weight=0.7)
def repeat(w: Writer, x: Value, p: Choices) -> Value:
    d, ones = x.axis, ["1"] * (len(x.shape) + 1)
    ones[d] = "2"
    how = p.pick(
        "how", f"{x.name}.repeat({', '.join(ones)})", f"{x.name}.repeat_interleave(2, {d})"
    )
    return w.like(x, how, x.channels * 2)


@kind("any", weight=0.7)
def reduce_channels(w: Writer, x: Value, p: Choices) -> Value:
    """Write an operation that mixes all channels and returns the result to each."""
    d = x.axis
    how = p.pick(
        "how",
        "{x} - {x}.mean({d}, keepdim=True)",
        "{x} * {x}.amax({d}, keepdim=True)",
        "{x}.softmax({d})",
        "F.normalize({x}, dim={d})",
        "{x}.cumsum({d})",
        "{x}.sort({d}).values",
        "{x} / {x}.shape[{d}]",
        "{x}.sum({d}, keepdim=True) / {x}.shape[{d}] + {x}",
        "{x} + {x}.argmax({d}, keepdim=True)",
    )
    return w.like(x, how.format(x=x.name, d=d))


@kind("any", weight=0.7)
def einsum(w: Writer, x: Value, p: Choices) -> Value:
    out = p.width()
    weight = w.parameter(f"torch.randn({x.channels}, {out}) * 0.3")
    form = {
        "image": "bchw,cd->bdhw",
        "line": "bct,cd->bdt",
        "seq": "btc,cd->btd",
        "vec": "bc,cd->bd",
    }[x.layout]
    return w.like(x, f'torch.einsum("{form}", {x.name}, {weight})', out)


@kind("any", weight=0.7)
def matrix_product(w: Writer, x: Value, p: Choices) -> Value:
    if x.layout not in ("seq", "vec"):
        raise Impossible("layout")
    out = p.width()
    weight = w.parameter(f"torch.randn({x.channels}, {out}) * 0.3")
    return w.like(
        x, p.pick("how", f"{x.name} @ {weight}", f"torch.matmul({x.name}, {weight})"), out
    )


# --- changes of layout ----------------------------------------------------------------------------


@kind("image", weight=2)
def to_vector(w: Writer, x: Value, p: Choices) -> Value:
    c, h, v = x.shape
    how = p.pick(
        "how",
        "{x}.mean((2, 3))",
        "{x}.amax((2, 3))",
        "flat",
        "{x}.flatten(1)",
        "F.adaptive_avg_pool2d({x}, 1).squeeze()",
        "{x}.sum(-1).sum(-1)",
        "F.adaptive_avg_pool2d({x}, 1)[:, :, 0, 0]",
        "F.adaptive_max_pool2d({x}, 1).squeeze(-1).squeeze(-1)",
        "{x}.reshape({x}.shape[0], -1)",
        "{x}.view({x}.size(0), {f})",
    )
    if how == "flat":
        layer = w.module("nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())")
        return w.put("vec", (c * 4,), f"{layer}({x.name})")
    flat = "flatten" in how or "reshape" in how or "view" in how
    return w.put("vec", (c * h * v if flat else c,), how.format(x=x.name, f=c * h * v))


@kind("image", weight=2)
def to_tokens(w: Writer, x: Value, p: Choices) -> Value:
    c, h, v = x.shape
    if h * v > 36:
        raise Impossible("long")
    n = x.name
    return w.put(
        "seq",
        (h * v, c),
        p.pick(
            "how",
            f"{n}.flatten(2).transpose(1, 2)",
            f"{n}.permute(0, 2, 3, 1).reshape({n}.shape[0], -1, {c})",
            f"{n}.permute(0, 2, 3, 1).flatten(1, 2)",
            f"{n}.view({n}.shape[0], {n}.shape[1], -1).mT",
        ),
    )


@kind("image")
def to_line(w: Writer, x: Value, p: Choices) -> Value:
    c, h, v = x.shape
    if h * v > 36:
        raise Impossible("long")
    return w.put("line", (c, h * v), f"{x.name}.flatten(2)")


@kind("line", weight=2)
def line_to_tokens(w: Writer, x: Value, p: Choices) -> Value:
    how = p.pick("how", f"{x.name}.transpose(1, 2)", f"{x.name}.permute(0, 2, 1)")
    return w.put("seq", x.shape[::-1], how)


@kind("line")
def line_to_vector(w: Writer, x: Value, p: Choices) -> Value:
    return w.put("vec", x.shape[:1], p.pick("how", f"{x.name}.mean(2)", f"{x.name}[..., 0]"))


@kind("seq", weight=0.7)
def tokens_to_line(w: Writer, x: Value, p: Choices) -> Value:
    return w.put("line", x.shape[::-1], f"{x.name}.mT")


@kind("seq", weight=2)
def tokens_to_vector(w: Writer, x: Value, p: Choices) -> Value:
    t, c = x.shape
    n = x.name
    how = p.pick(
        "how",
        f"{n}.mean(1)",
        f"{n}[:, 0]",
        f"{n}[:, -1]",
        f"{n}.flatten(1)",
        f"{n}.max(1).values",
        f"{n}.select(1, 0)",
    )
    return w.put("vec", (t * c if "flatten" in how else c,), how)


@kind("seq", weight=0.7)
def tokens_to_image(w: Writer, x: Value, p: Choices) -> Value:
    t, c = x.shape
    h = p.pick("rows", *_divisors(t, 1))
    n = x.name
    return w.put(
        "image",
        (c, h, t // h),
        p.pick(
            "how",
            f"{n}.transpose(1, 2).unflatten(2, ({h}, {t // h}))",
            f"{n}.transpose(1, 2).reshape({n}.shape[0], {n}.shape[2], {h}, -1)",
            f"{n}.transpose(1, 2).reshape(-1, {c}, {h}, {t // h})",
            f"{n}.unflatten(1, ({h}, -1)).permute(0, 3, 1, 2)",
        ),
    )


@kind("seq", weight=0.5)
def class_token(w: Writer, x: Value, p: Choices) -> Value:
    t, c = x.shape
    token = w.parameter(f"torch.randn(1, 1, {c})")
    place = w.parameter(f"torch.randn(1, {t + 1}, {c})")
    y = w.put(
        "seq", (t + 1, c), f"torch.cat([{token}.expand({x.name}.shape[0], -1, -1), {x.name}], 1)"
    )
    return w.like(y, f"{y.name} + {place}") if p.flag("positions") else y


@kind("vec")
def vector_to_image(w: Writer, x: Value, p: Choices) -> Value:
    c = x.channels
    if c % 4:
        raise Impossible("odd")
    how = p.pick(
        "how",
        "{x}.view(-1, {n}, 2, 2)",
        "{x}.unflatten(1, ({n}, 2, 2))",
        "{m}({x})",
        "{x}.reshape({x}.shape[0], -1, 2, 2)",
        "{x}.unflatten(1, ({x}.shape[1] // 4, 2, 2))",
    )
    layer = w.module(f"nn.Unflatten(1, ({c // 4}, 2, 2))") if "{m}" in how else ""
    return w.put("image", (c // 4, 2, 2), how.format(x=x.name, n=c // 4, m=layer))


@kind("vec")
def vector_to_tokens(w: Writer, x: Value, p: Choices) -> Value:
    c = x.channels
    n = p.pick("n", *_divisors(c))
    how = p.pick(
        "how",
        "{x}.reshape({x}.shape[0], -1, {n})",
        "{x}.unflatten(1, ({t}, {n}))",
        "{x}.unflatten(1, (-1, {n}))",
        "{x}.view(-1, {t}, {n})",
    )
    return w.put("seq", (c // n, n), how.format(x=x.name, n=n, t=c // n))


@kind("vec", weight=0.7)
def outer_sum(w: Writer, x: Value, p: Choices) -> Value:
    """Write a vector that is expanded over the pixels of a small image."""
    return w.put("image", (x.channels, 2, 2), f"{x.name}[:, :, None, None].expand(-1, -1, 2, 2)")


@kind("any", weight=0)
def head(w: Writer, x: Value, p: Choices) -> Value:
    """Write a classifier."""
    means = {"image": ".mean((2, 3))", "line": ".mean(2)", "seq": ".mean(1)", "vec": ""}
    layer = w.module(f"nn.Linear({x.channels}, 5)")
    return w.put("vec", (5,), f"{layer}({x.name}{means[x.layout]})")
