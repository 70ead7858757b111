"""What differs between a report's text and the text that its records give, line by line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from harness.report.manifest import digest
from harness.report.writers.html import DATA_ADDRESS

WINDOW = 100
"""Characters shown of a line that differs, around the place where it does."""


def line_differences(given: str, expected: str, *, pictures: bool) -> Iterator[tuple[int | None, str]]:
    """Line number from 1, or None before the first, and what is wrong there.

    Whole pictures within a line count only where `pictures` is true.
    """
    left, right = _lines(given, pictures), _lines(expected, pictures)
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        paired = min(i2 - i1, j2 - j1)
        for offset in range(paired):
            a, b = _around_difference(left[i1 + offset], right[j1 + offset])
            yield i1 + offset + 1, f"reads {a!r}, the records give {b!r}"
        for number in range(i1 + paired, i2):
            yield number + 1, f"does not follow from the records: {_cut(left[number])!r}"
        for number in range(j1 + paired, j2):
            yield i2 or None, f"a line is missing after this one: {_cut(right[number])!r}"


def _lines(text: str, pictures: bool) -> list[str]:
    """Lines with whole pictures replaced by their digests, which a person can read."""

    def shown(found: re.Match[str]) -> str:
        return f"picture sha256:{digest(found[1].encode())}" if pictures else "picture"

    return [DATA_ADDRESS.sub(shown, line) for line in text.split("\n")]


def _around_difference(left: str, right: str) -> tuple[str, str]:
    same = next(
        (n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    begin = max(0, same - WINDOW // 3)
    return _cut(left[begin:]), _cut(right[begin:])


def _cut(text: str) -> str:
    return text if len(text) <= WINDOW else f"{text[:WINDOW]}..."
