"""Models and data by name: `package.module:factory`, `file.py:factory`, `timm:NAME`.

In: a name that a user typed. Out: what the named factory makes. It imports the user's code, timm or
torchvision, but only when a name needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch import nn

from ..errors import PruneError

FORMS = "package.module:factory, file.py:factory, timm:NAME or torchvision:NAME"
PACKAGES = ("timm", "torchvision")
# A factory is given the number of classes if it has a parameter of one of these names.
_CLASSES = ("num_classes", "classes", "n_classes", "num_labels")


def of_package(name: str) -> bool:
    """Return whether this is the name of a model of timm or torchvision."""
    return name.partition(":")[0] in PACKAGES


def make_model(name: str, classes: int | None = None) -> nn.Module:
    """Return the model of a name, with new weights.

    Args:
        name: `package.module:factory`, `file.py:factory`, `timm:NAME` or `torchvision:NAME`. The
            current folder is searched for modules, too.
        classes: The number of classes, which a factory gets if it has a parameter `num_classes`,
            `classes`, `n_classes` or `num_labels`; None for the default of the model.

    Raises:
        PruneError: There is no such factory, it fails, or it returns something else.

    Example:
        >>> make_model("torch.nn:Identity")
        Identity()
    """
    if of_package(name):
        return _packaged(name, {} if classes is None else {"num_classes": classes})
    model = call_factory(name, "model", classes)
    if not isinstance(model, nn.Module):
        raise PruneError(
            f"{name}: it returned a value of type {type(model).__name__}; return a torch.nn.Module."
        )
    return model


def published_model(name: str, weights: str) -> nn.Module:
    """Return a model of timm or torchvision with published weights.

    Args:
        name: `timm:NAME` or `torchvision:NAME`.
        weights: For torchvision, the name of the weights, such as `DEFAULT`. For timm, any text:
            the name of the model chooses them.

    Raises:
        PruneError: The weights cannot be loaded, or the name has another form.
    """
    if not of_package(name):
        raise PruneError(
            f"pretrained={weights!r}: only timm:NAME and torchvision:NAME have published weights. "
            f"Load them in {name}, or give --start FILE."
        )
    timm = name.startswith("timm:")
    try:
        return _packaged(name, {"pretrained": True} if timm else {"weights": weights})
    except PruneError as error:
        raise PruneError(f"pretrained={weights!r}: {error}") from error


def factory_code(name: str, classes: int | None = None) -> dict[str, str]:
    """Return the code that does what `make_model` does: its `imports` and the `call`.

    Example:
        >>> factory_code("timm:resnet18", 5)["call"]
        'timm.create_model("resnet18", num_classes=5)'
    """
    where, _, attribute = name.rpartition(":")
    if of_package(name):
        options = "" if classes is None else f", num_classes={classes}"
        if where == "timm":
            return {"imports": "import timm", "call": f'timm.create_model("{attribute}"{options})'}
        call = f'torchvision.models.get_model("{attribute}"{options})'
        return {"imports": "import torchvision", "call": call}
    found = _class_option(getattr(_module(where), attribute), classes)
    options = ", ".join(f"{key}={value}" for key, value in found.items())
    module = Path(where).stem if where.endswith(".py") else where
    return {"imports": f"from {module} import {attribute}", "call": f"{attribute}({options})"}


def names_module(name: str) -> bool:
    """Return whether this is the name of a Python file, or of a module that can be found."""
    _add_to_path("")
    try:
        return name.endswith(".py") or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def call_factory(name: str, what: str, classes: int | None = None) -> object:
    """Return what `package.module:factory` or `file.py:factory` makes.

    Args:
        name: The name of the factory.
        what: What it makes, for the message.
        classes: See `make_model`.

    Raises:
        PruneError: There is no such factory, or it fails.
    """
    forms = FORMS if what == "model" else "package.module:factory or file.py:factory"
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise PruneError(f"{name}: give {forms}.")
    try:
        factory = getattr(_module(where), attribute)
        return factory(**_class_option(factory, classes))
    except Exception as error:  # the user's code may raise anything
        raise PruneError(
            f"{name}: the {what} could not be made: {error!r}. Give {forms}."
        ) from error


def _packaged(name: str, options: dict[str, object]) -> nn.Module:
    """Return a model of timm or torchvision."""
    package, _, model = name.partition(":")
    try:
        found = importlib.import_module("timm" if package == "timm" else "torchvision.models")
    except (ImportError, RuntimeError) as error:
        raise PruneError(
            f"{name} is a model of {package}, which cannot be imported ({error}). Install a "
            f"version that fits this torch: pip install {package}."
        ) from error
    known = found.list_models()
    if model.partition(".")[0] not in known:  # timm would look for other names on a server
        raise PruneError(f"{name}: {package} has no model {model!r}. {_similar(model, known)}")
    make: Callable[..., nn.Module] = found.create_model if package == "timm" else found.get_model
    try:
        return make(model, **options)
    except Exception as error:  # no network, or an option that this model does not take
        raise PruneError(f"{name}: the model could not be made: {error!r}. Try another.") from error


def _similar(name: str, known: list[str]) -> str:
    """Return a sentence with a few models whose names begin alike."""
    for length in range(len(name), 2, -1):
        near = [other for other in known if other.startswith(name[:length])]
        if near:
            return f"Similar: {', '.join(near[:5])}."
    return "Its list_models() has them all."


def _class_option(factory: Callable[..., object], classes: int | None) -> dict[str, int]:
    """Return the number of classes under the name by which a factory takes it."""
    if classes is None:
        return {}
    try:
        accepted = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # not written in Python
        return {}
    return {name: classes for name in _CLASSES if name in accepted}


def _module(where: str) -> ModuleType:
    """Import a module by its dotted name, or from a file ending in `.py`."""
    if where.endswith(".py"):
        return _module_of_file(Path(where).resolve(strict=True))
    _add_to_path("")
    return importlib.import_module(where)


def _module_of_file(file: Path) -> ModuleType:
    """Import a file under its own name, or a longer one if a module of that name is loaded."""
    name = file.stem
    if _origin(name) not in (None, str(file)):
        name = f"{name}_{zlib.crc32(bytes(file)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    _add_to_path(str(file.parent))  # for what the file imports
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "the file ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _origin(name: str) -> str | None:
    """Return the file of a loaded module; None if no module of this name is loaded."""
    if name not in sys.modules:
        return None
    return getattr(sys.modules[name], "__file__", None) or "built in"


def _add_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
