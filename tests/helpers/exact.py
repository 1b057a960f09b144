"""Compare and count models without the library's own proof; gates set at random; traced nets."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

import polarprune as pp
from polarprune.channels.graph import Graph, Group
from tests.helpers.nets import NETS

# Nets without a single prunable channel, and why that is right.
REFUSED = {
    "group_norm_one": "group norm over all channels",
    "layer_norm_linear": "layer norm mixes channels",
}
PRUNABLE = [name for name in NETS if name not in REFUSED]


# How many units of a group stay, by variant.
VARIANTS: dict[str, Callable[[Group], int]] = {
    "half": lambda group: max(1, group.minimum, group.size // 2),
    "one": lambda group: max(1, group.minimum),
    "closed": lambda group: max(group.minimum, group.size // 2) if group.minimum else 0,
    "random": lambda group: int(torch.randint(group.minimum, group.size + 1, ())),
}


def double(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.double(), inputs)


def run(model: nn.Module, inputs: Any) -> Any:
    """Call the model with dropout off, because models of different widths draw different noise."""
    off = {name: lambda x, *args, **kwargs: x for name in ("dropout", "dropout2d")}
    with mock.patch.multiple(F, **off):
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


@torch.no_grad()
def outputs(model: nn.Module, inputs: Any, *, training: bool) -> list[Tensor]:
    """Return the model's outputs, and restore its mode and its running statistics."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        return tree_leaves(run(model.train(training), inputs))
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, before in buffers:
            buffer.copy_(before)


def difference(one: nn.Module, other: nn.Module, inputs: Any, *, training: bool) -> float:
    """Return the largest max |a - b| / max |a| over all outputs."""
    left, right = (outputs(model, inputs, training=training) for model in (one, other))
    assert [x.shape for x in left] == [x.shape for x in right]
    assert all(a.isfinite().all() and a.abs().max() > 0 for a in left)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(left, right, strict=True))


# Torch's formula for the one fused kernel that its counter has none for.
FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        sdpa_flop_count(q, k, v)
    )
}


def counted(model: nn.Module, inputs: Any) -> dict[str, int]:
    """Return the MACs as torch counts them, and the number of parameters."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        run(model, inputs)
    macs, rest = divmod(counter.get_total_flops(), 2)
    assert rest == 0
    return {"macs": macs, "params": sum(p.numel() for p in model.parameters())}


class Outputs(TorchDispatchMode):
    """A mode that counts the bytes of the outputs of operations with MACs."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula and formula(*args, **(kwargs or {}), out_val=out):
            self.bytes += out.numel() * out.element_size()
        return out


def memory(model: nn.Module, inputs: Any) -> int:
    """Return the bytes of the parameters, and of the outputs of merging operations."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad(), Outputs() as seen:
        run(model, inputs)
    return seen.bytes + sum(p.numel() * p.element_size() for p in model.parameters())


def set_gates(pruner: pp.Pruner, width: Callable[[Group], int], seed: str) -> None:
    """Set random gates between 0.47 and 0.96 with α of either sign, and close the others.

    Then the pruner takes its only step again (with λη = 0), so that it notices the new gates.
    """
    torch.manual_seed(zlib.crc32(seed.encode()))
    with torch.no_grad():
        for name, gate in pruner.gates.items():
            group = pruner.graph.groups[name]
            kept = torch.randperm(group.size)[: width(group)]
            gate.alpha.zero_()
            gate.alpha[kept] = torch.empty(len(kept), dtype=gate.alpha.dtype).uniform_(0.3, 1.5)
            gate.alpha.mul_(torch.randint(2, (group.size,)) * 2 - 1)
        pruner._run.stepper.put(pruner._run.stepper.last())
        pruner._run.steering.progress.step = 0
        pruner.param_groups(lr=0.0)
        pruner.step()
        for gate in pruner.gates.values():
            gate.eps.fill_(0.1)


def start(name: str, dtype: torch.dtype = torch.float64) -> pp.Pruner:
    model, inputs = NETS[name]()
    if dtype == torch.float64:
        model, inputs = model.double(), double(inputs)
    return pruner_of(model, inputs)


def pruner_of(model: nn.Module, inputs: Any) -> pp.Pruner:
    """Return a pruner whose step changes nothing, because the learning rate is 0."""
    pruner = pp.Pruner(model, inputs, lam=1.0, steps=1)
    pruner.param_groups(lr=0.0)
    return pruner


@cache
def started(name: str) -> pp.Pruner:
    return start(name)


@cache
def traced(name: str) -> Graph:
    if name in PRUNABLE:
        return started(name).graph
    model, inputs = NETS[name]()
    return pp.trace(model.double(), double(inputs))
