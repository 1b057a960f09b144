"""Check what `compact` gets to cut: the model, the optimizers, and copies of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PruneError


def check_can_cut(computed: Sequence[str], weighted: Sequence[str]) -> None:
    """Refuse a model that cannot be cut while it trains.

    Args:
        computed: Weights that are computed from other parameters and would be cut.
        weighted: Modules with weighted statistics in a forward that hard-codes widths.
    """
    if computed:
        raise PruneError(
            f"compact: {computed[0]} is computed from other parameters, which cannot be cut while "
            f"they are trained. Nothing was changed; continue training without compact()."
        )
    if weighted:
        raise PruneError(
            f"compact: {weighted[0] or 'the model'} has a norm with weighted statistics in a "
            f"forward that hard-codes widths. Nothing was changed; continue training without "
            f"compact()."
        )


def check_optimizer_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state cannot be cut."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            known = not isinstance(value, Tensor) or value.numel() == 1
            if not known and value.shape != parameter.shape:
                raise PruneError(
                    f"compact: {type(optimizer).__name__} keeps {key} of shape "
                    f"{list(value.shape)} for a parameter of shape {list(parameter.shape)}, "
                    f"which cannot be cut. Nothing was changed; continue training without "
                    f"compact(). When you resume, load the model's state before the optimizer's."
                )


def check_copy(where: str, copy: object, *, fits: bool) -> None:
    """Refuse anything that is not a copy of the gated model; `fits` tells whether it is one."""
    if not fits:
        raise PruneError(
            f"{where}: {type(copy).__name__} is not a copy of the gated model as it is now. Copy "
            f"the model after the Pruner was built, and keep the copy in pruner.copies, so that "
            f"compact() cuts it, too. Nothing was changed."
        )


def check_held(model: nn.Module, optimizers: Iterable[Optimizer], remedy: str) -> None:
    """Refuse parameters that belong to no known optimizer: its state would keep the old shapes."""
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    loose = [name for name, parameter in trained if id(parameter) not in held]
    if loose:
        raise PruneError(
            f"compact: {loose[0]} (and {len(loose) - 1} more) is in none of the optimizers. If it "
            f"is in another one, name that too: {remedy}; if it should not be trained, call "
            f"requires_grad_(False) on it. Nothing was changed."
        )
