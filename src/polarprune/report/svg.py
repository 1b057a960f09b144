"""Turn a matplotlib figure into SVG that can be embedded in an HTML page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from ..validation.optional_packages import optional_package
from .plots import BLUE, GREEN, GRID, INK, MUTED, ORANGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Texts stay texts, and the same figure gives the same ids in every process.
_SVG_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "polarprune"}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_CSS_VARIABLES = {
    BLUE: "var(--blue)",
    ORANGE: "var(--orange)",
    GREEN: "var(--green)",
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    "#ffffff": "var(--surface)",
}
_GLOBAL_STYLE = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)
_UNUSED_ID = re.compile(r' id="\w*[._][\w.]*"')  # `axes_1`; ids that are referred to are hashes
_FONT = re.compile(r' font-family: [^;"]*;?')
_VIEW_BOX = re.compile(r'viewBox="([\d. ]+)"')


def inline_svg(figure: Figure) -> str:
    """Return the content of a figure as an `<svg>` element without references to other files.

    The element takes its width from the page, its font from the text around it, and its colours
    from the CSS variables of the page, so that they follow the dark scheme.
    """
    matplotlib = optional_package("matplotlib", needed_for="a picture", extra="report")
    text = io.StringIO()
    with matplotlib.rc_context(_SVG_SETTINGS):
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    drawn = text.getvalue()
    box = _VIEW_BOX.search(drawn)
    assert box is not None, "matplotlib writes a viewBox"
    body = drawn[drawn.index(">", box.end()) + 1 : drawn.rindex("</svg>")]
    for pattern in (_GLOBAL_STYLE, _UNUSED_ID, _FONT):
        body = pattern.sub("", body)
    for colour, variable in _CSS_VARIABLES.items():
        body = body.replace(colour, variable)
    return f'<svg viewBox="{box[1]}" aria-hidden="true">{body.strip()}</svg>'
