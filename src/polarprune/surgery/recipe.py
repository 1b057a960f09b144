"""The recipe: all changes that turn the original model into the smaller one, as plain data.

A recipe is JSON. A saved model is rebuilt from its original class and its recipe, without tracing
it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from ..errors import PruneError
from ..rewriting.stored_graphs import StoredForward
from ..tracing.model_state import named_tensors

OTHER_MODEL = (
    "The recipe belongs to another model; give a fresh instance of the class and settings that "
    "were pruned."
)
NewAttributes = dict[str, int | list[int]]  # attribute -> new value


@dataclass
class Recipe:
    """All changes to make to a model of the original class.

    Field names are keys in saved files and must not change. Modules and tensors are named by their
    paths in the original model.

    Attributes:
        shapes: Tensor -> its shape in the original model, for each tensor that is sliced.
        slices: Tensor -> axis (as a string) -> indices that are kept along that axis.
        attributes: Module -> attribute -> new value, for attributes that hold widths.
        constants: Layers that read or make no channel; a `Constant` replaces each of them.
        identities: Norms over no channels; an `nn.Identity` replaces each of them.
        hollow: Pooling, upsampling and padding layers that may be given no channels; each is
            wrapped in `ZeroChannelSafe`.
        heads: `nn.MultiheadAttention` module -> heads that are kept; `PrunedAttention` replaces it.
        rewired: Module -> its rewritten forward, as a stored graph.
        removed: Module -> child modules that its rewritten forward no longer calls.
        computed: Weights that a parametrization computes; they become plain parameters.
        unread: Tensors from which a layer computed its weight, and which nothing reads now.
    """

    shapes: dict[str, list[int]] = field(default_factory=dict)
    slices: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    attributes: dict[str, NewAttributes] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    hollow: list[str] = field(default_factory=list)
    heads: dict[str, list[int]] = field(default_factory=dict)
    rewired: dict[str, StoredForward] = field(default_factory=dict)
    removed: dict[str, list[str]] = field(default_factory=dict)
    computed: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Return the fields as a dict that `json.dumps` accepts."""
        return dict(vars(self))


def check_shapes(model: nn.Module, shapes: Mapping[str, Sequence[int]], remedy: str) -> None:
    """Raise a `PruneError` that ends in `remedy`, unless the model's tensors have these shapes."""
    tensors = dict(named_tensors(model))
    for name, shape in shapes.items():
        found = list(tensors[name].shape) if name in tensors else "missing"
        if found != list(shape):
            raise PruneError(f"{name}: expected shape {list(shape)}, found {found}. {remedy}")
