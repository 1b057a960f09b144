"""Remarks for the user about a model, which know the modules or groups that they are about."""

from __future__ import annotations

from collections.abc import Iterable


class Note(str):
    """A remark. As text, it starts with the first of its subjects and counts the others.

    >>> Note("keeps one channel", ["a.qkv", "b.qkv"])
    'a.qkv (and 1 more): keeps one channel'

    Attributes:
        text: The remark without its subjects.
        subjects: The modules, groups or attributes that it is about; empty for the whole model.
    """

    text: str
    subjects: tuple[str, ...]

    def __new__(cls, text: str, subjects: Iterable[str] = ()) -> Note:
        subjects = tuple(subjects)
        more = f" (and {len(subjects) - 1} more)" if len(subjects) > 1 else ""
        note = super().__new__(cls, f"{subjects[0]}{more}: {text}" if subjects else text)
        note.text, note.subjects = text, subjects
        return note

    def __getnewargs__(self) -> tuple[str, tuple[str, ...]]:  # type: ignore[override]
        return self.text, self.subjects


def folded(notes: Iterable[Note]) -> list[Note]:
    """Return notes without repetitions: those that differ only in their subjects become one.

    >>> folded([Note("is slow", ["a"]), Note("to know"), Note("is slow", ["b"])])
    ['a (and 1 more): is slow', 'to know']
    """
    subjects: dict[str, dict[str, None]] = {}
    for note in notes:
        subjects.setdefault(note.text, {}).update(dict.fromkeys(note.subjects))
    return [Note(text, found) for text, found in subjects.items()]
