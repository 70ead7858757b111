"""Predicts published runs and writes a page with tables and pictures, and the errors that answers cite."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.published.judge import errors_of, judge
from benchmarks.published.mapping import map_row
from benchmarks.published.page import render, scatter
from benchmarks.published.rows import read_rows
from benchmarks.publishing import errors_text
from harness.errors import HarnessError
from harness.plan.profiles import missing_profiles, trace_ahead
from harness.plan.trust import ERRORS
from harness.tell.pictures.drawing import draw

HERE = Path(__file__).parent
REPORT = HERE.parents[1] / "reports" / "predictions" / "published"


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge every row; leave the page and its pictures in the folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=REPORT, help="default: %(default)s")
    folder: Path = parser.parse_args(arguments).folder
    mapped, ordered = (
        [map_row(row) for row in read_rows(HERE / name)] for name in ("published_runs.csv", "order_runs.csv")
    )
    asked = [one.memory_scenario for one in (*mapped, *ordered) if one.memory_scenario]
    profiles = missing_profiles(asked)
    with tqdm(total=len(profiles), unit="profile", desc="activations", disable=not profiles) as bar:
        trace_ahead(profiles, lambda done, _: bar.update(done - bar.n))
    judged = [judge(one) for one in tqdm(mapped, unit="row")]
    others = [judge(one) for one in tqdm(ordered, unit="row of order")]
    ERRORS.write_text(errors_text(errors_of(judged)), encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for source in dict.fromkeys(one.row.source for one in mapped):
        picture = scatter(judged, source)
        if picture is not None:
            (folder / f"predicted.{source}.svg").write_bytes(draw(picture))
            drawn.append(source)
    (folder / "README.md").write_text(render(judged, others, pictures=drawn), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except HarnessError as error:
        sys.exit(str(error))
