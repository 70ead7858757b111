"""Bus bandwidth and time over the size of the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import log2
from pathlib import Path
from typing import Any, Literal

from harness.errors import HarnessError
from harness.fabric.result import FabricResult, FabricRow
from harness.files import write_atomically
from harness.judge.wording import listed
from harness.tell.document import Picture
from harness.tell.formats import number
from harness.tell.pictures.curves import Panel, decades, plain_look
from harness.tell.pictures.drawing import draw

WIDTH, HEIGHT = 460, 240


def fabric_picture(result: FabricResult) -> Picture:
    """A curve per operation of the whole group, and one for the slowest and the fastest pair."""
    curves = {op: result.of_all(op) for op in dict.fromkeys(row.op for row in result.rows)}
    curves = {op: rows for op, rows in curves.items() if rows and op != "point_to_point"}
    curves |= _pairs(result)
    fastest = [f"{name} {number(max(map(_gigabytes, rows)))}" for name, rows in curves.items()]
    return Picture(
        key="fabric",
        caption="Bus bandwidth and time of each operation over the size of the tensor.",
        alt=f"Highest bus bandwidth in GB/s: {listed(fastest, len(fastest))}.",
        chart=lambda: _chart(curves),
    )


def _chart(curves: Mapping[str, Sequence[FabricRow]]) -> dict[str, Any]:
    panels = [_panel(curves, "bus bandwidth, GB/s", _gigabytes), _panel(curves, "time, us", _microseconds)]
    return {"vconcat": panels}


def _gigabytes(row: FabricRow) -> float:
    return (row.bus_bandwidth or 0.0) / 1e9


def _microseconds(row: FabricRow) -> float:
    return (row.best_seconds or 0.0) * 1e6


def _panel(
    curves: Mapping[str, Sequence[FabricRow]], title: str, read: Callable[[FabricRow], float]
) -> dict[str, Any]:
    points = []
    for index, (name, rows) in enumerate(curves.items()):
        for row in rows:
            label = f"{name} {number(read(row))}" if row is rows[-1] else None
            look = plain_look(index)
            points.append(
                {
                    "curve": name, "x": row.size_bytes,
                    "value": read(row), "label": label, **look,
                }
            )  # fmt: skip
    values = [point["value"] for point in points]
    sizes = sorted({row.size_bytes for rows in curves.values() for row in rows})
    labels = {size: binary_size(size) for size in sizes}
    panel = Panel(
        across="bytes, in powers of 1024", up=title, domain=(min(values) / 1.2, max(values) * 1.2),
        is_log=True, width=WIDTH, height=HEIGHT,
        y_axis={"format": ",~f", "values": decades(min(values), max(values))},
        x_axis={"labelExpr": f"({json.dumps(labels)})[datum.value]"},
    )  # fmt: skip
    panel.place_labels(points)
    return {
        "data": {"values": points},
        "width": panel.width,
        "height": panel.height,
        "layer": panel.layers(sizes),
    }


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
    """Write the picture as SVG or PNG, by the suffix. Raises HarnessError for another, and on a stub."""
    form = picture_format(path)
    if result.on_stub:
        raise HarnessError(
            f"--plot was given '{path}', but a {result.device_name} has no speed to draw; omit it"
        )
    write_atomically(path, draw(fabric_picture(result), (form,))[form])


def _pairs(result: FabricResult) -> dict[str, list[FabricRow]]:
    by_pair: dict[tuple[int, ...], list[FabricRow]] = {}
    for row in result.rows:
        if row.op == "point_to_point":
            by_pair.setdefault(tuple(row.ranks), []).append(row)
    if not by_pair:
        return {}
    ordered = sorted(by_pair.items(), key=lambda item: _gigabytes(item[1][-1]))
    chosen = dict([ordered[0], ordered[-1]])
    return {f"pair {pair[0]}-{pair[1]}": rows for pair, rows in chosen.items()}
