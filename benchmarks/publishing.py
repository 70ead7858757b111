"""Publishes a report with its records in one archive, and renders published reports again.

Usage: python -m benchmarks.publishing REPORTS [FOLDER]     (render and verify all reports below FOLDER)
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.published_reports import SUBJECTS, question_of
from harness.record import Record
from harness.record.store import ARCHIVE_NAME, read_runs
from harness.tell.manifest import read_manifest
from harness.tell.report import write_report
from harness.tell.verify import verify

REPORTS = ("report.md", "report.html")
"""The second is optional."""


def publish(runs: Path, output: Path) -> list[Record]:
    """Pack the records into `output`, write a report of them there and verify it.

    Exits without publishing if a run failed.
    """
    records = [record for _, record in read_runs([runs])[0]]
    for record in records:
        if record.status not in ("ok", "unsupported"):
            raise SystemExit(f"{record.run_id}: {record.status}: {record.error}")
    report = str(output / REPORTS[0])
    for words in (["report", str(runs), "-o", report, "--archive"], ["verify", report]):
        subprocess.run([sys.executable, "-m", "harness", *words], check=True)
    return records


def render_again(reports: Path, folder: Path | None = None) -> list[str]:
    """Render and verify the reports next to archives below a folder; return what fails verification.

    `folder` None: all below `reports`. A report that is not in the list of the published ones keeps its
    question.
    """
    problems = []
    for archive in sorted((folder or reports).rglob(ARCHIVE_NAME)):
        runs, unreadable = read_runs([archive])
        problems += unreadable
        for report in (archive.with_name(name) for name in REPORTS):
            if report.exists():
                name = archive.parent.relative_to(reports).as_posix()
                asked = read_manifest(report.read_text(encoding="utf-8"), report).manifest
                written = write_report(
                    runs, report, question=question_of(name) or asked.question,
                    subject=SUBJECTS.get(name, ""), folders=[archive], over=asked.over,
                )  # fmt: skip
                result = verify(written)
                problems += [f"{report.parent}: {problem}" for problem in result.problems]
                print(f"{report}: {result.summary}", flush=True)
    return problems


def errors_text(errors: Iterable[Mapping[str, Any]]) -> str:
    """Errors of predictions as a file that ships with the planner: a line for each run."""
    return "[\n" + ",\n".join(json.dumps(one) for one in errors) + "\n]\n"


if __name__ == "__main__":
    sys.exit("\n".join(render_again(*map(Path, sys.argv[1:3]))) or None)
