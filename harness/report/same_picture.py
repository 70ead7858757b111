"""Whether a picture next to a report, or within it, is the one that its records give."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import Any

from harness.report.writers.html import DATA_ADDRESS, data_address

FONT_PIXELS = 2.0
"""How far legends and margins may move: another version of the same font has letters of other widths."""
_TAG = re.compile(rb"<[^>]*>")
_PLACE = re.compile(rb"(?<![#\w.])-?\d+(?:\.\d+)?(?!\w)")
"""A size or a position in a tag; not a colour, nor what follows a letter, as lengths of bars do in paths."""


def same_picture(name: str, given: bytes, expected: bytes) -> bool:
    """Whether bytes are equal, or what is seen.

    SVG: text, colours and lengths of bars are equal, and positions within FONT_PIXELS, as they depend on the
    machine's fonts. PNG: equal pixels, as compression differs between zlib builds.
    """
    if given == expected:
        return True
    if name.endswith(".svg"):
        return _same_drawing(given, expected)
    return name.endswith(".png") and _seen(given) == _seen(expected)


def pictures_within(page: str) -> list[bytes]:
    """The pictures of an HTML page, in its order."""
    return [_decoded(code) for code in DATA_ADDRESS.findall(page)]


def as_drawn_here(page: str, expected: str) -> str:
    """An HTML page with the pictures of `expected`, each where it shows the same as the page's own."""
    drawn = iter(pictures_within(expected))

    def replaced(found: re.Match[str]) -> str:
        here = next(drawn, b"")
        return data_address(here) if same_picture("within.svg", _decoded(found[1]), here) else found[0]

    return DATA_ADDRESS.sub(replaced, page)


def _decoded(code: str) -> bytes:
    """Empty if it is no whole base64."""
    try:
        return base64.b64decode(code)
    except binascii.Error:
        return b""


def _same_drawing(given: bytes, expected: bytes) -> bool:
    if _TAG.split(given) != _TAG.split(expected):
        return False
    ours, theirs = b"".join(_TAG.findall(given)), b"".join(_TAG.findall(expected))
    if _PLACE.sub(b"", ours) != _PLACE.sub(b"", theirs):
        return False
    pairs = zip(_PLACE.findall(ours), _PLACE.findall(theirs), strict=True)
    return all(abs(float(one) - float(other)) <= FONT_PIXELS for one, other in pairs)


def _seen(image: bytes) -> tuple[tuple[int, int], int, dict[Any, Any], bytes] | None:
    """Size, number of frames, what changes how pixels look, and the pixels; None if the file is no PNG."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(image), formats=("PNG",)) as opened:
            pixels = opened.convert("RGBA").tobytes()
            look = {key: value for key, value in opened.info.items() if key != "dpi"}
            return opened.size, getattr(opened, "n_frames", 1), look, pixels
    except (UnidentifiedImageError, OSError):
        return None
