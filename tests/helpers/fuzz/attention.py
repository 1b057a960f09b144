"""Attention in every form, and layers around it."""

from __future__ import annotations

from .layers import _divisors
from .program import Choices, Impossible, Value, Writer, kind


@kind("seq", weight=2)
def multihead_attention(w: Writer, x: Value, p: Choices) -> Value:
    heads = p.pick("heads", *_divisors(x.channels))
    layer = w.module(f"nn.MultiheadAttention({x.channels}, {heads}, batch_first=True)")
    n = x.name
    call = p.pick(
        "call",
        f"{layer}({n}, {n}, {n})[0]",
        f"{layer}({n}, {n}, {n}, need_weights=False)[0]",
        f"{layer}({n}, {n}, {n}, average_attn_weights=False)[0]",
        f"{layer}({n}, {n}[:, :1], {n}[:, :1], need_weights=False)[0]",
    )
    return w.like(x, p.pick("skip", "", f"{n} + ") + call)


@kind("seq", "seq", weight=0.7)
def cross_attention(w: Writer, x: Value, y: Value, p: Choices) -> Value:
    heads = p.pick("heads", *_divisors(x.channels))
    layer = w.module(
        f"nn.MultiheadAttention({x.channels}, {heads}, kdim={y.channels}, vdim={y.channels}, "
        f"batch_first=True)"
    )
    more = p.pick("weights", "", ", need_weights=False")
    return w.like(x, f"{x.name} + {layer}({x.name}, {y.name}, {y.name}{more})[0]")


@kind("seq", weight=0.7)
def encoder_layer(w: Writer, x: Value, p: Choices) -> Value:
    heads = p.pick("heads", *_divisors(x.channels))
    first, inner = p.pick("norm_first", True, False), p.width("inner")
    made = (
        f"nn.TransformerEncoderLayer({x.channels}, {heads}, {inner}, dropout=0.0, "
        f"batch_first=True, norm_first={first})"
    )
    return w.like(x, f"{w.module(made)}({x.name})")


def _heads(w: Writer, x: Value, width: int, heads: int, how: str) -> str:
    """Write a projection whose result has an axis of heads."""
    layer = w.module(f"nn.Linear({x.channels}, {width})")
    each = width // heads
    y = w.name()
    w.run(f"{y} = {layer}({x.name})")
    return {
        "read": f"{y}.view({y}.shape[0], {y}.shape[1], {heads}, -1).transpose(1, 2)",
        "fixed": f"{y}.reshape(-1, {x.shape[0]}, {heads}, {each}).transpose(1, 2)",
        "width": f"{y}.unflatten(2, (-1, {each})).transpose(1, 2)",
        "both": f"{y}.unflatten(2, ({heads}, {each})).permute(0, 2, 1, 3)",
    }[how]


@kind("seq", weight=2)
def hand_written_attention(w: Writer, x: Value, p: Choices) -> Value:
    heads, each = p.pick("heads", 2, 1, 3), p.pick("each", 2, 1, 3)
    how = p.pick("how", "read", "fixed", "width", "both")
    q, k, v = w.name(), w.name(), w.name()
    for name in (q, k, v):
        w.run(f"{name} = {_heads(w, x, heads * each, heads, how)}")
    form = p.pick("form", "softmax", "fused", "causal", "sigmoid", "scale")
    y = w.name()
    if form in ("fused", "causal"):
        causal = ", is_causal=True" if form == "causal" else ""
        w.run(f"{y} = F.scaled_dot_product_attention({q}, {k}, {v}{causal})")
    else:
        scale = f"{q}.shape[-1] ** -0.5" if form == "scale" else f"{each**-0.5}"
        act = "torch.sigmoid({})" if form == "sigmoid" else "{}.softmax(-1)"
        w.run(f"{y} = " + act.format(f"({q} @ {k}.transpose(-2, -1) * {scale})") + f" @ {v}")
    out = w.module(f"nn.Linear({heads * each}, {x.channels})")
    merged = p.pick(
        "merge",
        f"{y}.transpose(1, 2).flatten(2)",
        f"{y}.transpose(1, 2).reshape({y}.shape[0], {y}.shape[2], {heads * each})",
        f"{y}.transpose(1, 2).reshape({y}.shape[0], {y}.shape[2], -1)",
    )
    return w.like(x, p.pick("skip", "", f"{x.name} + ") + f"{out}({merged})")


@kind("seq")
def fused_projections(w: Writer, x: Value, p: Choices) -> Value:
    """Write one layer for queries, keys and values, as in vision transformers."""
    heads, each = p.pick("heads", 2, 3), p.pick("each", 2, 3)
    layer = w.module(f"nn.Linear({x.channels}, {3 * heads * each})")
    y, q, k, v = (w.name() for _ in range(4))
    w.run(f"{y} = {layer}({x.name})")
    form = p.pick("form", "reshape", "chunk", "einsum")
    if form == "chunk":
        parts = [f"{name}.unflatten(2, ({heads}, -1)).transpose(1, 2)" for name in (q, k, v)]
        w.run(f"{q}, {k}, {v} = {y}.chunk(3, -1)", f"{q}, {k}, {v} = {', '.join(parts)}")
    else:
        made = f"{y}.reshape({y}.shape[0], {y}.shape[1], 3, {heads}, {each})"
        w.run(f"{q}, {k}, {v} = {made}.permute(2, 0, 3, 1, 4).unbind(0)")
    z = w.name()
    if form == "einsum":
        w.run(
            f'{z} = torch.einsum("bhqd,bhkd->bhqk", {q}, {k}).softmax(-1)',
            f'{z} = torch.einsum("bhqk,bhkd->bqhd", {z}, {v}).flatten(2)',
        )
    else:
        w.run(f"{z} = F.scaled_dot_product_attention({q}, {k}, {v}).transpose(1, 2).flatten(2)")
    return w.like(x, f"{x.name} + {w.module(f'nn.Linear({heads * each}, {x.channels})')}({z})")


@kind("seq")
def grouped_queries(w: Writer, x: Value, p: Choices) -> Value:
    keys, times, each = p.pick("keys", 2, 1), 2, p.pick("each", 2, 3)
    q, k, v, y = (w.name() for _ in range(4))
    w.run(f"{q} = {_heads(w, x, keys * times * each, keys * times, 'width')}")
    how = p.pick("how", "repeat", "expand", "enable_gqa")
    for name in (k, v):
        made = _heads(w, x, keys * each, keys, "width")
        made += f".repeat_interleave({times}, 1)" if how == "repeat" else ""
        w.run(f"{name} = {made}")
        if how == "expand":
            w.run(f"{name} = {name}[:, :, None].expand(-1, -1, {times}, -1, -1).flatten(1, 2)")
    more = ", enable_gqa=True" if how == "enable_gqa" else ""
    w.run(f"{y} = F.scaled_dot_product_attention({q}, {k}, {v}{more}).transpose(1, 2).flatten(2)")
    out = w.module(f"nn.Linear({keys * times * each}, {x.channels})")
    return w.like(x, f"{x.name} + {out}({y})")


@kind("seq", weight=0.7)
def rotary(w: Writer, x: Value, p: Choices) -> Value:
    c = x.channels
    if c % 2 or c < 4:
        raise Impossible("odd")
    angle = w.buffer(f"torch.randn({c // 2})")
    a, b = w.name(), w.name()
    w.run(f"{a}, {b} = {x.name}.chunk(2, -1)")
    turned = f"[{a} * {angle}.cos() - {b} * {angle}.sin(), {a} * {angle}.sin() + {b}]"
    return w.like(x, f"torch.cat({turned}, -1)")


@kind("seq", weight=0.7)
def embedding(w: Writer, x: Value, p: Choices) -> Value:
    """Write an embedding whose mean is added to a sequence."""
    ints = w.ints()
    layer = w.module(f"nn.Embedding(7, {x.channels})")
    if p.flag("tied"):
        y = w.name()
        w.run(f"{y} = {layer}({ints.name}).mean(1, keepdim=True) + {x.name}")
        return w.like(x, f"F.linear({y}, {layer}.weight)", 7)
    return w.like(x, f"{x.name} + {layer}({ints.name}).mean(1, keepdim=True)")


@kind("ints", weight=3)
def embedded(w: Writer, x: Value, p: Choices) -> Value:
    width = p.width()
    layer = w.module(f"nn.Embedding(7, {width})")
    return w.put("seq", (*x.shape, width), f"{layer}({x.name})")


@kind("ints", weight=1)
def bag(w: Writer, x: Value, p: Choices) -> Value:
    width = p.width()
    mode = p.pick("mode", "mean", "sum")
    return w.put(
        "vec", (width,), f"{w.module(f'nn.EmbeddingBag(7, {width}, mode={mode!r})')}({x.name})"
    )
