"""Predicts published runs: writes a page with tables and pictures and the errors that answers cite, or prints
what it says of each row of a file as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

from benchmarks.published.judge import Judged, errors_of, judge, stated_errors
from benchmarks.published.left_out import FILES, own_shares, runs_of, share_of_others
from benchmarks.published.mapping import Mapped, map_row, unread
from benchmarks.published.page import render, scatter
from benchmarks.published.rows import read_rows
from benchmarks.publishing import errors_text
from harness.errors import HarnessError
from harness.plan.profiles import Tracer
from harness.plan.trust import ERRORS, measured_errors
from harness.tell.pictures.drawing import draw

HERE = Path(__file__).parent
REPORT = HERE.parents[1] / "reports" / "predictions" / "published"


def predicted(file: Path, own: Mapping[tuple[str, str], float] = MappingProxyType({})) -> list[Judged]:
    """Every row of a file with what is predicted for it, or why nothing is; `own`: what each source sustains,
    so that its rows are predicted by what all others do."""
    mapped = [map_row(row) for row in read_rows(file)]
    with Tracer() as trace:

        def judged(one: Mapped) -> Judged:
            return judge(one, share_of_others(own, one), trace)

        others = [unread(one) if own else one for one in mapped]
        pairs = zip(tqdm(mapped, unit="row", disable=None), others, strict=True)
        return [replace(judged(one), unread=None if other is one else judged(other)) for one, other in pairs]


def answer(judged: Judged) -> dict[str, Any]:
    """What a row asked for and the answer says, with the errors that it states of itself."""
    memory = judged.memory_bytes if judged.least_bytes is None else None
    speed = None if judged.has_no_rate else judged.tokens_per_second
    memory_error, speed_error = stated_errors(judged)
    reasons = (
        judged.memory_reason if memory is None else None, judged.speed_reason if speed is None else None,
    )  # fmt: skip
    return {
        "id": judged.row.id,
        "memory_bytes": memory,
        "tokens_per_second": speed,
        "fits": judged.fits,
        "memory_error": memory_error,
        "speed_error": speed_error,
        "reason": "; ".join(dict.fromkeys(filter(None, reasons))) or None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge every row; leave the page and its pictures in the folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    words = (
        "where the page goes (default: %(default)s); with --json: the rows, a CSV file with the columns of "
    )
    parser.add_argument("path", nargs="?", type=Path, default=REPORT, help=f"{words}published_runs.csv")
    parser.add_argument(
        "--json", action="store_true", help="print what is predicted for each row of the file"
    )
    given = parser.parse_args(arguments)
    if given.json:
        print(json.dumps({"rows": [answer(one) for one in predicted(given.path)]}, indent=1))
        return
    folder: Path = given.path
    own = own_shares(runs_of(map_row(row) for name in FILES for row in read_rows(HERE / name)))
    judged, others, further = (predicted(HERE / name, own) for name in FILES)
    every = [*judged, *others, *further]
    ERRORS.write_text(errors_text(errors_of(every)), encoding="utf-8")
    measured_errors.cache_clear()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for source in dict.fromkeys(one.row.source for one in (*judged, *further)):
        picture = scatter([*judged, *further], source)
        if picture is not None:
            (folder / f"predicted.{source}.svg").write_bytes(draw(picture))
            drawn.append(source)
    (folder / "README.md").write_text(render([*judged, *further], others, pictures=drawn), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except HarnessError as error:
        sys.exit(str(error))
