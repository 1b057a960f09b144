"""Import packages that only some features need, when such a feature is first used."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..errors import PruneError


def optional_package(name: str, *, needed_for: str, extra: str) -> ModuleType:
    """Import a package that polarprune does not depend on.

    Args:
        name: Dotted name of the module.
        needed_for: The feature that needs it, as the subject of the error message.
        extra: The extra of polarprune that installs it.

    Returns:
        The imported module.

    Raises:
        PruneError: If the package is not installed.

    Example:
        >>> optional_package("json", needed_for="this example", extra="cli").loads("3")
        3
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise missing_package(package, needed_for=needed_for, extra=extra) from error


def missing_package(package: str, *, needed_for: str, extra: str) -> PruneError:
    """Return the error to raise where a package is not installed, or is itself incomplete."""
    return PruneError(
        f"{needed_for} needs {package}. Install it with: pip install 'polarprune[{extra}]'"
    )
