"""Read JSON text of limited length, size and depth; accept standard JSON only."""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate
from typing import Any, NoReturn

from ...errors import PruneError
from .require import require

_MOST_CHARACTERS = 2**26
_MOST_VALUES = 2**23
_MOST_LEVELS = 64
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # also one that is not closed
_MOST_QUOTED = 1000  # characters of a file that an error message may repeat


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Limits are checked on the text itself: the parser would need memory and stack for all of it.

    Raises:
        PruneError: If the text is too long or too deep, has a key twice or a number that is not
            finite.
        ValueError: If the text is not JSON.
    """
    require(len(text) <= _MOST_CHARACTERS, f"its metadata has {len(text)} characters")
    bare = _STRING.sub("", text)
    require(sum(map(bare.count, "[]{},")) <= _MOST_VALUES, "its metadata holds too many values")
    brackets = re.findall(r"[][{}]", bare)
    depths = accumulate(1 if bracket in "[{" else -1 for bracket in brackets)
    require(max(depths, default=0) <= _MOST_LEVELS, "its metadata is nested too deeply")
    return json.loads(
        text, object_pairs_hook=_distinct_keys, parse_constant=_refuse_constant, parse_float=_finite
    )


def _distinct_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    require(len(found) == len(pairs), "a key occurs twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise PruneError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    found = float(text)
    require(math.isfinite(found), f"{text} is not a finite number")
    return found


def printable(text: str) -> str:
    """Escape what a terminal would act on or could not print, in a message that quotes a file."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in text[:_MOST_QUOTED]
    )
