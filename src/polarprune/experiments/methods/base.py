"""What a pruning method adds to a training, and how it cuts the trained model to the budget."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from ...analysis.trace import trace
from ...channels.graph import Graph, Plan
from ...cost.budget import Budget
from ...cost.other_scores import plan_by_score, plan_by_threshold
from ...surgery.apply import shrink
from ...training.parameter_groups import ParameterGroup
from ..settings import Settings

Groups = list[ParameterGroup]
Limits = dict[str, float]  # resource -> budget, as a share of the original
Widths = dict[str, list[int]]  # group -> its width, and its original width
HISTOGRAM_BINS = 20  # as in the history of a pruner


def widths_of(graph: Graph, plan: Plan) -> Widths:
    """Return the widths of a plan as a card has them."""
    return {name: [len(plan[name]), group.size] for name, group in graph.prunable.items()}


class Method:
    """Hooks into the steps of a training; in this class they do nothing.

    All hooks but `log_entries` may be captured in a CUDA graph: state is held in tensors that are
    written in place, and nothing is read back to the CPU. A method that cannot do this sets
    `captured = False`.
    """

    captured = True

    def param_groups(self, model: nn.Module, lr: float, weight_decay: float) -> Groups:
        """Return the parameter groups for the optimizer."""
        return [{"params": list(model.parameters()), "lr": lr, "weight_decay": weight_decay}]

    def before_forward(self) -> None:
        """Run before the forward pass."""

    def penalty(self) -> Tensor | None:
        """Return what is added to the loss, or None."""
        return None

    def after_backward(self) -> None:
        """Run after the backward pass, for example to change gradients."""

    def after_step(self, rate: Tensor | float) -> None:
        """Run after the optimizer's step; `rate` is the learning rate of the weights."""

    def log_entries(self) -> dict[str, object]:
        """Return entries for the log, once an epoch."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores besides the model; loading writes to them."""
        return {}


class ComparedMethod(Method, ABC):
    """A method that trains a model and then cuts it to the budget.

    Args:
        model: The baseline; it is changed.
        example: The input batch that is traced.
        settings: Settings of the run; `settings.controls` has the method's own numbers.
        steps: Number of training steps.
        limits: The budget of each resource, as a share of the original cost.
    """

    def __init__(
        self, model: nn.Module, example: Tensor, settings: Settings, steps: int, limits: Limits
    ) -> None:
        self.model, self.example, self.limits = model, example, limits
        self.settings, self.own, self.steps = settings, settings.controls, steps
        self.device = next(model.parameters()).device
        self.widths: Widths = {}  # of the model after `cut`, if they are known
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """Trace the model and insert gates, if the method has any."""

    @abstractmethod
    def cut(self, model: nn.Module) -> nn.Module:
        """Return the trained model, cut to the budget."""

    def trained_model(self) -> nn.Module:
        """Return the trained model at its original widths, without gates."""
        return self.model


class PlannedMethod(ComparedMethod):
    """A method that chooses the channels to keep and leaves the cutting to `polarprune.shrink`."""

    def set_up(self) -> None:
        self.graph = trace(self.model, self.example, norms=self.settings.norms)
        Budget(self.graph, self.limits).check_reachable()

    @abstractmethod
    def plan(self) -> Plan:
        """Return the channels to keep, within the budget."""

    def cut(self, model: nn.Module) -> nn.Module:
        plan = self.plan()
        self.widths = widths_of(self.graph, plan)
        return shrink(model, self.graph, plan)

    def keep_same_share(self, scores: Tensor) -> Plan:
        """Return a plan that keeps the same share of every group, highest scores first."""
        multiple = self.settings.multiple_of
        return plan_by_score(self.graph, scores, multiple_of=multiple, **self.limits)

    def keep_above_threshold(self, scores: Tensor) -> Plan:
        """Return a plan that keeps the channels above one threshold for all groups."""
        return plan_by_threshold(self.graph, scores, **self.limits)

    def all_channels(self) -> Tensor:
        """Return a mask that is true for every channel of the graph."""
        return torch.ones(self.graph.units).bool()
