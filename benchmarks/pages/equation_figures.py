"""Figures that need no training: the gate function, and the convergence of Algorithm 1."""

import torch
from matplotlib.figure import Figure

from benchmarks.pages.figure_style import STYLES, panels
from polarprune.gates.gate import gate_slope, gate_value
from polarprune.training.proximal import prox_l1


def gate() -> Figure:
    """g and its derivative for some ε."""
    figure, (left, right) = panels(2)
    alpha = torch.linspace(-1.2, 1.2, 1201, dtype=torch.float64)
    for eps, (colour, dash, _) in zip((0.1, 0.01, 0.001), STYLES, strict=False):
        left.plot(alpha, gate_value(alpha, eps), dash, color=colour, label=f"ε = {eps:g}")
        right.plot(alpha, gate_slope(alpha, eps), dash, color=colour, label=f"ε = {eps:g}")
    left.set(xlabel="α", ylabel="g(α) = α² / (α² + ε)")
    right.set(xlabel="α", ylabel="dg / dα")
    left.legend(frameon=False)
    return figure


def sweeps() -> dict[str, list[float]]:
    """The paper's example: f(x, y) = ½(‖x - u‖² + ‖y - v‖²) + c ‖x‖₀ ‖y‖₀, after 0, 1, … sweeps."""
    u, v, c = [0.1, 0.2], [-0.3, 0.5, 0.6], 0.01
    starts = {"init 1": [0.1, 0.8, 0.7, 0.3, 0.8], "init 2": [0.4, 0.1, 0.7, 0.5, 0.0]}
    aim, owner = torch.tensor(u + v).double(), torch.tensor([0, 0, 1, 1, 1])
    q, b = torch.tensor([[0, c], [c, 0]]).double(), torch.zeros(2).double()

    def value(x: torch.Tensor) -> float:
        live = [int((x[owner == k] != 0).sum()) for k in (0, 1)]
        return float(0.5 * ((x - aim) ** 2).sum() + c * live[0] * live[1])

    found = {}
    for name, start in starts.items():
        first = torch.tensor(start).double()
        found[name] = [value(first)]
        found[name] += [
            value(prox_l1(aim, owner, q, b, 1.0, sweeps=n, start=first)) for n in range(1, 7)
        ]
    return found


def algorithm1() -> Figure:
    """The objective of the paper's example after each sweep of Algorithm 1."""
    figure, (axis,) = panels(1)
    for (name, values), (colour, dash, mark) in zip(sweeps().items(), STYLES, strict=False):
        axis.plot(range(len(values)), values, dash, marker=mark, color=colour, label=name)
    axis.set(xlabel="sweeps of Algorithm 1", ylabel="f(x, y)")
    axis.legend(frameon=False)
    return figure
