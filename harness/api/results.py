"""Records and what a comparison makes of them, for programs and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from harness.backends.refusals import available
from harness.errors import HarnessError
from harness.judge.comparison import Comparison
from harness.judge.metrics import METRICS
from harness.judge.rows import JudgedRun

if TYPE_CHECKING:
    from pandas import DataFrame

    from harness.judge.findings.finding import Finding
    from harness.record import Record

Kind = Literal["runs", "steps", "evaluations", "findings"]
FINDING = ("id", "backends", "message", "values")


def frame(comparison: Comparison, kind: Kind) -> DataFrame:
    """One table of a comparison. Raises HarnessError for a kind that does not exist."""
    from pandas import DataFrame

    match kind:
        case "runs":
            rows = comparison.rows
            table = DataFrame([{**row.figures, "same_job": row.is_comparable} for row in rows])
            return table.astype({metric.key: "float64" for metric in METRICS if metric.key in table})
        case "steps":
            return DataFrame(
                [_run(row) | asdict(step) for row in comparison.rows for step in row.record.steps]
            )
        case "evaluations":
            return DataFrame(
                [_run(row) | done.model_dump() for row in comparison.rows for done in row.record.eval]
            )
        case "findings":
            return DataFrame([found.as_json() for found in comparison.findings], columns=list(FINDING))
    raise HarnessError(f"table '{kind}' is unknown. {available(str(kind), get_args(Kind))}")


def _run(row: JudgedRun) -> dict[str, Any]:
    """What tells the runs of a comparison apart."""
    record = row.record
    return {
        "run_id": record.run_id,
        "backend": row.label,
        "world_size": record.world.world_size,
        "repeat": record.repeat,
    }


class Results:
    """Runs compared with each other. A terminal shows its table, a notebook the same as HTML."""

    def __init__(self, runs: Sequence[tuple[Path, Record]]) -> None:
        self.runs = list(runs)
        """Each record with its file."""

    @property
    def records(self) -> list[Record]:
        """Every record, those of the repeated reference included."""
        return [record for _, record in self.runs]

    @property
    def record(self) -> Record:
        """The record where there is one only. Raises HarnessError."""
        if len(self.runs) != 1:
            raise HarnessError(f"there are {len(self.runs)} records, not one; use `records`")
        return self.runs[0][1]

    @cached_property
    def comparison(self) -> Comparison:
        """The runs judged by their reference (`harness.judge.comparison`)."""
        return Comparison(self.records)

    @property
    def findings(self) -> list[Finding]:
        """What a reader of the comparison must know; `harness explain ID` has cause and fix."""
        return self.comparison.findings

    def to_frame(self, kind: Kind = "runs") -> DataFrame:
        """A table for pandas, in bytes and seconds; None where nothing was measured.

        'runs': a line per run with the figures of `compare --json`; 'steps': a line per run and optimizer
        step; 'evaluations': a line per run and evaluation; 'findings': a line per finding.
        """

        return frame(self.comparison, kind)

    def as_json(self) -> dict[str, Any]:
        """The document of `compare --json`."""
        return self.comparison.as_json()

    def report(self, path: str | PathLike[str]) -> Path:
        """Write a report; its format follows from the extension (.md, .html, .csv, .json, .tex)."""
        from harness.tell.report import write_report

        return write_report(self.runs, Path(path))

    def __str__(self) -> str:
        from harness.tell.terminal import finding_lines, terminal_table

        return "\n".join([terminal_table(self.comparison), *finding_lines(self.comparison)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from harness.tell.tables import main_table
        from harness.tell.terminal import finding_lines

        found = "".join(f"<li>{escape(line)}</li>" for line in finding_lines(self.comparison, wide=True))
        return main_table(self.comparison, "html") + (f"<ul>{found}</ul>" if found else "")
