"""Every assignment of `module.__class__` in polarprune.

A module gets a new forward, or an attribute that is computed, through a subclass of its own class.
So `isinstance` still holds, all other methods stay, and other instances of the class are not
affected. The subclass has the name of the class it is derived from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from torch import nn


def derive_class(module: nn.Module, members: Mapping[str, object]) -> None:
    """Make the module an instance of a new subclass of its class.

    Args:
        module: The module, which is changed in place.
        members: Methods and properties of the subclass.

    Raises:
        Exception: Whatever a class raises that does not accept subclasses or another
            `__class__`. The module is unchanged then.
    """
    module.__class__ = subclass(type(module), members)


def subclass(family: type[nn.Module], members: Mapping[str, object]) -> type[nn.Module]:
    """Return a new subclass of a class of modules, with its name and these members."""
    return type(family.__name__, (family,), dict(members))


def set_class(module: nn.Module, family: type[nn.Module]) -> None:
    """Make the module an instance of this class, which fits its attributes."""
    module.__class__ = family


def leave_derived_class(module: nn.Module) -> None:
    """Undo `derive_class`: make the module an instance of the class it was derived from."""
    module.__class__ = type(module).__bases__[0]


def drop_member(module: nn.Module, name: str) -> None:
    """Make the module an instance of a copy of its class without the member `name`.

    A copy, because a copied module shares its class with the original.
    """
    family = type(module)
    rest = {key: member for key, member in vars(family).items() if key != name}
    module.__class__ = type(family.__name__, family.__bases__, rest)


@contextmanager
def derived_class(module: nn.Module, members: Mapping[str, object]) -> Iterator[None]:
    """Apply `derive_class` inside this context, and restore the class afterwards.

    A module whose class does not accept subclasses keeps its class.
    """
    family = type(module)
    with suppress(Exception):  # a metaclass or __init_subclass__ of the user may raise anything
        derive_class(module, members)
    try:
        yield
    finally:
        module.__class__ = family
