"""Public names are documented with arguments, errors and an example, and the examples run."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polarprune as pp
from polarprune import rules
from polarprune.report.report import Report


def methods(owner: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class that are ours, inherited ones too, by full name."""
    found = {name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")}
    return {
        f"{owner.__name__}.{name}": method
        for name, method in found.items()
        if inspect.isroutine(method) and method.__module__.startswith("polarprune")
    }


METHODS = methods(pp.Pruner) | methods(pp.Schedule) | methods(pp.Gate)
RULES = {name: getattr(rules, name) for name in rules.__all__ if name[0].islower()}
REPORT = methods(Report)
NAMES: dict[str, Any] = {name: getattr(pp, name) for name in pp.__all__} | METHODS | RULES | REPORT
RAISES_NOTHING = {
    "PruneError",
    "Pruner.cost",
    "Pruner.plan",
    "Pruner.report",
    "Gate.values",
    *(methods(pp.Schedule).keys() - {"Schedule.paper"}),
    *RULES,
    "Report.to_markdown",
}


def text_of(name: str) -> str:
    return inspect.getdoc(getattr(NAMES[name], "__func__", NAMES[name])) or ""


def parameters(thing: Callable[..., Any]) -> list[str]:
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return []
    given = inspect.signature(getattr(thing, "__func__", thing)).parameters
    return [name for name in given if name not in ("self", "cls")]


def returns_something(thing: Callable[..., Any]) -> bool:
    if inspect.isclass(thing):
        return False
    return inspect.signature(thing).return_annotation not in (None, "None")


def test_rules_and_reports_are_checked_too() -> None:
    assert {"along", "because", "pointwise", "reduction", "same", "support"} == RULES.keys()
    assert {"Report.to_json", "Report.from_json", "Report.snapshots"} < REPORT.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_every_section(name: str) -> None:
    text, given = text_of(name), parameters(NAMES[name])
    assert text[0].isupper() and text.splitlines()[0].rstrip().endswith((".", ":"))
    sections = ["Example:"]
    sections += ["Args:"] if given else []
    sections += ["Returns:"] if returns_something(NAMES[name]) else []
    sections += [] if name in RAISES_NOTHING else ["Raises:"]
    missing = [section for section in sections if f"\n{section}\n" not in text]
    assert not missing, f"{name} lacks {missing}"
    undocumented = [one for one in given if f"{one.lstrip('*')}:" not in text]
    assert not undocumented, f"{name} does not explain {undocumented}"


def test_methods_that_a_class_inherits_are_checked_too() -> None:
    class Child(pp.Schedule):
        pass

    assert {name.partition(".")[2] for name in methods(Child)} >= {"paper", "eps", "deadline"}
    assert {"Pruner.step", "Gate.forward"} <= METHODS.keys()
    assert "Gate.parameters" not in METHODS


def test_every_public_attribute_of_a_pruner_is_documented() -> None:
    pruner = fresh()["pruner"]
    assert isinstance(pruner, pp.Pruner)
    names = {name for name in dir(pruner) if not name.startswith("_")}
    names -= {name.partition(".")[2] for name in METHODS}
    _, _, listed = text_of("Pruner").partition("\nAttributes:\n")
    listed = listed.partition("\nRaises:\n")[0]
    assert "step_count" in names
    assert [name for name in sorted(names) if f"    {name}: " not in listed] == []


def trained() -> dict[str, Any]:
    """Run the example of `Pruner`; return the names that it defines."""
    scope: dict[str, Any] = {"torch": torch, "pp": pp}
    torch.manual_seed(0)
    run("Pruner", scope)
    return scope


def fresh() -> dict[str, Any]:
    """Return a pruner that is not attached, after a backward pass."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    pruner = pp.Pruner(model, torch.randn(16, 8), macs=0.5, steps=10)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.1))
    model(torch.randn(16, 8)).square().mean().backward()
    return {"torch": torch, "pp": pp, "model": model, "pruner": pruner, "optimizer": optimizer}


def resumed() -> dict[str, Any]:
    return {**fresh(), "state": fresh()["pruner"].state_dict()}


def reported() -> dict[str, Any]:
    return {"Report": Report, "report": trained()["pruner"].report()}


SETUPS = {
    **dict.fromkeys(REPORT, reported),
    "Pruner.param_groups": fresh,
    "Pruner.attach": fresh,
    "Pruner.step": fresh,
    "Pruner.load_state_dict": resumed,
}


def run(name: str, scope: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(text_of(name), scope, name, None, None)
    assert test.examples, f"{name} has no example"
    test.globs = scope  # keep what the example defines
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    runner.run(test, out=said.append, clear_globs=False)
    assert runner.failures == 0, "".join(said)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name.startswith(("Pruner.", "Report.")):
        scope = SETUPS.get(name, trained)()
    else:
        scope = {"torch": torch, "pp": pp, "Schedule": pp.Schedule, "Gate": pp.Gate}
        torch.manual_seed(0)
    run(name, scope)
