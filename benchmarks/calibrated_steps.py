"""Calibrates the time model on published records and writes a page: each cell predicted from all others.

Usage: python -m benchmarks.calibrated_steps FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tabulate import tabulate

from harness.plan.calibration import (
    Calibration,
    MeasuredCell,
    calibrate,
    comparable,
    measured_cells,
    write_calibration,
)
from harness.plan.step_time import seconds_of_step

REPORTS = Path(__file__).resolve().parents[1] / "reports"
AIM = 0.10
EXPLANATION = """\
# Step times predicted after calibration

The time model of `harness estimate` with constants fitted to published records of CPU ranks
(`harness/plan/calibration.py`). 'Predicted' of a cell comes from constants that were fitted to all other
cells. The column 'runs differ by' shows how far the medians of its repeated runs lie apart, which no model
can predict. Cells that do nearly the same work (zero1 and zero2, ddp through Accelerate) help each other.

`python -m benchmarks.calibrated_steps {folder}` writes this page again, and the files
`calibrate-*.json` that `--calibrate` takes.

Every rank shares the two cores of a virtual machine whose host is shared too. The runs found these loads:
{loads}.
"""


@dataclass(frozen=True)
class Matrix:
    """Records that one calibration is from."""

    key: str
    title: str
    sources: tuple[str, ...]


MATRICES = (
    Matrix(
        "shaped-links",
        "Five strategies over links of three speeds, 4 ranks on 2 nodes",
        ("shaped-links/unshaped", "shaped-links/1000mbit", "shaped-links/200mbit"),
    ),
    Matrix("default", "Ten backends on 2 ranks of one node", ("default",)),
)


def main(folder: Path) -> None:
    """Fit each matrix and write the page."""
    folder.mkdir(parents=True, exist_ok=True)
    parts, loads = [], []
    for matrix in MATRICES:
        cells = measured_cells([REPORTS / source / "runs.tar.xz" for source in matrix.sources])
        found = calibrate(cells)
        write_calibration(found, folder / f"calibrate-{matrix.key}.json")
        parts.append(section(matrix.title, found))
        if len(matrix.sources) > 1:
            parts.append(by_group(cells))
        if found.load_averages:
            loads.append(f"{matrix.key} {found.load_averages[0]:.1f} to {found.load_averages[1]:.1f}")
    text = EXPLANATION.format(folder=folder, loads="; ".join(loads))
    (folder / "README.md").write_text("\n".join([text, *parts]), encoding="utf-8")


def section(title: str, found: Calibration) -> str:
    """Table, verdict and constants of one calibration."""
    rows = [
        [
            cell.cell,
            f"{cell.measured_seconds * 1000:.0f}",
            f"{cell.spread:.0%}",
            f"{cell.fitted_seconds * 1000:.0f}",
            "n/a" if cell.left_out_seconds is None else f"{cell.left_out_seconds * 1000:.0f}",
            "n/a" if cell.error is None else f"{cell.error:+.0%}",
        ]
        for cell in found.cells
    ]
    heads = ["cell", "measured ms", "runs differ by", "fitted ms", "predicted ms", "error"]
    table = tabulate(rows, heads, tablefmt="github", disable_numparse=True)
    constants = tabulate(
        [[name, f"{value:.3g}"] for name, value in found.constants.items()],
        ["constant", "value"],
        tablefmt="github",
    )
    return f"## {title}\n\n{table}\n\n{verdict(found)}\n\n{constants}\n"


def by_group(cells: list[MeasuredCell]) -> str:
    """Every link predicted from constants fitted to the others alone."""
    used, _ = comparable(cells)
    rows = []
    for group in dict.fromkeys(cell.group for cell in used):
        device = used[0].device
        constants = calibrate([c for c in used if c.group != group]).time_constants(device)
        for cell in (c for c in used if c.group == group):
            seconds = seconds_of_step(cell.work, device, constants)
            rows.append((cell, seconds, seconds / cell.seconds - 1))
    table = tabulate(
        [
            [c.name, f"{c.seconds * 1000:.0f}", f"{seconds * 1000:.0f}", f"{error:+.0%}"]
            for c, seconds, error in rows
        ],
        ["cell", "measured ms", "predicted ms", "error"],
        tablefmt="github",
        disable_numparse=True,
    )
    errors = [abs(error) for *_, error in rows]
    met = sum(error <= AIM for error in errors)
    text = f"{met} of {len(errors)} cells within {AIM:.0%}, median error {median(errors):.1%}."
    return f"### Each link predicted from the other two\n\n{table}\n\n{text}\n"


def verdict(found: Calibration) -> str:
    """How many cells are within the aim, and which are not."""
    right, pairs = found.order()
    met = sum(error <= AIM for error in found.errors)
    missed = [cell for cell in found.cells if cell.error is not None and abs(cell.error) > AIM]
    named = "; ".join(
        f"{cell.cell} ({cell.error:+.0%}, its runs differ by {cell.spread:.0%})" for cell in missed
    )
    return (
        f"{met} of {len(found.errors)} cells within {AIM:.0%}, median error {median(found.errors):.1%}; "
        f"order right in {right} of {pairs} pairs of one link that differ by over 5 %."
        + (f"\n\nMissed: {named}." if named else "")
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
