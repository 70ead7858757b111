"""Predicts published runs and writes a page with tables and pictures.

Usage: python -m benchmarks.published RUNS.csv FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from tqdm import tqdm

from benchmarks.published.judge import judge
from benchmarks.published.mapping import map_row
from benchmarks.published.page import render, scatter
from benchmarks.published.rows import read_rows
from harness.errors import HarnessError
from harness.plan.profiles import missing_profiles, trace_ahead
from harness.tell.pictures.drawing import draw


def main(data: Path, folder: Path) -> None:
    """Judge every row; leave the page and its pictures in the folder."""
    rows = read_rows(data)
    mapped = [map_row(row) for row in rows]
    profiles = missing_profiles(one.memory_scenario for one in mapped if one.memory_scenario)
    with tqdm(total=len(profiles), unit="profile", desc="activations", disable=not profiles) as bar:
        trace_ahead(profiles, lambda: bar.update() and None)
    judged = [judge(one) for one in tqdm(mapped, unit="row")]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for source in dict.fromkeys(row.source for row in rows):
        picture = scatter(judged, source)
        if picture is not None:
            (folder / f"predicted.{source}.svg").write_bytes(draw(picture, ("svg",))["svg"])
            drawn.append(source)
    text = render(judged, data=str(data), folder=str(folder), pictures=drawn)
    (folder / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except IndexError:
        sys.exit(__doc__)
    except HarnessError as error:
        sys.exit(str(error))
