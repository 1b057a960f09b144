"""The proximal step: minimise ½‖α - α̂‖² + s·R(α), R bilinear in the ℓ0 norms of the groups.

Pure functions on one flat vector. `owner` holds the group of each entry, `q` and `b` the resource
model R = ½ nᵀQn + bᵀn of the widths n, which count
the gates that are not closed. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widths(alpha: Tensor, owner: Tensor, groups: int) -> Tensor:
    """n_l = ‖α_l‖₀"""
    n = torch.zeros(groups, dtype=torch.float64, device=alpha.device)
    return n.index_add(0, owner, (alpha != 0).double())


def prices(n: Tensor, q: Tensor, b: Tensor) -> Tensor:
    """Σ_k a_lk n_k + b_l: what one more channel of each group costs."""
    return q @ n + b


def soft_threshold(alpha: Tensor, beta: Tensor) -> Tensor:
    """argmin_x ½(x - α)² + β|x|  =  sign(α)·max(|α| - β, 0)   (closed form of the ℓ1 step)"""
    return alpha.sign() * (alpha.abs() - beta).clamp_min(0)


def hard_threshold(alpha: Tensor, beta: Tensor) -> Tensor:
    """argmin_x ½(x - α)² + β‖x‖₀  =  α if α² > 2β, else 0   (closed form of the ℓ0 step)"""
    return torch.where(alpha * alpha > 2 * beta, alpha, torch.zeros_like(alpha))


def prox_l1(
    alpha: Tensor,
    owner: Tensor,
    q: Tensor,
    b: Tensor,
    scale: Tensor | float,
    *,
    sweeps: int = 1,
    start: Tensor | None = None,
) -> Tensor:
    """Algorithm 1: each sweep holds the other groups' ℓ0 norms and relaxes its own to ℓ1.

    β_l = s·(Σ_k a_lk ‖α_k‖₀ + b_l), then soft-threshold α̂_l by β_l.

    Args:
        alpha: α̂, after the gradient step.
        scale: s = η₁·λ.
        sweeps: N; the paper finds one enough.
        start: α¹, whose ℓ0 norms the first sweep uses; α̂ itself by default.

    >>> one, zero = torch.ones(1), torch.zeros(1, dtype=torch.long)
    >>> prox_l1(one, zero, torch.zeros(1, 1).double(), torch.ones(1).double(), 0.25)
    tensor([0.7500])
    """
    current = alpha if start is None else start
    for _ in range(sweeps):
        beta = scale * prices(widths(current, owner, len(b)), q, b)
        current = soft_threshold(alpha, beta.to(alpha.dtype)[owner])
    return current


def prox_l0(
    alpha: Tensor,
    owner: Tensor,
    q: Tensor,
    b: Tensor,
    scale: Tensor | float,
    *,
    sweeps: int = 1,
    start: Tensor | None = None,
) -> Tensor:
    """The same sweeps with the ℓ0 norm itself: large entries do not move, small ones become 0."""
    current = alpha if start is None else start
    for _ in range(sweeps):
        beta = scale * prices(widths(current, owner, len(b)), q, b)
        current = hard_threshold(alpha, beta.to(alpha.dtype)[owner])
    return current
