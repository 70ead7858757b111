"""Whether a picture next to a report is the one that its records give."""

from __future__ import annotations

import io
from typing import Any


def same_picture(name: str, given: bytes, expected: bytes) -> bool:
    """SVG by bytes; PNG by what is seen where bytes differ, as compression differs between zlib builds."""
    return given == expected or (name.endswith(".png") and _seen(given) == _seen(expected))


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
