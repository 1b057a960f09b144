"""Find out, before anything is trained, whether a config can express the sizes after a cut.

No model is cut, and no weight is computed with. The sizes of the cut model follow from its recipe,
and `ConfigSearch` looks for a config with these sizes. The plain class, built from that config, is
then run once, without computing products. It has to do the same arithmetic as the original: the
same numbers in its operations, such as a scale, and the same constants. Else the code computes a
number from a size in the config, and a model that is loaded would compute something else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest

import torch
from torch import Tensor, nn

from ..channels.graph import Graph
from ..errors import PruneError
from ..tracing.model_state import Example, named_tensors
from ..tracing.recorder import attempt, record
from ..tracing.tape import Op, Tape, Value
from .config_entries import is_config, refusal_of, with_entries
from .config_models import Config, convert_constants, plain_class, without_weights
from .config_proof import changed_entries
from .config_sizes import BuiltSizes, ConfigSearch, ModelSizes, sizes_of
from .recipe import Recipe
from .write_recipe import recipe_for

_BUILT = 8  # of further widths, so many models are built; the configs of all are checked
_Arithmetic = tuple[Op, tuple[str, ...]]  # an operation, and the numbers that it is called with


class ConfigTrials:
    """Tries which widths a config can express.

    Args:
        model: A model with a config, or with a part that has one.
        example: What the model takes.
        graph: The graph of the model.

    Raises:
        PruneError: If the model has no config, or its class cannot be built from it.
    """

    def __init__(self, model: nn.Module, example: Example, graph: Graph) -> None:
        self.model, self.example, self.graph = model, example, graph
        self.path, self.part = _part_with_config(model)
        self.built = BuiltSizes(self.part)
        self.sizes = sizes_of(self.part)
        self._names = {id(tensor): name for name, tensor in named_tensors(model)}
        self._constants = dict(_constants(self._plain(self.part.config)))
        self._arithmetic = list(
            _arithmetic(record(model, example, training=False, generates=False))
        )

    def config_for(self, widths: Mapping[str, int], *, runs: bool = True) -> Config:
        """Return a config for a model whose groups have these widths; all others stay.

        Args:
            widths: Names of groups, and how many units each keeps.
            runs: Run a model that is built from the config, and compare its arithmetic.

        Raises:
            PruneError: If there is none; the message says what a config cannot express.
        """
        plan = {name: list(range(width)) for name, width in widths.items()}
        kept_units = self.graph.without_unread(self.graph.kept_units(plan))
        wanted, why = self._wanted(recipe_for(self.model, self.graph, kept_units)), ""
        search = ConfigSearch(self.part, wanted, self.built)
        for config in search.configs():
            difference = self._difference(config, runs)
            if not difference:
                return config
            why = why or difference
        raise PruneError(search.refused or why)

    def refusal(self, widths: Mapping[str, int], *, runs: bool = True) -> str:
        """Return why no config can express these widths; empty if one can."""
        try:
            self.config_for(widths, runs=runs)
        except PruneError as error:
            return str(error)
        return ""

    def refused_widths(self, found: Mapping[int, Config], widths: Iterable[int]) -> dict[int, str]:
        """Return the widths with which a config would be refused, and why.

        Args:
            found: Configs for two widths, which show the integers that follow the width; if there
                is only one, no more are tried.
            widths: More widths.
        """
        if len(found) < 2:
            return {}
        one = next(iter(found))
        first, second = (changed_entries(self.part.config, c) for c in found.values())
        follow = {key: value for key, value in first.items() if second.get(key) != value}
        refused, widths = {}, list(widths)
        for index, width in enumerate(widths):
            if all(value * width % one == 0 for value in follow.values()):
                entries = {**first, **{key: x * width // one for key, x in follow.items()}}
                refused[width] = refusal_of(with_entries(self.part.config, entries))
                is_built = index % (len(widths) // _BUILT + 1) == 0
                if is_built and not refused[width]:
                    refused[width] = self.built.failure(entries)
        return {width: why for width, why in refused.items() if why}

    def _wanted(self, recipe: Recipe) -> ModelSizes:
        """Return the sizes that the part with a config has after a cut."""
        if recipe.constants or recipe.removed or recipe.heads:
            raise PruneError("this cut replaces layers, which a config cannot express")
        wanted = ModelSizes(dict(self.sizes.shapes), dict(self.sizes.attributes))
        for name, tensor in self.part.state_dict(keep_vars=True).items():
            axes = recipe.slices.get(self._names.get(id(tensor), ""), {})
            wanted.shapes.update({(name, int(axis)): len(kept) for axis, kept in axes.items()})
        stem = f"{self.path}." if self.path else ""
        for path, held in recipe.attributes.items():
            if path.startswith(stem):
                own = {(path.removeprefix(stem), k): v for k, v in held.items()}
                wanted.attributes.update({k: v for k, v in own.items() if isinstance(v, int)})
        return wanted

    # --- arithmetic ---

    def _difference(self, config: Config, runs: bool) -> str:
        """Return what a model that is built from a config computes in another way, if anything."""
        family = plain_class(self.part).__name__
        plain = self._plain(config)
        for name, value in _constants(plain):
            if not _equal(self._constants.get(name), value):
                return f"{family} computes {name} from a size in its config"
        return self._difference_in_run(plain, family) if runs else ""

    def _difference_in_run(self, plain: nn.Module, family: str) -> str:
        tape, error = attempt(self._around(plain), self.example, training=False, brief=True)
        if error is not None:
            return f"{family} does not run with the pruned sizes: {error}"
        for before, after in zip_longest(self._arithmetic, _arithmetic(tape)):
            if before is None or after is None or before[1] != after[1]:
                where = f": {before[0].name} in {before[0].where}" if before else ""
                return f"{family} computes with a number that depends on its sizes{where}"
        return ""

    def _plain(self, config: Config) -> nn.Module:
        """Build the plain class from a config, with constants but without memory for weights."""
        return without_weights(plain_class(self.part), copy.deepcopy(config)).eval()

    def _around(self, plain: nn.Module) -> nn.Module:
        """Return the model with this part in place of its own, and zeros as weights.

        Zeros take no memory until something is written to them.
        """
        before = self.part.state_dict()
        zeros = {
            name: torch.zeros(tensor.shape, dtype=before[name].dtype, device=before[name].device)
            for name, tensor in plain.state_dict().items()
        }
        plain.load_state_dict(zeros, assign=True)
        convert_constants(plain, self.part)
        return _with_part(self.model, self.path.split("."), plain) if self.path else plain


def _part_with_config(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the outermost module with a config, and its path."""
    for path, module in model.named_modules():
        if is_config(getattr(module, "config", None)):
            return path, module
    raise PruneError(
        f"{type(model).__name__}: no module in it has a config, so this is not a model of "
        f"transformers. polarprune.save stores any pruned model."
    )


def _with_part(model: nn.Module, path: list[str], part: nn.Module) -> nn.Module:
    """Return a shallow copy of a model with another module at a path."""
    if not path:
        return part
    new = copy.copy(model)
    child = _with_part(model.get_submodule(path[0]), path[1:], part)
    new._modules = {**model._modules, path[0]: child}
    return new


# --- numbers and constants ------------------------------------------------------------------------


def _arithmetic(tape: Tape) -> Iterator[_Arithmetic]:
    """Yield the operations that are called with numbers or make constants, and what these are."""
    for op in tape.ops:
        arguments = op.func._schema.arguments
        given = {**dict(zip((one.name for one in arguments), op.args, strict=False)), **op.kwargs}
        kinds = {one.name: str(one.type) for one in arguments}
        found = [f"{k}={x}" for k, x in given.items() if _computes_with(x, kinds[k])]
        made = op.args[0] if op.name == "lift_fresh" else None
        if isinstance(made, Value) and made.data is not None:
            found.append(str(made.data.tolist()))
        if found:
            yield op, (op.name, *found)


def _computes_with(argument: object, kind: str) -> bool:
    """Return whether an argument is a number to compute with: no axis, size or mode."""
    return isinstance(argument, float) or (type(argument) is int and "int" not in kind)


def _constants(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a model makes when it is built, and does not store."""
    stored = model.state_dict().keys()
    yield from ((name, x) for name, x in model.named_buffers() if name not in stored)


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and torch.equal(one, other)
