"""Pictures to SVG and PNG: one style for all, equal records give equal bytes."""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING, Any

from harness.report.document import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinct for colour-blind readers, without black: it vanishes on dark pages.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A6D00")
LINE_STYLES = ("-", "--", "-.", ":")
HATCHES = ("", "////", "....")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#7A7A7A"
"""Text and axes: above 4:1 in contrast on white and on black, as the background is transparent."""
SETTINGS = {
    "svg.hashsalt": "sharding-harness", "svg.fonttype": "none", "text.parse_math": False, "font.size": 9,
    "text.color": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "axes.edgecolor": GREY, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.titlesize": 9, "axes.titlecolor": GREY, "grid.color": GREY, "grid.alpha": 0.25,
    "grid.linewidth": 0.5, "legend.frameon": False, "legend.fontsize": 8, "hatch.linewidth": 0.6,
    "savefig.transparent": True, "font.sans-serif": ["DejaVu Sans"],
}  # fmt: skip
# Without these, files would carry the time and the library's version.
METADATA = {"svg": dict.fromkeys(("Date", "Creator", "Format", "Type")), "png": {"Software": None}}
PNG_DOTS_PER_INCH = 120
SVG_DOTS_PER_INCH = 72
_TAG = re.compile(rb"<[^>]*>")
_NO_ROTATION = re.compile(rb' transform="rotate\(-0 [^)]*\)"')
_FRACTION = re.compile(rb"-?\d+\.\d{3,}")
_HASHED_ID = re.compile(rb'(?<=["#])[a-z][0-9a-f]{10}(?=[")])')
_INDENTATION = re.compile(rb">\n\s+<")


def draw(picture: Picture, formats: tuple[str, ...] = ("svg", "png")) -> dict[str, bytes]:
    """Draw a picture; returns its bytes by format."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        # An SVG holds the text itself; in a PNG a sign that the font lacks is a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(picture.width_inches, picture.height_inches), layout="constrained")
        picture.draw(figure)
        _lay_out(figure)
        images = {}
        for form in formats:
            target = io.BytesIO()
            figure.savefig(target, format=form, metadata=METADATA[form], dpi=PNG_DOTS_PER_INCH)
            images[form] = _compact(target.getvalue()) if form == "svg" else target.getvalue()
    return images


def _lay_out(figure: Figure) -> None:
    """Give everything its place, as in an SVG: once for all formats, each of which would draw for it."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    FigureCanvasSVG(figure)
    figure.set_dpi(SVG_DOTS_PER_INCH)
    ConstrainedLayoutEngine().execute(figure)
    figure.set_layout_engine(None)


def _compact(svg: bytes) -> bytes:
    """The same picture in a third fewer bytes, without rounding noise.

    Coordinates have 0.01 pt, and matplotlib's ids, hashes of unrounded coordinates, become numbers.
    """
    numbers: dict[bytes, bytes] = {}

    def number(found: re.Match[bytes]) -> bytes:
        return numbers.setdefault(found[0], b"i%d" % (len(numbers) + 1))

    def shorten(tag: re.Match[bytes]) -> bytes:
        return _HASHED_ID.sub(number, _FRACTION.sub(_hundredths, _NO_ROTATION.sub(b"", tag[0])))

    return _INDENTATION.sub(b">\n<", _TAG.sub(shorten, svg))


def _hundredths(number: re.Match[bytes]) -> bytes:
    rounded = f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
    return b"0" if rounded == "-0" else rounded.encode()


def style(index: int) -> dict[str, Any]:
    """Colour and line style of the n-th curve."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)],
    }
