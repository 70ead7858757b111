"""Bus bandwidth and time over the size of the tensor."""

from __future__ import annotations

from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from harness.atomic_write import write_atomically
from harness.errors import HarnessError
from harness.fabric.result import FabricResult, FabricRow
from harness.report.document import Picture
from harness.report.drawing import draw, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def fabric_picture(result: FabricResult) -> Picture:
    """A curve per operation of the whole group, and one for the slowest and the fastest pair."""
    curves = {op: result.of_all(op) for op in dict.fromkeys(row.op for row in result.rows)}
    curves = {op: rows for op, rows in curves.items() if rows and op != "point_to_point"}
    curves |= _pairs(result)

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter

        left, right = figure.subplots(1, 2)
        for index, (name, rows) in enumerate(curves.items()):
            sizes = [row.size_bytes for row in rows]
            left.plot(
                sizes, [row.bus_bandwidth / 1e9 for row in rows], label=name, marker=".", **style(index)
            )
            right.plot(sizes, [row.best_seconds * 1e6 for row in rows], marker=".", **style(index))
        for axis, title in ((left, "bus bandwidth, GB/s"), (right, "time, us")):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            # Pictures do not read mathematics, which logarithmic axes write by themselves.
            axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: binary_size(size)))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            axis.set_xlabel("bytes, in powers of 1024")
            axis.set_title(title)
            axis.grid(True)
        left.legend()

    return Picture(
        key="fabric",
        caption="Bus bandwidth and time of each operation over the size of the tensor.",
        draw=paint,
        width_inches=9.0,
        height_inches=3.6,
    )


def binary_size(size: float) -> str:
    """Bytes as an axis shows them, in powers of 1024: 1K, 64M, 4G."""
    power = min(4, max(0, int(log2(size)) // 10))
    return f"{size / 1024**power:g}{' KMGT'[power].strip()}"


def picture_format(path: Path) -> Literal["svg", "png"]:
    """The format that a file's suffix asks for. Raises HarnessError for another than SVG and PNG."""
    match path.suffix:
        case ".svg":
            return "svg"
        case ".png":
            return "png"
    raise HarnessError(f"--plot was given '{path}'; give a name that ends with .svg or .png")


def write_picture(result: FabricResult, path: Path) -> None:
    """Write the picture as SVG or PNG, by the file's suffix. Raises HarnessError for another."""
    form = picture_format(path)
    write_atomically(path, draw(fabric_picture(result), (form,))[form])


def _pairs(result: FabricResult) -> dict[str, list[FabricRow]]:
    by_pair: dict[tuple[int, ...], list[FabricRow]] = {}
    for row in result.rows:
        if row.op == "point_to_point":
            by_pair.setdefault(tuple(row.ranks), []).append(row)
    if not by_pair:
        return {}
    ordered = sorted(by_pair.items(), key=lambda item: item[1][-1].bus_bandwidth)
    chosen = dict([ordered[0], ordered[-1]])
    return {f"pair {pair[0]}-{pair[1]}": rows for pair, rows in chosen.items()}
