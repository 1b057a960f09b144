"""Check the parts of the metadata and the types of all fields, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...errors import PruneError
from ...plain_data import JsonObject
from ...rewriting.stored_graphs import is_identifier, is_path
from ...surgery.recipe import Recipe
from .require import require

NEWEST_VERSION = 3
_SIGNED_PARTS = {"version", "recipe", "aliases", "card", "sha256"}
_PARTS = {
    1: _SIGNED_PARTS - {"sha256"},
    2: _SIGNED_PARTS,
    3: _SIGNED_PARTS,
}
_MOST_CODE_VALUES = 2**20  # values in stored code take more memory than others
Check = Callable[[Any], bool]


def check_parts(content: Any) -> JsonObject:
    """Return the metadata if they have a known version and exactly the parts of this version."""
    version = content["version"]
    if type(version) is int and version > NEWEST_VERSION:
        raise PruneError("it was written by a newer version of polarprune; update polarprune")
    require(type(version) is int and version in _PARTS, f"version {version!r} does not exist")
    complete = content.keys() == _PARTS[version] and type(content["card"]) is dict
    require(complete, "parts of its metadata are missing or unknown")
    return dict(content)


# --- types of fields ------------------------------------------------------------------------------


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_name(value: object) -> bool:
    return type(value) is str and len(value) <= 4096


def _list_of(item: Check, *, distinct: bool = False) -> Check:
    """Return a check for lists whose items all pass `item`."""

    def check(value: object) -> bool:
        if type(value) is not list or not all(item(one) for one in value):
            return False
        return not distinct or len(set(value)) == len(value)

    return check


def _dict_of(key: Check, item: Check) -> Check:
    """Return a check for dicts whose keys and values all pass."""

    def check(value: object) -> bool:
        return type(value) is dict and all(key(k) and item(v) for k, v in value.items())

    return check


def _is_size(value: object) -> bool:
    return _is_count(value) or (type(value) is int and value == -1)


_counts, _sizes, _names = _list_of(_is_count), _list_of(_is_size), _list_of(_is_name, distinct=True)
_FIELDS: dict[str, Check] = {
    "shapes": _dict_of(_is_name, _counts),
    "slices": _dict_of(_is_name, _dict_of(str.isdecimal, _counts)),
    "attributes": _dict_of(
        _is_name, _dict_of(is_identifier, lambda value: _is_count(value) or _sizes(value))
    ),
    "constants": _names,
    "identities": _names,
    "hollow": _names,  # pooling layers that may be given no channels
    "heads": _dict_of(_is_name, _counts),
    "rewired": _dict_of(_is_name, lambda value: type(value) is dict),
    "removed": _dict_of(_is_name, _list_of(is_path, distinct=True)),
    "computed": _names,
    "unread": _names,
}


def typed_recipe(data: object) -> Recipe:
    """Return the recipe if it has exactly its fields, each of the right type."""
    if type(data) is not dict or data.keys() != _FIELDS.keys():
        raise PruneError("the recipe has missing or unknown fields")
    for name, check in _FIELDS.items():
        require(check(data[name]), f"{name} in the recipe is malformed")
    return Recipe(**data)


def check_code_amount(data: object) -> None:
    """Refuse a recipe with more values in its stored code than any model needs."""
    count = 0
    level: list[object] = [data.get("rewired") if type(data) is dict else None]
    while level:
        count += len(level)
        require(count <= _MOST_CODE_VALUES, "it holds too much code")
        level = [item for value in level for item in _items(value)]


def _items(value: object) -> list[object]:
    if type(value) is dict:
        return list(value.values())
    return value if type(value) is list else []


def check_aliases(aliases: Any, tensors: Mapping[str, Tensor]) -> None:
    """Check that every shared name is new and refers to a tensor of the file."""
    require(_dict_of(_is_name, _is_name)(aliases), "the names of shared tensors are malformed")
    for name, same in aliases.items():
        fine = same in tensors and name not in tensors
        require(fine, f"{name} cannot share its tensor with {same}")
