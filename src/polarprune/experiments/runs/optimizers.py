"""Make the optimizer of a training from settings and groups of parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..methods.base import Groups
from ..settings import Settings


def make_optimizer(groups: Groups, settings: Settings, device: torch.device) -> Optimizer:
    """Return the optimizer of the settings.

    On a GPU, where a captured step reads the learning rate from the device, the rates of the groups
    become tensors.

    Args:
        groups: Parameter groups, which are changed.
        settings: `optimizer`, and its numbers.
        device: Where the parameters are.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        for group in groups:
            group["lr"] = torch.tensor(group["lr"], device=device)
    fused = on_gpu or None
    if settings.optimizer == "sgd":
        return SGD(groups, momentum=settings.momentum, nesterov=settings.nesterov, fused=fused)
    kind = AdamW if settings.optimizer == "adamw" else Adam
    betas = settings.momentum, settings.beta2
    return kind(groups, betas=betas, fused=fused, capturable=on_gpu)


def split_by_decay(groups: Groups) -> Groups:
    """Split groups that decay: parameters with fewer than two dimensions are not decayed.

    Args:
        groups: Parameter groups.
    """
    found: Groups = []
    for group in groups:
        if not group["weight_decay"]:
            found.append(group)
            continue
        vectors = [p for p in group["params"] if p.dim() < 2]
        found.append({**group, "params": [p for p in group["params"] if p.dim() >= 2]})
        if vectors:
            found.append({**group, "params": vectors, "weight_decay": 0.0})
    return found


def split_slow_group(groups: Groups, model: nn.Module, prefix: str) -> Groups:
    """Split the first group: parameters whose names start with `prefix` get a tenth of the rate.

    Args:
        groups: Parameter groups.
        model: The model that names the parameters.
        prefix: Start of the names; if it is empty, the groups are returned unchanged.
    """
    if not prefix:
        return groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first, *rest = groups
    slow = [p for p in first["params"] if names[id(p)].startswith(prefix)]
    fast = [p for p in first["params"] if not names[id(p)].startswith(prefix)]
    return [
        {**first, "params": fast},
        {**first, "params": slow, "lr": 0.1 * first["lr"]},
        *rest,
    ]


def clip_gradients(groups: Groups, largest: float) -> None:
    """Scale all gradients by one number if their norm is too large; nothing waits for the device.

    Args:
        groups: Parameter groups.
        largest: The largest norm of all gradients together.
    """
    nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], largest)
