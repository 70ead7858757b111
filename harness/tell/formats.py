"""How numbers are written for people."""

from __future__ import annotations

import html
import unicodedata

NOT_AVAILABLE = "n/a"
# Control, format (which can reverse a line), surrogate and private characters.
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Co")
_KEPT = ("\t", "\u200c", "\u200d")
"""Tabs, and the joiners that some scripts are spelled with."""


def megabytes(value: float | None) -> str:
    """Bytes as MB (1e6), three significant places below 100."""
    return NOT_AVAILABLE if value is None else number(value / 1e6)


def gigabytes(value: float | None) -> str:
    """Bytes as GB (1e9), three significant places below 100."""
    return NOT_AVAILABLE if value is None else number(value / 1e9)


def milliseconds(value: float | None) -> str:
    """Seconds as ms."""
    return NOT_AVAILABLE if value is None else number(value * 1e3)


def number(value: float | None) -> str:
    """Three significant places, no exponent, thousands separated."""
    if value is None:
        return NOT_AVAILABLE
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def scientific(value: float | None) -> str:
    """Two significant places with exponent; 0 as 0."""
    if value is None:
        return NOT_AVAILABLE
    return "0" if value == 0 else f"{value:.1e}"


def short(value: float | None) -> str:
    """As many digits as a count needs: 1, 2.5."""
    return NOT_AVAILABLE if value is None else f"{value:g}"


def one_line(text: str, *, keep_spaces: bool = False) -> str:
    """Text without line breaks; control and direction characters become a replacement mark."""
    flat = text if keep_spaces else " ".join(text.split())
    if flat.isascii() and flat.isprintable():
        return flat
    return "".join(c if c in _KEPT or unicodedata.category(c) not in _UNPRINTABLE else "\ufffd" for c in flat)


def shortened(text: str, most: int) -> str:
    """Text of at most so many characters on one line, beginning and end kept."""
    text = one_line(text)
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def markdown_text(text: str) -> str:
    """Free text made harmless in markdown, also in a table cell.

    Python-Markdown escapes neither < nor & with a backslash, so these are entities; a brace would begin
    attributes of an element (its `attr_list`) or an expression of a site's templates. A tilde by itself
    strikes nothing through.
    """
    flat = html.escape(one_line(text).replace("\\", "\\\\"), quote=False)
    for character in "`*_[]|#${" + "~" * (flat.count("~") > 1):
        flat = flat.replace(character, f"\\{character}")
    return flat


def percent(value: float | None) -> str:
    """A ratio as whole percent, below one to its first digit: 98 %, 0.4 %."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value * 100:.1g} %" if 0 < value < 0.01 else f"{value:.0%}".replace("%", " %")


def times(value: float | None) -> str:
    """A ratio: 0.38, 1.50, 52.9."""
    return f"{value:.2f}" if value is not None and 0.01 <= value < 10 else number(value)


def signed_percent(value: float | None) -> str:
    """A relative change: +5.0 %, -0.3 %."""
    return NOT_AVAILABLE if value is None else f"{value:+.1%}".replace("%", " %")


def exact(value: float | None) -> str:
    """Bytes with thousands separated; a fraction, which rings of some sizes give, to one place."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def signed(value: float | None) -> str:
    """The same with its sign."""
    if value is None:
        return NOT_AVAILABLE
    return ("+" if value > 0 else "") + exact(value)


def teraflops(value: float | None) -> str:
    """FLOP/s as TFLOP/s (1e12)."""
    return number(None if value is None else value / 1e12)


def utilisation(value: float | None) -> str:
    """A ratio as percent with one decimal: 41.7 %."""
    return NOT_AVAILABLE if value is None else f"{value * 100:.1f} %"


def dash(value: object) -> str:
    """A dash, which is not 'not measured'."""
    return "-" if value is None else str(value)


def beginning(digest: str) -> str:
    """The first 16 characters of a hash."""
    return digest[:16]
