"""`Report`: the facts of one pruning run as plain data, with methods for every view of them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from numbers import Real

from ..errors import PruneError
from ..plain_data import JsonObject
from ..validation.arguments import check_snapshots
from .page import html_page
from .text import markdown, plain_text

_FIELD_TYPES = {
    "settings": dict,
    "before": dict,
    "after": dict,
    "groups": list,
    "history": list,
    "proof": dict,
    "notes": list,
    "results": dict,
    "model": str,
    "skipped": dict,
}
_HISTORY_KEYS = {"step", "closed", "between", "eps", "lam", "histogram"}


@dataclass(frozen=True)
class Report:
    """The facts of one run.

    Attributes:
        settings: What the run was asked for: budgets as fractions (`macs`, `params`, `latency`)
            or `lam`, `steps`, `multiple_of`; `uniform`: True or patterns, if widths are uniform.
        before: Cost of the original model in every resource.
        after: Cost without the channels that are closed now.
        groups: For each group its `name`, the channels `before` and `after`, and the `reason` if
            the group is frozen. `multiple`: how many of its units make up a width that is a
            multiple of 8. `family`: the position that it shares with the groups that keep equally
            many units.
        history: A row for every time the host read the gates: step; macs, params, latency
            (fractions of the original); closed; between (gates in (0, 0.5]); eps; lam; histogram
            (of gate values, 20 bins).
        proof: Largest relative difference between the gated and the small model in each mode;
            empty before `export()`.
        notes: Remarks for the user.
        results: What was measured around the run. Every key is optional: table (rows of stage,
            accuracy, macs, params), identical_predictions, test_images, largest_difference,
            latency_ms (before, after, runs, batch), machine, versions, file (of the small model),
            make (`imports` and `call`: the code that makes the original model).
        model: The class of the model, as a dotted name.
        skipped: Modes and inputs on which `export()` could not compare the models, and why.
    """

    settings: JsonObject
    before: dict[str, int]
    after: dict[str, int]
    groups: list[JsonObject]
    history: list[JsonObject] = field(repr=False)
    proof: dict[str, float]
    notes: list[str]
    results: JsonObject = field(default_factory=dict)
    model: str = ""
    skipped: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the report as JSON text, which `from_json` reads.

        Returns:
            The text.

        Raises:
            PruneError: If `results` holds something that JSON cannot represent.

        Example:
            >>> from pathlib import Path
            >>> size = Path("report.json").write_text(report.to_json())
        """
        try:
            return json.dumps(dataclasses.asdict(self), indent=2)
        except (TypeError, ValueError, RecursionError) as error:
            raise PruneError(
                f"report: it holds a value that JSON cannot represent ({error}). Give plain data "
                f"as results: strings, numbers, lists and dicts."
            ) from error

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return the report that `to_json` wrote.

        Args:
            text: The text of a `report.json`.

        Returns:
            The report.

        Raises:
            PruneError: If the text is not such a report.

        Example:
            >>> Report.from_json(report.to_json()).after == report.after
            True
        """
        try:
            found = cls(**json.loads(text))
            found._check()
            return found
        except Exception as error:  # the text may hold anything
            raise PruneError(
                f"report: this is not what Report.to_json() writes ({error}). Give the text of "
                f"a report.json that this version of polarprune wrote."
            ) from error

    def _check(self) -> None:
        """Raise an exception of any kind if a field is malformed or a view cannot be made."""
        for name, kind in _FIELD_TYPES.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} is not a {kind.__name__}")
        for row in self.history:
            _check_history_row(row)
        if not all(isinstance(note, str) for note in self.notes):
            raise TypeError("a note is not a string")
        self.to_markdown(), str(self)

    def snapshots(self, count: int = 7) -> list[JsonObject]:
        """Return rows of the history that are evenly spaced, with the first and the last.

        Args:
            count: The number of rows; if the history has fewer, all of them are returned.

        Returns:
            The rows.

        Raises:
            PruneError: If `count` is not an integer of at least 2.

        Example:
            >>> [row["step"] for row in report.snapshots(2)]
            [0, 50]
        """
        check_snapshots(count)
        last = len(self.history) - 1
        if last < count:
            return list(self.history)
        return [self.history[round(i * last / (count - 1))] for i in range(count)]

    def __str__(self) -> str:
        return plain_text(self)

    def to_markdown(self) -> str:
        """Return the report as Markdown with tables, for a pull request or a README.

        Returns:
            The text.

        Example:
            >>> print(report.to_markdown().splitlines()[0])
            # polarprune report: Sequential
        """
        return markdown(self)

    def to_html(self) -> str:
        """Return the report as one HTML page with charts, which needs no other file.

        Returns:
            The text of the page.

        Raises:
            PruneError: If jinja2 or matplotlib is not installed; the message names the extra.

        Example:
            >>> from pathlib import Path
            >>> size = Path("report.html").write_text(report.to_html(), encoding="utf-8")
        """
        return html_page(self)


def _check_history_row(row: JsonObject) -> None:
    """Raise if a row lacks a key that the charts read, or holds something other than numbers."""
    missing = _HISTORY_KEYS - row.keys()
    if missing:
        raise KeyError(f"a row of the history has no {sorted(missing)[0]}")
    numbers = [value for key, value in row.items() if key != "histogram"]
    if not all(isinstance(number, Real) for number in [*numbers, *row["histogram"]]):
        raise TypeError("a row of the history holds something that is not a number")
