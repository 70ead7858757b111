"""Markdown tables of generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def code(text: str) -> str:
    """Text as inline code; a bar is written so that it does not end a cell."""
    return f"`{text}`" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int | None = None) -> str:
    """Rows of cells as a Markdown table; bars and line breaks within cells are escaped.

    `words`: so many columns hold words, those after them figures, which are aligned to the right.
    """
    left = len(head) if words is None else words
    lines = [head, [*["---"] * left, *["---:"] * (len(head) - left)], *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
