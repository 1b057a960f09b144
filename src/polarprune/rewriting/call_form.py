"""Describe the structure of a call's arguments as plain data, independent of torch's version.

`block(x, [y, 2.0], mask=m)` has the leaves `x`, `y`, `2.0` and `m`. Its form is that of the pair
`(args, kwargs)`; a container is a triple of its kind, its keys and its items:

    ("tuple", (), (("tuple", (), ("*", ("list", (), ("*", "*")))), ("dict", ("mask",), ("*",))))

Forms are compared, and stored in files. Nothing is ever built from one: the name of a class in a
form is only compared with the name of the class in a call.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, TypeAlias

from ..errors import PruneError

Form: TypeAlias = str | tuple[Any, ...]  # LEAF, or a triple of kind, keys and items
LEAF = "*"
_SEQUENCES: dict[type, str] = {tuple: "tuple", list: "list"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict"}
_CLASSES = ("namedtuple", "dataclass")  # the kind continues with the name of the class
_MAX_DEPTH = 20  # of nested containers
_MAX_PARTS = 10_000  # leaves and containers
_MAX_KEY = 4096  # characters


def flatten(tree: object) -> tuple[list[object], Form]:
    """Return the leaves of nested containers, and their form.

    Containers are tuples, lists, dicts, `OrderedDict`, named tuples, and dataclasses that are dicts
    (`ModelOutput` of transformers). Everything else is a leaf.
    """
    kind, keys, items = _parts(tree)
    if kind == LEAF:
        return [tree], LEAF
    pairs = [flatten(item) for item in items]
    leaves = [leaf for found, _ in pairs for leaf in found]
    return leaves, (kind, keys, tuple(form for _, form in pairs))


def _parts(tree: object) -> tuple[str, tuple[object, ...], Sequence[object]]:
    """Return the kind, the keys and the items of a container; `LEAF` as kind if it is none."""
    family = type(tree)
    if family in _SEQUENCES and isinstance(tree, (tuple, list)):
        return _SEQUENCES[family], (), tree
    if isinstance(tree, tuple) and hasattr(family, "_fields"):
        return f"namedtuple:{family.__name__}", tuple(family._fields), tree
    if isinstance(tree, dict):
        if family in _MAPPINGS:
            return _MAPPINGS[family], tuple(tree), list(tree.values())
        if isinstance(tree, OrderedDict) and is_dataclass(tree):
            return f"dataclass:{family.__name__}", tuple(tree), list(tree.values())
    return LEAF, (), ()


def rebuild(tree: Any, leaves: Sequence[object]) -> Any:
    """Return containers like these with other leaves, in the order of `flatten`."""
    waiting = iter(leaves)

    def build(old: Any) -> Any:
        kind, keys, items = _parts(old)
        if kind == LEAF:
            return next(waiting)
        new = [build(item) for item in items]
        if isinstance(old, dict):
            named = dict(zip(keys, new, strict=True))
            return type(old)(**named) if is_dataclass(old) else type(old)(named)
        return type(old)(*new) if hasattr(old, "_fields") else type(old)(new)

    return build(tree)


def positional(count: int) -> Form:
    """Return the form of a call with this many positional arguments, none of them a container."""
    return "tuple", (), (("tuple", (), (LEAF,) * count), ("dict", (), ()))


def count_leaves(form: Form) -> int:
    """Return the number of leaves of a form."""
    return 1 if isinstance(form, str) else sum(map(count_leaves, form[2]))


# --- in files -------------------------------------------------------------------------------------


def encode_form(form: Form) -> object:
    """Return a form as lists that JSON can hold.

    Raises:
        PruneError: The form has a key, a depth or a size that a file cannot hold.
    """
    decode_form(data := _as_lists(form))
    return data


def _as_lists(form: Form) -> object:
    """Return a form with lists in place of tuples."""
    if isinstance(form, str):
        return form
    kind, keys, items = form
    return [kind, list(keys), [_as_lists(item) for item in items]]


def decode_form(data: object) -> Form:
    """Return the form of a call that a file holds, in any version of the format.

    Args:
        data: Lists, as `encode_form` returns them; in files of version 2, the text that
            `torch.utils._pytree.treespec_dumps` returned.

    Raises:
        PruneError: The data describe no call.
    """
    found = _from_torch(data) if isinstance(data, str) else data
    form = _Reader().read(found, 0)
    if isinstance(form, str) or form[0] != "tuple" or len(form[2]) != 2:
        raise _refused("no call")
    args, kwargs = form[2]
    _require(args[0] == "tuple" and kwargs[0] == "dict", "no call")
    _require(all(type(key) is str for key in kwargs[1]), "names")
    return form


class _Reader:
    """Reads a form from plain data, which may be forged."""

    def __init__(self) -> None:
        self.count = 0

    def read(self, data: object, depth: int) -> Form:
        """Return the form that the data describe."""
        self.count += 1
        _require(self.count <= _MAX_PARTS, f"more than {_MAX_PARTS} parts")
        _require(depth <= _MAX_DEPTH, f"nested more than {_MAX_DEPTH} levels deep")
        if type(data) is str:
            _require(data == LEAF, "unknown part")
            return LEAF
        if type(data) is not list or len(data) != 3:
            raise _refused("unknown part")
        kind, keys, items = data
        if type(kind) is not str or type(keys) is not list or type(items) is not list:
            raise _refused("unknown part")
        _check_kind(kind, keys, len(items))
        return kind, tuple(keys), tuple(self.read(item, depth + 1) for item in items)


def _check_kind(kind: str, keys: list[object], count: int) -> None:
    """Check that a container of this kind may have these keys and this many items."""
    if kind in _SEQUENCES.values():
        _require(not keys, "keys of a sequence")
        return
    _require(len(keys) == count, "number of keys")
    _require(all(map(_is_key, keys)) and len(set(keys)) == count, "keys that cannot be stored")
    if kind not in _MAPPINGS.values():
        family, _, name = kind.partition(":")
        known = family in _CLASSES and name.isidentifier() and len(name) <= _MAX_KEY
        _require(known, "unknown container")
        _require(all(type(key) is str for key in keys), "fields")


def _is_key(key: object) -> bool:
    """Return whether this is a key of a dict that JSON can hold: a number, a text or None."""
    if type(key) is str:
        return len(key) <= _MAX_KEY
    return key is None or type(key) is bool or (type(key) is int and abs(key) < 2**63)


# The notation of torch, in files of version 2: `[1, {"type": "builtins.list", "context": "null",
# "children_spec": [...]}]`. A leaf has no type. The context of a dict is a JSON text of its keys.
_KINDS_OF_TORCH = {
    "builtins.tuple": "tuple",
    "builtins.list": "list",
    "builtins.dict": "dict",
    "collections.OrderedDict": "OrderedDict",
}


def _from_torch(text: str) -> object:
    """Return lists for the form that a file of version 2 holds; `_Reader` checks them."""
    _require(len(text) < 2**16, "too long")
    protocol, spec = json.loads(text)
    _require(protocol == 1, "another protocol")
    return _lists_from_torch(spec)


def _lists_from_torch(spec: Any) -> object:
    """Return lists for one node of torch's notation."""
    _require(type(spec) is dict and spec.keys() == {"type", "context", "children_spec"}, "node")
    kind, context, children = spec["type"], spec["context"], spec["children_spec"]
    if kind is None:
        _require(context is None and children == [], "leaf")
        return LEAF
    _require(type(kind) is str and type(context) is str and type(children) is list, "node")
    # Other classes were dicts, too: those of transformers, by their full name.
    known = _KINDS_OF_TORCH.get(kind, f"dataclass:{kind.rpartition('.')[2]}")
    keys = json.loads(context)
    sequence = known in _SEQUENCES.values()
    _require(keys is None if sequence else type(keys) is list, "context")
    return [known, [] if sequence else keys, [_lists_from_torch(child) for child in children]]


def _require(fine: bool, what: str) -> None:
    """Refuse the form unless the condition holds."""
    if not fine:
        raise _refused(what)


def _refused(what: str) -> PruneError:
    """Return the error for a form that cannot be stored or that a file should not hold."""
    return PruneError(f"the arguments of its call have a structure that files cannot hold ({what})")
