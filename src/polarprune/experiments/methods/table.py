"""`METHODS`: the compared methods by name.

All train with the same data, network, seed, epochs, learning rates and budget as polarprune. Each
continues training from the baseline and adds something to the steps. Then it makes a plan that
meets the budget, removes the channels, and fine-tunes the small network. Only Torch-Pruning does
the cutting itself.

| method | during training | removed |
|---|---|---|
| `gdp` | polarprune | channels whose gate is zero |
| `magnitude` | nothing | the same share of every group, smallest weights first |
| `random` | nothing | the same share of every group |
| `slimming` | ℓ1 on the scales of batch norms (Liu et al., 2017) | all scales below a threshold |
| `lasso` | Σ √size · ‖w‖ over all weights that belong to a channel | all norms below a threshold |
| `l0` | hard-concrete gates (Louizos et al., 2018), λ · E[MACs] | zeros, then the least likely |
| `torch-pruning` | the regularizer of its GroupNormPruner | what that removes, globally |

Two controls do not prune at all: `thin` and `reinit` are small networks that are trained from
scratch (see `from_scratch`). The paper compares with two more methods: `kernel-gates` ("not
introducing α") and `naive-sl0`.
"""

from __future__ import annotations

from ...errors import PruneError
from ...validation.arguments import check_settings, plain_uniform
from .base import ComparedMethod, Limits
from .from_scratch import FROM_SCRATCH
from .kernel_gates import KernelGates, NaiveSL0
from .l0 import L0
from .lasso import Lasso
from .magnitude import Magnitude, Random
from .slimming import Slimming
from .torch_pruning import TorchPruning

METHODS: dict[str, type[ComparedMethod]] = {
    "magnitude": Magnitude,
    "random": Random,
    "slimming": Slimming,
    "lasso": Lasso,
    "l0": L0,
    "torch-pruning": TorchPruning,
}
ALL_METHODS = METHODS | {"kernel-gates": KernelGates, "naive-sl0": NaiveSL0}
NAMES = ("gdp", *ALL_METHODS, *FROM_SCRATCH)


def check(method: str, limits: Limits, uniform: bool = False) -> None:
    """Refuse an unknown method or a wrong budget before a baseline is trained.

    Args:
        method: One of `NAMES`.
        limits: Budgets as shares of the original cost, or `lam`, which only "gdp" takes.
        uniform: Whether repeated blocks keep the same widths, which only "gdp" can.

    Raises:
        PruneError: The method, a budget or their combination is not accepted.
    """
    if method not in NAMES:
        raise PruneError(f"unknown method {method!r}. Methods: {', '.join(NAMES)}.")
    if method != "gdp" and "lam" in limits:
        raise PruneError(f"--lam is for gdp only. Give {method} a budget: --macs or --params.")
    if method != "gdp" and uniform:
        raise PruneError(f"--uniform is for gdp only. Leave it out with {method}.")
    wanted: dict[str, float | None] = {key: limits.get(key) for key in ("macs", "params")}
    check_settings(wanted, limits.get("lam"), steps=1)
    plain_uniform(uniform, limits.get("lam"))
