"""Find the sizes that the config of a pruned model has to hold.

Libraries such as transformers build a model from a config: `type(model)(model.config)`. The config
of a pruned model still has the original sizes. No table of architectures says which of its numbers
to change. This module finds out by building models without weights:

1. Change one number and see which sizes change. If doubling `intermediate_size` doubles axis 0 of
   `mlp.up_proj.weight`, that size is proportional to the number.
2. Every pruned size is then an equation for new / old of the numbers. If that axis shrank from 64
   to 48, `intermediate_size` is multiplied by 3/4.
3. Solve the equations, build a model with the new numbers, and check its shapes.

The number of heads may not show in any shape. Then several configs fit, and only a comparison of
outputs can choose between them (`config_proof`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from torch import nn

from ..errors import PruneError, reason_given
from .config_entries import PER_LAYER, Key, parts_of, refusal_of, values_in, with_entries
from .config_models import Config, plain_class, without_weights

SizeKey = tuple[str, str | int]  # a tensor and an axis, or a module and an attribute
SizesByKey = Mapping[SizeKey, int]
Powers = tuple[tuple[Key, int], ...]  # the numbers that a size is proportional to
Ratios = Mapping[Key, Fraction]  # new / old, for numbers in a config

_ONE = Fraction(1)
_FACTORS = (Fraction(2), Fraction(1, 2), Fraction(3))
_IMPLIED = "head_dim"  # the one number that models read although their config may not have it
_TRIED = 7200  # instead of a number that is not given; no model has it, and many numbers divide it
_MOST_CONFIGS = 16


class ModelSizes(NamedTuple):
    """The sizes of a model's tensors, and the integers that its modules hold."""

    shapes: dict[SizeKey, int]
    attributes: dict[SizeKey, int]


def sizes_of(model: nn.Module) -> ModelSizes:
    """Return the sizes of a model."""
    sizes = ModelSizes({}, {})
    for name, tensor in model.state_dict().items():
        sizes.shapes.update({(name, axis): size for axis, size in enumerate(tensor.shape)})
    for path, module in model.named_modules():
        held = {(path, k): v for k, v in vars(module).items() if type(v) is int}
        sizes.attributes.update(held)
    return sizes


# --- the search -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Demand:
    """An equation for one size: the product of ratio ** power over the numbers equals `ratio`.

    Attributes:
        powers: The numbers that the size depends on, each with its power.
        ratio: New size / old size.
        size: A size with this equation.
    """

    powers: Powers
    ratio: Fraction
    size: SizeKey

    def is_met(self, ratios: Ratios) -> bool:
        """Return whether these ratios of the numbers solve the equation."""
        product = _ONE
        for key, power in self.powers:
            product *= ratios.get(key, _ONE) ** power
        return product == self.ratio


class BuiltSizes:
    """The sizes of the models that a class builds from a config with other numbers, each once.

    Args:
        model: A model of the class, with the config.

    Raises:
        PruneError: If the class cannot be built from its config.
    """

    def __init__(self, model: nn.Module) -> None:
        self.family, self.config = plain_class(model), model.config
        self._known: dict[frozenset[tuple[Key, int]], ModelSizes | str] = {}
        try:
            self.before = sizes_of(without_weights(self.family, copy.deepcopy(self.config)))
        except Exception as error:
            raise PruneError(f"{self.family.__name__}(config) fails: {error!r}") from error

    def measure(self, entries: Mapping[Key, int]) -> ModelSizes | None:
        """Return the sizes of a model that is built with other entries, if it can be built."""
        found = self._built(entries)
        return None if isinstance(found, str) else found

    def failure(self, entries: Mapping[Key, int]) -> str:
        """Return why no model can be built with these entries; empty if one can."""
        found = self._built(entries)
        return found if isinstance(found, str) else ""

    def _built(self, entries: Mapping[Key, int]) -> ModelSizes | str:
        key = frozenset(entries.items())
        if key not in self._known:
            try:
                new = with_entries(self.config, entries)
                self._known[key] = sizes_of(without_weights(self.family, new))
            except Exception as error:  # the class or its config refuses these entries
                why = reason_given(error)
                self._known[key] = f"{self.family.__name__} cannot be built: {why}"
        return self._known[key]


class ConfigSearch:
    """Finds the configs from which the class of a pruned model builds the pruned shapes.

    Args:
        model: A pruned model. Its `config` has the sizes of the original, or the true ones.
        wanted: The sizes to look for, by default those of the model.
        built: What is known about the class and the config of the model.

    Raises:
        PruneError: If the class does not build the layers of the model from its config.
    """

    def __init__(
        self, model: nn.Module, wanted: ModelSizes | None = None, built: BuiltSizes | None = None
    ) -> None:
        self.built = built or BuiltSizes(model)
        self.family, self.config = self.built.family, self.built.config
        self.measure, self.before = self.built.measure, self.built.before
        self.wanted = wanted or sizes_of(model)
        self.refused = ""  # why the likeliest of the configs with these sizes cannot be read
        if self.before.shapes.keys() != self.wanted.shapes.keys():
            lost = {name for name, _ in self.before.shapes.keys() ^ self.wanted.shapes.keys()}
            raise PruneError(
                f"{self.family.__name__}(config) has other layers than the pruned model, such as "
                f"{min(lost)}: layers that lost all channels cannot be left out of a config"
            )

    def configs(self) -> Iterator[Config]:
        """Yield configs that give the pruned shapes, the likeliest first.

        Raises:
            PruneError: If there is none; the message says which sizes no config can give.
        """
        if self.before.shapes == self.wanted.shapes:
            yield copy.deepcopy(self.config)
        reason, failure, fits = "", "", False
        for given in self._added_entries():
            solved = _Equations(self, given)
            reason = reason if fits else solved.contradiction()
            for solution in solved.solutions():
                entries = {**given, **solution}
                failure = failure or self.built.failure(entries)
                measured = self.measure(entries)
                if measured is not None and measured.shapes == self.wanted.shapes:
                    config = with_entries(self.config, entries)
                    fits, reason = True, refusal_of(config)
                    self.refused = self.refused or reason
                    if not reason:
                        yield config
            if fits and not reason:
                return
        unknown = failure or f"no integers in {type(self.config).__name__} give the pruned shapes"
        raise PruneError(reason or unknown)

    def _added_entries(self) -> Iterator[dict[Key, int]]:
        """Yield entries to add to the config: none, those that it implies, and those for layers."""
        yield {}
        missing = [key for key, value in values_in(self.config) if value is None]
        parts = parts_of(self.config)
        missing += [(*key, _IMPLIED) for key, part in parts if _IMPLIED not in vars(part)]
        found = {key: value for key in missing if (value := self._implied(key)) is not None}
        if found:
            yield found
        layers = self._entries_of_layers()
        if layers:
            yield {**found, **layers}

    def _entries_of_layers(self) -> dict[Key, int]:
        """Return the integers that the class reads for every layer, as the config has them now."""
        count = vars(self.config).get("num_hidden_layers")
        if type(count) is not int or not hasattr(type(self.config), PER_LAYER):
            return {}
        read = {}
        for key, value in values_in(self.config):
            if len(key) == 1 and type(value) is int:
                tried = self.measure({(PER_LAYER, 0, key[0]): 2 * value})
                if tried is not None and tried.shapes != self.before.shapes:
                    read[key[0]] = value
        return {(PER_LAYER, n, name): value for n in range(count) for name, value in read.items()}

    def _implied(self, key: Key) -> int | None:
        """Return the value that a missing number has implicitly, if there is one."""
        tried = self.measure({key: _TRIED})
        pairs = [] if tried is None else _pairs(self.before.shapes, tried.shapes)
        values = {Fraction(_TRIED * old, new) for _, old, new in pairs if old != new and new}
        if len(values) != 1 or (value := values.pop()).denominator != 1:
            return None
        again = self.measure({key: int(value)})
        same = again is not None and again.shapes == self.before.shapes
        return int(value) if same else None


class _Equations:
    """The equations that the sizes of a pruned model give for the numbers in its config.

    Equations of shapes are required; those of integer attributes are only preferred.

    Args:
        search: The search, with the sizes before and after pruning.
        given: Entries to add to the config.
    """

    def __init__(self, search: ConfigSearch, given: dict[Key, int]) -> None:
        self.search, self.given = search, given
        sizes = _pairs(search.before.shapes, search.wanted.shapes)
        changed = {old for _, old, new in sizes if old != new}
        values = dict(values_in(with_entries(search.config, given))) | given
        self.old = {k: v for k, v in values.items() if type(v) is int and _divides(v, changed)}
        effects = {key: self._effects(key, value) for key, value in self.old.items()}
        self.demands = _demands(sizes, effects)
        held = _pairs(search.before.attributes, search.wanted.attributes)
        self.wishes = [one for one in _demands(held, effects) if one.powers]
        self.ratios = {key: self._ratios(key) for key, found in effects.items() if found}

    def _effects(self, key: Key, value: int) -> dict[SizeKey, int]:
        """Return the sizes that are proportional to a power of a number, and the powers."""
        for factor in _FACTORS:
            if (value * factor).denominator == 1:
                after = self.search.measure({**self.given, key: int(value * factor)})
                if after is not None:
                    before = self.search.before
                    both = [*_pairs(before.shapes, after.shapes)]
                    both += _pairs(before.attributes, after.attributes)
                    return {size: _power(o, n, factor) for size, o, n in both if o != n}
        return {}

    def _ratios(self, key: Key) -> list[Fraction]:
        """Return the ratios new / old to try for a number; 1 comes first."""
        mine = [one.ratio for one in self.demands if key in dict(one.powers)]
        every = mine or [one.ratio for one in self.demands]  # heads show in no shape
        both = {ratio for one in every for ratio in (one, 1 / one)} - {_ONE}
        return [_ONE, *sorted(r for r in both if (self.old[key] * r).denominator == 1)]

    def solutions(self) -> list[dict[Key, int]]:
        """Return new integers that solve the required equations; the most preferred ones first."""
        found = sorted(self._solving({}), key=self._unmet)[:_MOST_CONFIGS]
        return [
            {key: int(self.old[key] * ratio) for key, ratio in one.items() if ratio != 1}
            for one in found
        ]

    def _solving(self, ratios: dict[Key, Fraction]) -> Iterator[dict[Key, Fraction]]:
        """Yield the ratios that solve the required equations; try one number after the other."""
        known = [one for one in self.demands if all(key in ratios for key, _ in one.powers)]
        if not all(one.is_met(ratios) for one in known):
            return
        if len(ratios) == len(self.ratios):
            yield ratios
            return
        key = list(self.ratios)[len(ratios)]
        for ratio in self.ratios[key]:
            yield from self._solving({**ratios, key: ratio})

    def _unmet(self, ratios: Ratios) -> tuple[int, int]:
        """Count the attributes that would differ, then the numbers that change.

        Surgery does not update attributes that nothing reads: shapes are more reliable.
        """
        unmet = [one.ratio for one in self.wishes if not one.is_met(ratios)]
        weighed = sum(1 if ratio == 1 else 2 for ratio in unmet)
        return weighed, sum(ratio != 1 for ratio in ratios.values())

    def contradiction(self) -> str:
        """Say why no integers solve the required equations; empty if they do not contradict."""
        seen: dict[Powers, _Demand] = {}
        for one in self.demands:
            other = seen.setdefault(one.powers, one)
            if other.ratio != one.ratio:
                return _contradiction(one.powers, other, one, self.search.wanted.shapes)
        return ""


def _divides(value: int, sizes: Iterable[int]) -> bool:
    return value > 0 and any(size % value == 0 for size in sizes)


def _pairs(before: SizesByKey, after: SizesByKey) -> list[tuple[SizeKey, int, int]]:
    """Return the keys that both models have, with both sizes."""
    return [(key, size, after[key]) for key, size in before.items() if key in after]


def _power(old: int, new: int, factor: Fraction) -> int:
    """Return the power p of new = old · factor^p; 0 if there is none."""
    if old <= 0 or new <= 0:
        return 0
    return next((p for p in (1, -1, 2, -2) if factor**p == Fraction(new, old)), 0)


def _demands(
    sizes: Iterable[tuple[SizeKey, int, int]], effects: Mapping[Key, Mapping[SizeKey, int]]
) -> list[_Demand]:
    """Return the equations of these sizes for the numbers they depend on, without repetitions."""
    found: dict[tuple[Powers, Fraction], _Demand] = {}
    for size, old, new in sizes:
        if old > 0 and new > 0:
            powers = tuple((key, power) for key, e in effects.items() if (power := e.get(size, 0)))
            demand = _Demand(powers, Fraction(new, old), size)
            found.setdefault((powers, demand.ratio), demand)
    return list(found.values())


def _contradiction(powers: Powers, one: _Demand, other: _Demand, sizes: SizesByKey) -> str:
    """Say which sizes would need different numbers, and what to do."""
    names = " × ".join(".".join(map(str, key)) for key, _ in powers) or "no number in the config"
    shown = " and ".join(f"{p[0]} (axis {p[1]}: {sizes[p]})" for p in (one.size, other.size))
    first, second = (_without_numbers(size[0]) for size in (one.size, other.size))
    if first == second:
        return (
            f"{names} is one number for all blocks, but {shown} differ. Prune with uniform=True, "
            f"which leaves the same number of channels in every block"
        )
    cut = one if one.ratio != 1 else other
    module = _without_numbers(cut.size[0].rpartition(".")[0])
    return (
        f"{names} is one number for {shown}, which were not pruned in the same proportion. Prune "
        f'both in the same proportion, or freeze what was pruned alone with keep=["{module}"]'
    )


def _without_numbers(name: str) -> str:
    """Return a name with * in place of the numbers of blocks."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
