"""What code around the layers does: branches, fixed indices, writes, loops, caches, draws."""

from __future__ import annotations

from .program import Choices, Impossible, Value, Writer, kind


def _lead(x: Value) -> str:
    return ":, " * x.axis


@kind("any", weight=1.5)
def branch_on_width(w: Writer, x: Value, p: Choices) -> Value:
    n, d = x.name, x.axis
    other = 1 if x.layout == "seq" else len(x.shape)
    question = p.pick(
        "question",
        f"{n}.shape[{d}] > {max(1, x.channels // 2)}",
        f"{n}.shape[{d}] >= {n}.shape[{other}]",
        f"{n}.size({d}) % 2 == 0",
        f"{n}.shape[{d}] == {x.channels}",
        f"{n}.shape[{d}] < {x.channels}",
    )
    return w.like(x, f"F.relu({n}) if {question} else torch.tanh({n})")


@kind("any", weight=1)
def branch_on_size(w: Writer, x: Value, p: Choices) -> Value:
    n = x.name
    question = f"{n}.shape[0] > 3"
    if x.layout == "image":
        question = p.pick(
            "question",
            question,
            f"{n}.shape[2] > {x.shape[1]}",
            f"{n}.shape[2] == {n}.shape[3]",
            f"{n}.shape[-1] % 4 == 0",
        )
    return w.like(x, f"F.relu({n}) if {question} else torch.tanh({n})")


@kind("any", weight=0.5)
def branch_on_values(w: Writer, x: Value, p: Choices) -> Value:
    n = x.name
    return w.like(x, f"F.relu({n}) if {n}.mean() > 0 else torch.tanh({n})")


@kind("any", weight=0.7)
def loop_over_width(w: Writer, x: Value, p: Choices) -> Value:
    y = w.like(x, f"{x.name} * 1.0")
    bound = p.pick("bound", f"{x.name}.shape[{x.axis}]", "attribute", f"min({x.name}.shape[0], 3)")
    if bound == "attribute":
        layer = w.module(f"nn.Linear({x.channels}, {x.channels})")
        if x.layout in ("seq", "vec"):
            w.run(f"{y.name} = {layer}({y.name})")
        bound = f"{layer}.out_features"
    w.run(f"for _ in range({bound}):", f"    {y.name} = {y.name} * 1.05")
    return y


@kind("any", weight=1.5)
def read_fixed_channel(w: Writer, x: Value, p: Choices) -> Value:
    n, d, k = x.name, x.axis, p.pick("k", *range(x.channels))
    kept = p.pick(
        "how",
        f"{n}[{_lead(x)}{k}:{k + 1}]",
        f"{n}[{_lead(x)}{k}].unsqueeze({d})",
        f"{n}.select({d}, {k}).unsqueeze({d})",
        f"{n}.narrow({d}, {k}, 1)",
        f"{n}.transpose(0, {d})[{k}].unsqueeze(0).transpose(0, {d})",
        f"{n}.unbind({d})[{k}].unsqueeze({d})",
    )
    return w.like(x, p.pick("use", f"{n} * torch.sigmoid({kept})", f"{n} + {kept}"))


@kind("any", weight=1.5)
def write_fixed_channel(w: Writer, x: Value, p: Choices) -> Value:
    y = w.like(x, f"{x.name}.clone()")
    n, d, lead, k = y.name, x.axis, _lead(x), p.pick("k", *range(x.channels))
    w.run(
        p.pick(
            "how",
            f"{n}[{lead}{k}] = 0.5",
            f"{n}[{lead}{k}] += 1.0",
            f"{n}[{lead}:2] = 0.5",
            f"{n}[{lead}{k}:] *= 2.0",
            f"{n}.select({d}, {k}).fill_(0.5)",
            f"{n}[{lead}{k}:{k + 1}] = {n}[{lead}:1]",
            f"{n}.narrow({d}, 0, 1).zero_()",
            f"{n}[{lead}-1] = {n}[{lead}0]",
        )
    )
    return y


@kind("any", weight=0.7)
def write_fixed_element(w: Writer, x: Value, p: Choices) -> Value:
    k = p.pick("k", *range(min(4, x.channels)))
    if x.layout == "image" and p.flag("pixel"):
        y = w.like(x, f"{x.name}.clone()")
        w.run(f"{y.name}[:, :, 0] = 0.0")
        return y
    return w.like(x, f"{x.name} + {x.name}.flatten()[{k}]")


@kind("any", weight=0.5)
def scalar_with_dimension(w: Writer, x: Value, p: Choices) -> Value:
    """Write `dim` arguments on tensors without axes."""
    how = p.pick(
        "how",
        "softmax(0)",
        "sum(0)",
        "sum(-1)",
        "cumsum(0, 0)",
        "max(0).values",
        "logsumexp(0)",
        "sort(0).values",
        "prod(0)",
        "median(0).values",
        "mean(dim=-1)",
        "flatten()[0]",
    )
    if how == "cumsum(0, 0)":
        how = "cumsum(0)"
    return w.like(x, f"{x.name} + {x.name}.mean().{how}")


@kind("any", weight=1)
def noise(w: Writer, x: Value, p: Choices) -> Value:
    n = x.name
    drawn = p.pick(
        "drawn",
        f"torch.randn_like({n})",
        f"torch.rand({n}.shape, dtype={n}.dtype)",
        f"torch.empty_like({n}).normal_()",
    )
    if p.pick("when", "training", "always") == "training":
        return w.like(x, f"{n} + 0.1 * {drawn} if self.training else {n}")
    return w.like(x, f"{n} + 0.1 * {drawn}")


@kind("any", weight=0.7)
def seeded_draw(w: Writer, x: Value, p: Choices) -> Value:
    """Write a random vector for the channels that is drawn with a fixed seed in every run."""
    n, d = x.name, x.axis
    shape = ["1"] * len(x.shape)
    shape[d - 1] = p.pick("width", f"{n}.shape[{d}]", str(x.channels))
    g = w.name()
    w.run(f"{g} = torch.Generator().manual_seed(5)")
    drawn = p.pick("drawn", "torch.rand", "torch.randn")
    return w.like(x, f"{n} * {drawn}({', '.join(shape)}, generator={g}, dtype={n}.dtype)")


@kind("any", weight=1.5)
def dropout(w: Writer, x: Value, p: Choices) -> Value:
    n = x.name
    how = p.pick("how", "{m}({n})", "F.dropout({n}, 0.2, self.training)", "{m2}({n})")
    if "{m2}" in how and x.layout != "image":
        raise Impossible("layout")
    layer = w.module("nn.Dropout(0.2)") if "{m}" in how else ""
    planes = w.module("nn.Dropout2d(0.2)") if "{m2}" in how else ""
    return w.like(x, how.format(n=n, m=layer, m2=planes))


@kind("any", weight=1)
def cache(w: Writer, x: Value, p: Choices) -> Value:
    """Write a value that the model keeps from run to run in eval mode."""
    n, d = x.name, x.axis
    form = p.pick("form", "table", "last", "width table", "list")
    if form == "list":
        held = w.hold("[]")
        w.run("if not self.training:", f"    {held}.append({n}.detach())", f"    del {held}[:-2]")
        return w.like(x, f"{n} * 1.0")
    held = w.hold("{}")
    if form == "last":
        w.run("if not self.training:", f'    {held}["last"] = {n}.detach()')
        return w.like(x, f"{n} * 1.0")
    key, shape = f"{n}.shape[-1]", f"{n}.shape[-1]"
    if form == "width table":
        key, ones = f"{n}.shape[{d}]", ["1"] * len(x.shape)
        ones[d - 1] = f"{n}.shape[{d}]"
        made = f"torch.linspace(0, 1, {key}, dtype={n}.dtype).view({', '.join(ones)})"
    else:
        made = f"torch.linspace(0, 1, {shape}, dtype={n}.dtype)"
    w.run(
        "if self.training:",
        f"    grid = {made}",
        "else:",
        f"    if {key} not in {held}:",
        f"        {held}[{key}] = {made}",
        f"    grid = {held}[{key}]",
    )
    return w.like(x, f"{n} + grid")


@kind("any", weight=0.7)
def held_outside(w: Writer, x: Value, p: Choices) -> Value:
    """Write a weight that is also in a list."""
    if x.layout not in ("seq", "vec"):
        raise Impossible("layout")
    layer = w.module(f"nn.Linear({x.channels}, {x.channels})")
    tied = w.hold(f"[{layer}.weight]")
    return w.like(x, f"F.linear(F.relu({layer}({x.name})), {tied}[0])")


@kind("vec", weight=0)
def large_constants(w: Writer, x: Value, p: Choices) -> Value:
    """Write masked logits, which are only used as an output."""
    mask = w.buffer(f"torch.arange({x.channels}) < {max(1, x.channels // 2)}")
    value = p.pick("value", "-1e9", 'float("-inf")', 'float("nan")')
    return w.like(x, f"{x.name}.masked_fill({mask}, {value})")


@kind("any", weight=0.5)
def positions(w: Writer, x: Value, p: Choices) -> Value:
    n, d = x.name, x.axis
    made = f"torch.arange({n}.shape[{d}], dtype={n}.dtype)"
    tail = "" if x.layout in ("seq", "vec") else "[:" + ", None" * (len(x.shape) - 1) + "]"
    return w.like(x, f"{n} + 0.1 * {made}{tail}")


@kind("any", weight=0.5)
def without_gradient(w: Writer, x: Value, p: Choices) -> Value:
    y = w.name()
    w.run("with torch.no_grad():", f"    {y} = torch.sigmoid({x.name})")
    return w.like(x, p.pick("how", f"{x.name} * {y}", f"{x.name} * {x.name}.detach().tanh()"))


@kind("any", weight=0.7)
def temporary(w: Writer, x: Value, p: Choices) -> Value:
    """Write zeros of a shape that the code reads, and fill them in parts."""
    n, lead = x.name, _lead(x)
    if x.channels < 3:
        raise Impossible("too few")
    y = w.like(x, p.pick("how", f"torch.zeros_like({n})", f"{n}.new_zeros({n}.shape)"))
    k = p.pick("k", *range(1, x.channels))
    w.run(
        f"{y.name}[{lead}:{k}] = {n}[{lead}:{k}]", f"{y.name}[{lead}{k}:] = {n}[{lead}{k}:].tanh()"
    )
    return y


@kind("any", weight=0.7)
def own_module(w: Writer, x: Value, p: Choices) -> Value:
    """Write a submodule whose constructor gets a width."""
    if x.layout not in ("seq", "vec"):
        raise Impossible("layout")
    out = p.width()
    layer = w.module(f"nn.ModuleDict(dict(a=nn.Linear({x.channels}, {out}), b=nn.ReLU()))")
    width = w.hold(str(out))
    y = w.like(x, f'{layer}["b"]({layer}["a"]({x.name}))', out)
    return w.like(y, f"{y.name}.reshape(*{y.name}.shape[:-1], {width})")
