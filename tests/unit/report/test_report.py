"""The views of a report say what its data says, and nothing in the data can break them."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import math
import re
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from polarprune import PruneError, Pruner
from polarprune.cli.demo import DigitsNet
from polarprune.report import plots
from polarprune.report.facts import odd_widths, title
from polarprune.report.loading import class_name, loading_lines
from polarprune.report.plots import save_gate_histogram
from polarprune.report.report import Report
from polarprune.torch_internals.class_swaps import derive_class
from tests.helpers.nets import digits_resnet

pytestmark = pytest.mark.usefixtures("shared_traces")
HOSTILE = "</td><script>alert('x')</script>|`*<img src=\"http://evil\" onload=x>&"


def history(steps: int = 20, lam: float = 3.0) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "macs": 1 - 0.5 * step / steps,
            "params": 1 - 0.25 * step / steps,
            "closed": step,
            "between": (steps - step) // 2,
            "eps": 0.1 * 0.5**step,
            "lam": lam,
            "histogram": [step, *[0] * 18, steps - step],
        }
        for step in range(steps + 1)
    ]


def example(**changes: Any) -> Report:
    report = Report(
        settings={"macs": 0.5, "steps": 20, "multiple_of": 1},
        before={"macs": 2_000_000, "params": 40_000, "memory": 9_000},
        after={"macs": 1_000_000, "params": 30_000, "memory": 8_000},
        groups=[
            {"name": "stem", "before": 1_016, "after": 8, "reason": ""},
            {"name": "block.conv1", "before": 32, "after": 0, "reason": ""},
            {"name": "head", "before": 10, "after": 10, "reason": "part of the model's output"},
        ],
        history=history(),
        proof={"eval": 2e-8, "train": 3e-7},
        notes=["one thing to know"],
    )
    return dataclasses.replace(report, **changes)


RESULTS: dict[str, Any] = {
    "table": [
        {"stage": "before removal", "accuracy": 0.9711, "macs": 2_000_000, "params": 40_000},
        {"stage": "after removal", "accuracy": 0.9711, "macs": 1_000_000, "params": 30_000},
        {"stage": "after fine-tuning", "accuracy": 0.9733, "macs": 1_000_000, "params": 30_000},
    ],
    "identical_predictions": True,
    "test_images": 540,
    "largest_difference": 3e-7,
    "latency_ms": {"before": 3.0, "after": 1.5, "runs": 50},
    "machine": "a desk & a lamp",
    "versions": {"torch": "2.x"},
}
LAM = {"settings": {"lam": 0.25, "steps": 20, "multiple_of": 8}, "history": history(lam=0.25)}
CASES = {
    "budget": example(),
    "with results": example(results=RESULTS),
    "lam": example(**LAM),
    "two budgets": example(settings={"macs": 0.6, "params": 0.8, "steps": 20}),
    "nothing recorded": example(history=[], proof={}, notes=[], groups=[]),
    "only the start": example(history=history()[:1]),
    "diverged": example(history=history(lam=float("inf"))),
    "a table alone": example(results={"table": [{"stage": "after removal"}]}),
    "half a latency": example(results={"latency_ms": {"after": 1.5}}),
}
every_case = pytest.mark.parametrize("report", CASES.values(), ids=CASES.keys())


class Page(HTMLParser):
    """Checks that tags are balanced; keeps the tags, the attributes and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.words).replace("\N{NO-BREAK SPACE}", " ")


@functools.cache
def drawn_page(data: str) -> str:
    return Report.from_json(data).to_html()


def page_of(report: Report) -> str:
    """Return the page of a report, which is drawn only once."""
    return drawn_page(report.to_json())


@pytest.fixture(scope="module")
def real() -> Report:
    """Return the report of a short run after its export."""
    torch.manual_seed(0)
    model, images = digits_resnet(4), torch.rand(8, 1, 8, 8)
    pruner = Pruner(model, images, macs=0.6, steps=12)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05), momentum=0.9)
    pruner.attach(optimizer)
    for _ in range(12):
        torch.nn.functional.cross_entropy(model(images), torch.arange(8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    pruner.export()
    return pruner.report()


# --- JSON -----------------------------------------------------------------------------------------


@every_case
def test_json_gives_the_same_report_back(report: Report) -> None:
    assert Report.from_json(report.to_json()) == report


def test_json_is_plain_and_indented(real: Report) -> None:
    text = real.to_json()
    assert json.loads(text)["after"] == real.after
    assert text.startswith('{\n  "settings"')
    assert Report.from_json(text) == real


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"settings": {}, "colour": 1}', "3"])
def test_other_text_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(PruneError, match=r"not what Report.to_json\(\) writes .*Give the text"):
        Report.from_json(text)


# --- text and Markdown ----------------------------------------------------------------------------


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("mark", [str, Report.to_markdown], ids=["text", "markdown"])
@pytest.mark.parametrize("which", ["example", "real"])
def test_printed_channels_add_up_to_the_printed_total(mark: Any, which: str, real: Report) -> None:
    report = real if which == "real" else example()
    printed = re.findall(r"^\W*(\S+)[ |]+([\d,]+)[ |]+->[ |]+([\d,]+)", mark(report), re.M)
    *rows, total = [(name, number(before), number(after)) for name, before, after in printed]
    assert [row[0] for row in rows] == [group["name"] for group in report.groups]
    assert total == ("total", sum(row[1] for row in rows), sum(row[2] for row in rows))


def test_printed_shares_follow_from_the_printed_costs(real: Report) -> None:
    rows = re.findall(r"^(MACs|params) +([\d,]+) +([\d,]+) +([\d.]+) %", str(real), re.M)
    assert [row[0] for row in rows] == ["MACs", "params"]
    for _, before, after, share in rows:
        assert float(share) == round(100 * number(after) / number(before), 2)
    assert [number(row[2]) for row in rows] == [real.after["macs"], real.after["params"]]


def test_text_tells_each_groups_fate() -> None:
    lines = {line.split()[0]: line for line in str(example()).splitlines() if "->" in line}
    assert lines["head"].endswith("10  ->    10  frozen: part of the model's output")
    assert lines["block.conv1"].endswith("0  removed entirely")


def test_a_budget_is_called_met_only_if_it_is() -> None:
    assert "budget 50 %, met" in str(example())
    over = example(after={"macs": 1_000_001, "params": 30_000, "memory": 8_000})
    assert "budget 50 %, not met" in str(over)


def test_text_has_the_measurements() -> None:
    text = str(example(results=RESULTS))
    assert re.search(r"after fine-tuning +97.33 % +1,000,000 \(50.00 %\) +30,000 \(75.00 %\)", text)
    assert "largest difference: 3.0e-07" in text
    assert "speed: 2.00 times as fast (1.5 ms after, 3 ms before; median of 50 runs)" in text
    assert "predictions before and after removal: identical (540 test images)" in text
    assert "note: one thing to know" in text


def test_different_predictions_are_said_aloud() -> None:
    report = example(results={**RESULTS, "identical_predictions": False})
    for text in (str(report), report.to_markdown(), Page(page_of(report)).text):
        assert "NOT identical" in text


def test_an_unexported_run_claims_no_equality() -> None:
    assert "largest difference: not measured" in str(example(proof={}))


def test_lam_mode_names_lam_and_no_budget() -> None:
    report = example(**LAM)
    assert "fixed λ = 0.25, no budget" in str(report)
    assert "met" not in str(report)
    assert "widths in multiples of 8" in str(report)


def test_a_run_that_closed_nothing_says_so() -> None:
    assert "no channel is closed" in str(example(after=example().before))
    assert "no channel is closed" not in str(example())


def test_markdown_tables_have_equal_cells_in_every_row() -> None:
    groups = [{"name": HOSTILE, "before": 4, "after": 4, "reason": "a\n| b"}]
    text = example(groups=groups, results=RESULTS).to_markdown()
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(cells) == 1
    assert "\\<script>" in text and not re.search(r"(?<!\\)<", text)


# --- the name, how to load the file, widths -------------------------------------------------------


@pytest.mark.parametrize("mark", [str, Report.to_markdown, Report.to_html])
def test_every_view_names_the_model_and_says_how_to_load_it(mark: Any, real: Report) -> None:
    shown = html.unescape(mark(real))
    assert "polarprune report: Sequential" in shown
    assert "from torch.nn import Sequential" in shown
    assert 'small = pp.load("small.safetensors", model=Sequential(...))' in shown


def test_the_lines_that_load_a_model_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = DigitsNet(), torch.randn(4, 1, 8, 8)
    pruner = Pruner(model, x, macs=0.6, steps=2)
    for _ in range(2):
        pruner.step()
    small = pruner.export().eval()
    report = pruner.report()
    assert report.model == "polarprune.cli.demo.DigitsNet"
    code = "\n".join(loading_lines(report)).replace("(...)", "()")
    monkeypatch.chdir(tmp_path)
    scope = {"small": small}
    exec(code, scope)
    loaded = scope["small"].eval()
    assert loaded is not small and torch.equal(loaded(x), small(x))


def test_a_network_with_a_factory_is_loaded_by_it() -> None:
    make = {"imports": "import timm", "call": 'timm.create_model("resnet18", num_classes=3)'}
    results = {"network": "timm:resnet18", "file": "tuned.safetensors", "make": make}
    lines = loading_lines(example(results=results, model="timm.models.resnet.ResNet"))
    assert lines[-1] == (
        'small = pp.load("tuned.safetensors", model=timm.create_model("resnet18", num_classes=3))'
    )
    assert "import timm" in lines and title(example(results=results)).endswith(": timm:resnet18")


def test_there_is_nothing_to_load_before_the_export() -> None:
    assert loading_lines(example(proof={}, model="a.B")) == []
    assert loading_lines(example()) == []  # an older report, without the class


def test_the_class_of_a_rewritten_model_is_the_users_own() -> None:
    class Local(nn.Linear):
        pass

    derived = nn.Linear(2, 2)
    derive_class(derived, {})
    assert class_name(derived) == "torch.nn.Linear" and type(derived) is not nn.Linear
    assert class_name(Local(2, 2)) == "Local"


def test_odd_widths_are_named_with_the_remedy() -> None:
    groups = [
        {"name": "odd", "before": 32, "after": 13, "reason": "", "multiple": 8},
        {"name": "even", "before": 32, "after": 16, "reason": "", "multiple": 8},
        {"name": "uncut", "before": 13, "after": 13, "reason": "", "multiple": 8},
        {"name": "heads of 64", "before": 12, "after": 5, "reason": "", "multiple": 1},
        {"name": "narrow", "before": 4, "after": 3, "reason": "", "multiple": 8},
        {"name": "frozen", "before": 15, "after": 15, "reason": "output"},
    ]
    wanted = "1 of 5 groups end at a width that is not a multiple of 8 (odd: 13 of 32)"
    report = example(groups=groups)
    for shown in (str(report), report.to_markdown().replace("\\", ""), page_of(report)):
        assert wanted in shown and "pass multiple_of=8" in shown
    assert odd_widths(example(groups=groups[1:])) == []


def test_a_run_with_multiples_of_8_has_no_odd_widths() -> None:
    found = []
    for multiple in (1, 8):
        pruner = Pruner(
            DigitsNet(32), torch.rand(4, 1, 8, 8), macs=0.6, steps=4, multiple_of=multiple
        )
        for _ in range(4):
            pruner.step()
        found.append(odd_widths(pruner.report()))
    assert found[0] and not found[1]


# --- HTML -----------------------------------------------------------------------------------------


@every_case
def test_page_is_balanced_and_needs_nothing_else(report: Report) -> None:
    page = Page(page_of(report))
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    assert not {"href", "src", "srcset", "data"} & {n for n, _ in page.attributes}
    ids = [value for name, value in page.attributes if name == "id"]
    used = [value for name, value in page.attributes if name == "xlink:href"]
    used += re.findall(r"url\((.*?)\)", page_of(report))
    assert {name.removeprefix("#") for name in used} <= set(ids)  # nothing outside the page
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.search(r"https?:|@import", page_of(report))


def test_the_same_report_gives_the_same_page() -> None:
    assert example().to_html() == example().to_html()


def test_page_follows_the_dark_scheme_and_lets_tables_scroll() -> None:
    text = page_of(example(results=RESULTS))
    assert "@media (prefers-color-scheme: dark)" in text
    drawn = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawn) == 4 + 7
    assert not [svg for svg in drawn if re.search(r"#[0-9a-f]{6}(?![0-9a-f])", svg)]
    assert text.count("<table>") == text.count('<div class="scroll" tabindex="0"><table>') == 3
    assert re.search(r"\.scroll {[^}]*overflow-x: auto", text)


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_a_page_without_its_packages_names_the_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    report = Report.from_json(example().to_json())  # the data and the text need neither
    assert "budget 50 %, met" in str(report)
    wanted = rf"needs {missing}. Install it with: pip install 'polarprune\[report\]'"
    with pytest.raises(PruneError, match=wanted):
        report.to_html()


@every_case
def test_drawn_numbers_are_finite(report: Report) -> None:
    names = {"d", "x", "y", "width", "height", "transform", "viewbox"}
    drawn = [v for n, v in Page(page_of(report)).attributes if n in names]
    assert drawn or not report.history
    assert not [value for value in drawn if re.search("nan|inf", value)]


def test_hostile_names_stay_text() -> None:
    report = example(
        groups=[
            {"name": HOSTILE, "before": 8, "after": 4, "reason": ""},
            {"name": "whole" + HOSTILE, "before": 8, "after": 8, "reason": HOSTILE},
        ],
        notes=[HOSTILE],
        results={
            "machine": HOSTILE,
            "versions": {HOSTILE: HOSTILE},
            "table": [{"stage": HOSTILE, "accuracy": 0.5}],
        },
    )
    page = Page(page_of(report))
    assert not {"script", "img"} & set(page.tags)
    assert not {"src", "onload"} & {name for name, _ in page.attributes}
    assert "".join(page.words).count(HOSTILE) >= 7


def test_page_shows_facts_table_and_reasons() -> None:
    text = Page(page_of(example(results=RESULTS))).text
    wanted = [
        "50.00 %",
        "1,000,000 of 2,000,000; budget 50 %, met",
        "75.00 %",
        "97.33 %",
        "1.5 ms",
        "3.0e-07",
        "after fine-tuning",
        "30,000 (75.00 %)",
        "part of the model's output",
        "one thing to know",
        "machine: a desk & a lamp",
    ]
    assert [word for word in wanted if word not in text] == []


def drawn_lines(figure: Figure) -> dict[str, list[float]]:
    """Return the heights of every curve by its name in the legend."""
    return {str(line.get_label()): list(line.get_ydata()) for line in figure.axes[0].lines}


def test_every_budget_is_a_line_at_its_height() -> None:
    lines = drawn_lines(plots.cost_chart(CASES["two budgets"]))
    assert lines["budget of MACs, 60 %"] == [60, 60]
    assert lines["budget of params, 80 %"] == [80, 80]
    assert list(drawn_lines(plots.cost_chart(CASES["lam"]))) == ["MACs", "params"]
    assert "budget of MACs, 60 %" in page_of(CASES["two budgets"])


def test_charts_draw_the_history() -> None:
    report = example()
    lines = drawn_lines(plots.cost_chart(report)) | drawn_lines(plots.gates_chart(report))
    lines |= drawn_lines(plots.epsilon_chart(report)) | drawn_lines(plots.lambda_chart(report))
    columns = {"closed (exactly 0)": "closed", "between (0 to 0.5)": "between", "ε": "eps"}
    for name, key in {**columns, "λ": "lam"}.items():
        assert lines[name] == [row[key] for row in report.history]
    for name, key in {"MACs": "macs", "params": "params"}.items():
        assert lines[name] == [100 * row[key] for row in report.history]


def test_points_that_have_no_place_on_an_axis_are_left_out() -> None:
    assert drawn_lines(plots.lambda_chart(CASES["diverged"])) == {"λ": []}
    rows = [{**row, "eps": 0.0 if row["step"] == 3 else row["eps"]} for row in history()]
    assert len(drawn_lines(plots.epsilon_chart(example(history=rows)))["ε"]) == 20


@pytest.mark.parametrize(("low", "exponents"), [(5e-8, range(-8, 0)), (1e-20, range(-19, 0, 3))])
def test_a_log_axis_has_round_ends_and_few_labels(low: float, exponents: range) -> None:
    rows = [{**row, "eps": value} for row, value in zip(history(), [0.1, low], strict=False)]
    axes = plots.epsilon_chart(example(history=rows)).axes[0]
    assert sorted(axes.get_yticks()) == pytest.approx([10.0**k for k in exponents])
    assert axes.get_ylim() == pytest.approx((10.0 ** round(math.log10(low) - 0.5), 0.1), rel=1e-6)


def test_histograms_are_cut_off_at_one_half_and_say_so() -> None:
    words = [word for word in Page(page_of(example())).words if word.strip()]
    assert [word for word in words if re.fullmatch(r"step \d+", word)] == [
        f"step {step}" for step in (0, 3, 7, 10, 13, 17, 20)
    ]
    taller = [word for word in words if word.endswith("↑")]
    assert taller == [f"{share} ↑" for share in ("1.00", "0.85", "0.65", "0.65", "0.85", "1.00")]


def test_a_finished_run_makes_a_page(real: Report) -> None:
    page = Page(page_of(real))
    assert page.tags.count("svg") == 4 + len(real.snapshots())
    assert "Prunable groups" in page.text and "Frozen groups" in page.text


# --- snapshots and the picture --------------------------------------------------------------------


def test_snapshots_hold_the_first_and_the_last_row() -> None:
    report = example()
    rows = report.snapshots(7)
    assert len(rows) == 7
    assert rows[0] is report.history[0] and rows[-1] is report.history[-1]
    assert example(history=history()[:3]).snapshots(7) == history()[:3]
    assert example(history=[]).snapshots() == []


def png_header(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_picture_is_a_png_of_seven_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **kw: (drawn.append(self), save(self, *a, **kw))[1]
    )
    save_gate_histogram(example(), tmp_path / "gates.png")
    width, height = png_header(tmp_path / "gates.png")
    assert width >= 7 * 300 and height >= 300
    panels = drawn[0].axes
    assert [panel.get_title() for panel in panels] == [
        f"step {step}" for step in (0, 3, 7, 10, 13, 17, 20)
    ]
    assert {panel.get_xlim() for panel in panels} == {(0, 1)}
    assert {panel.get_ylim() for panel in panels} == {(0, 0.5)}
    heights = [bar.get_height() for bar in panels[3].patches]
    assert heights == [0.5, *[0] * 18, 0.5]


def test_picture_of_a_short_history_has_a_panel_for_each_row(tmp_path: Path) -> None:
    save_gate_histogram(example(history=history()[:2]), str(tmp_path / "gates.png"))
    assert png_header(tmp_path / "gates.png")[0] == 2 * 400


def test_picture_without_history_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PruneError, match=r"no history; take it from pruner.report\(\)"):
        save_gate_histogram(example(history=[]), tmp_path / "gates.png")


def test_missing_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PruneError, match=r"pip install 'polarprune\[report\]'"):
        save_gate_histogram(example(), tmp_path / "gates.png")
    assert not (tmp_path / "gates.png").exists()
