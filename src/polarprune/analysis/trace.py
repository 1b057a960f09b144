"""The public `trace`: find the groups of channels that can be pruned, without changing the model.

The model is run once and its channels are followed (`inspection.py`). The result is then confirmed:
channels are cut from copies, and the copies are run (`confirm.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..channels.graph import Graph
from ..channels.propagation import Rule
from ..channels.reasons import Reason
from ..channels.rules.table import RULES
from ..cost.resources import add_extras
from ..rewriting.forward_weights import find, without_computed_weights
from ..rewriting.installed_forward import fixed_values
from ..rewriting.parametrizations import by_hooks, computed, is_gated
from ..rewriting.remove_branches import removed_with_groups
from ..rewriting.symbolic_graphs import graphs_cached
from ..torch_internals.patches import exclusive
from ..tracing.model_state import Example, as_call, named_tensors, on_host
from ..validation.arguments import check_tracing, checked_reasons, checked_rules, keep_patterns
from ..validation.models import check_example, check_model
from ..validation.plans import check_groups
from .confirm import confirm
from .inspection import Inspection, Settings
from .repeated_blocks import with_families
from .unread_attributes import follow_unread_attributes


def trace(
    model: nn.Module,
    example_inputs: Example,
    *,
    keep: str | Iterable[str] = (),
    rules: Mapping[Any, Rule] | None = None,
    norms: bool = False,
) -> Graph:
    """Find the groups of channels of a model, which of them can be pruned, and what each costs.

    The model is run on the example inputs, in eval and in train mode, and every operation is
    followed. Trial cuts of copies confirm the prunable groups. The model is not changed.

    Args:
        model: A plain `torch.nn.Module`, before `torch.compile` and parallel wrappers.
        example_inputs: What `model(...)` takes: a tensor, a tuple or list of positional
            arguments, or a dict of keyword arguments. MACs are counted for this example.
        keep: Names or patterns of modules whose channels are frozen, such as `"layer4.*"`.
        rules: Rules for operations that are not known: `{torch.ops.my.swish: rule}`.
        norms: Also prune channels that layer, RMS and group norms mix, such as the residual
            stream of a transformer. The gated model then computes these norms with gate-weighted
            statistics.

    Returns:
        A graph. `print(graph)` shows all groups, their prices, and why some are frozen;
        `graph.prunable` holds the prunable groups by name; `graph.cost` the cost; `graph.unknown`
        the operations without a rule; `graph.notes` remarks.

    Raises:
        PruneError: The model is wrapped, compiled or gated, does not run on the example, or an
            argument is wrong. The message names the remedy.

    Example:
        >>> import torch
        >>> import polarprune as pp
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        ... )
        >>> graph = pp.trace(model, torch.randn(1, 4))
        >>> {name: group.size for name, group in graph.prunable.items()}
        {'0': 8}
        >>> print(graph.groups["2"])
        2: 2 channels, frozen: part of the model's output
        >>> graph.cost.original()["macs"]
        48
    """
    return survey(
        model, example_inputs, keep=keep, rules=rules, norms=norms, compare_outputs=bool(rules)
    )


@exclusive()
def survey(
    model: nn.Module,
    example: Example,
    *,
    keep: str | Iterable[str] = (),
    rules: Mapping[object, Rule] | None = None,
    norms: bool = False,
    compare_outputs: bool = False,
    min_channels: int = 0,
    uniform: bool | tuple[str, ...] = False,
    frozen: Mapping[str, str] | None = None,
) -> Graph:
    """Do what `trace` does, with four more settings.

    Args:
        compare_outputs: Compare the outputs of trial cuts, too.
        min_channels: The least number of channels that every group keeps.
        uniform: Which groups keep equally many units (see `repeated_blocks`).
        frozen: Names of groups that are frozen, each with the reason.
    """
    patterns, own = keep_patterns(keep), checked_rules(rules)
    given = {name: Reason(why) for name, why in checked_reasons(frozen).items()}
    check_tracing(norms, min_channels)
    _check_inputs(model, example)
    weights, remarks = find(model, example), by_hooks(model)
    forward_weights = weights.found
    names = computed(model) + [f"{path}.{one.leaf}" for path, one in forward_weights.items()]
    model = without_computed_weights(model, forward_weights)
    settings = Settings({**RULES, **own}, patterns, norms, min_channels)
    inspection = Inspection(model, example, settings, given)
    graph = _confirmed(inspection, compare_outputs)
    check_groups("frozen", given, graph.groups)
    held = {path: fixed_values(model.get_submodule(path)) for path in graph.rewritten}
    reasons = [group.reason for group in graph.groups.values() if group.frozen]
    graph = replace(
        graph,
        rewrites=replace(
            graph.rewrites, computed=names, forward_weights=forward_weights, held=held
        ),
        notes=(*graph.notes, *remarks, *weights.notes(reasons)),
        count_with_norms=inspection.counting_with_norms(graph),
    )
    return with_families(graph, model, uniform)


def _confirmed(inspection: Inspection, compare_outputs: bool) -> Graph:
    """Return the confirmed graph. Its cost covers the tensors that closed groups take away."""
    model = inspection.model
    with graphs_cached(), _OLD_OBJECTS_EXCLUDED:
        graph = confirm(inspection, compare_outputs)
        graph = follow_unread_attributes(inspection, graph)
        closable = [name for name, group in graph.prunable.items() if not group.minimum]
        with on_host():
            removed, kept = removed_with_groups(model, graph, closable)
            add_extras(model, graph, removed)
    return replace(graph, notes=(*graph.notes, *kept))


def _check_inputs(model: nn.Module, example: Example) -> None:
    """Refuse models and examples that cannot be traced."""
    check_model(model, is_gated)
    device = next((tensor.device for _, tensor in named_tensors(model)), None)
    args, kwargs = as_call(example)
    check_example((*args, *kwargs.values()), device)


def changed(graph: Graph, model: nn.Module, present: Tensor) -> list[str]:
    """Return constants of rewritten modules that the model has changed since it was traced.

    Args:
        graph: What was traced.
        model: The model, which may have lost channels since.
        present: The units that it still has.
    """
    found = []
    for path, held in graph.rewrites.held.items():
        locations = graph.size_attributes.get(path, {})
        widths = {name: graph.width(path, one, present) for name, one in locations.items()}
        expected = {**held, **widths}
        now = fixed_values(model.get_submodule(path))
        found += [f"{path}.{k}" for k, value in now.items() if expected.get(k, value) != value]
    return found


class OldObjects:
    """Context manager: exclude all objects that exist now from garbage collection.

    Tracing makes many objects, which would make Python search all imported modules repeatedly. If
    the process has frozen objects itself, they stay frozen, and nothing is done. Python counts
    frozen objects one by one, so once some were found, it is not asked again.
    """

    def __init__(self) -> None:
        self._frozen_by_others = False
        self._depth = 0  # a rule of the user may call `trace`

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._frozen_by_others = self._frozen_by_others or gc.get_freeze_count() > 0
            if not self._frozen_by_others:
                gc.freeze()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0 and not self._frozen_by_others:
            gc.unfreeze()


_OLD_OBJECTS_EXCLUDED = OldObjects()  # entered by one thread at a time, see `survey`
