"""Read and change the integers that the config of another library holds."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

from .config_models import Config

Key = tuple[str | int, ...]  # where an entry of a config is, as ("text_config", "hidden_size")

PER_LAYER = "per_layer_config"  # layer -> entries that replace those of the config there
_NOT_SIZES = ("_id", "_ids", "_tokens")  # ends of names of integers that are not sizes


def is_config(thing: object) -> bool:
    """Return whether a model can hold its sizes in this object."""
    return hasattr(thing, "to_dict") and hasattr(type(thing), "from_dict")


def with_entries(config: Config, entries: Mapping[Key, int]) -> Config:
    """Return a copy of a config with other integers."""
    new, layers = copy.deepcopy(config), dict[int, dict[str, int]]()
    for key, value in entries.items():
        if key[0] == PER_LAYER:
            layers.setdefault(int(key[1]), {})[str(key[2])] = value
        else:
            set_entry(new, key, value)
    if layers:
        new.per_layer_config = layers
    return new


def set_entry(config: Config, key: Key, value: int) -> None:
    """Change an integer in a config, in place."""
    *path, name = key
    owner = config
    for part in path:
        owner = owner[int(part)] if isinstance(owner, list) else getattr(owner, str(part))
    if isinstance(owner, list):
        owner[int(name)] = value
    else:
        setattr(owner, str(name), value)


def values_in(thing: Config, key: Key = ()) -> Iterator[tuple[Key, object]]:
    """Yield the values in a config, in its lists and in the configs that it holds."""
    held = enumerate(thing) if isinstance(thing, list) else vars(thing).items()
    for name, value in held:
        if str(name).startswith("_") or str(name).endswith(_NOT_SIZES):
            continue
        if isinstance(value, list) or is_config(value):
            yield from values_in(value, (*key, name))
        else:
            yield (*key, name), value


def parts_of(config: Config, key: Key = ()) -> Iterator[tuple[Key, Config]]:
    """Yield a config and the configs that it holds."""
    yield key, config
    for name, value in vars(config).items():
        if is_config(value):
            yield from parts_of(value, (*key, name))


def refusal_of(config: Config) -> str:
    """Return why a config cannot be read from a file; empty if it can."""
    try:
        type(config).from_dict(config.to_dict())
    except Exception as error:  # configs check their numbers in their own ways
        why = " ".join(str(error).split()).rstrip(".")
        return (
            f"{type(config).__name__} refuses the pruned sizes: {why}. Freeze these channels with "
            f"keep=[...]"
        )
    return ""
