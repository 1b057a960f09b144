"""The code blocks of README and docs run as they stand."""

import re
import socket
from pathlib import Path

import pytest
import torch

import polarprune as pp
from polarprune.experiments.data.own import open_own
from tests.helpers.nets import digits_resnet

ROOT = Path(__file__).parents[2]
PACKAGES = sorted((ROOT / "src").rglob("README.md"))
TRAINERS = ROOT / "docs" / "trainers.md"  # its code runs in tests/unit/integrations
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *PACKAGES]
ULTRALYTICS = ROOT / "docs" / "ultralytics.md"  # its code runs in tests/unit/integrations
TRANSFORMERS = ROOT / "docs" / "transformers.md"  # its code runs there, too
PAGES = [*sorted(ROOT.glob("*.md")), *TEXTS[1:]]
BLOCKS = [
    pytest.param(block, id=f"{text.relative_to(ROOT)}-{number}")
    for text in TEXTS
    if text not in (TRAINERS, TRANSFORMERS, ULTRALYTICS)
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", text.read_text(encoding="utf-8"), re.DOTALL)
    )
]


@pytest.fixture
def alone(monkeypatch):
    """Let a block that starts distributed processes run as the only process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("block", BLOCKS)
def test_code_in_the_documents_runs(block, tmp_path, monkeypatch, capsys, alone):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)

    def make_model():
        return digits_resnet(width=8)

    loader = [(torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))) for _ in range(4)]
    scope = {"make_model": make_model, "loader": loader, "epochs": 3, "model": make_model()}
    scope["example"] = loader[0][0]
    exec(block, scope)
    if "small" in scope:
        assert (tmp_path / "small.safetensors").exists()
        assert scope["pruner"].cost()["macs"] <= 0.5 * scope["pruner"].graph.cost.original()["macs"]
    elif "make_data" in scope:
        (tmp_path / "data.py").write_text(block)
        assert open_own("data.py:make_data").counts == (80, 20)
    elif "parts" in scope:
        stored = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        assert all("polarprune_state" in one for one in (stored[0], scope["parts"][0].state_dict()))
    else:
        assert isinstance(scope["graph"], pp.trace.__globals__["Graph"])


def test_the_readme_shows_a_dozen_lines_and_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in plain}


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead to no file, or to no heading of a page."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        there = page.parent / target if target else page
        if link.startswith("https://"):
            continue
        if not there.exists() or (anchor and anchor not in anchors(there.read_text("utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page) == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# A `b` of C's\n[x](#a-b-of-cs) [x](page.md#a-b-of-cs) [x](#a-b) [x](none.md)\n"
    page.write_text(text, encoding="utf-8")
    assert broken_links(page) == ["#a-b", "none.md"]
