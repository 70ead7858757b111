"""Checks that a report can be written before its runs take hours."""

from __future__ import annotations

import os
from pathlib import Path

from harness.errors import HarnessError
from harness.plain_files import require_plain_output
from harness.record_files import RECORD_NAME
from harness.report.manifest import Format
from harness.report.report import format_of
from harness.store import try_writing

LONGEST_NAME = 200
"""Bytes of a report's file name; file systems allow 255, of which names of tables and pictures need some."""
FILES_OF_RUNS = (RECORD_NAME, "request.json", "matrix.json", "slurm.json")
NOT_IN_TEX = '{}%#\\"\n'


def require_writable(report: Path, form: Format | None = None) -> None:
    """Raise HarnessError if a report cannot be written there."""
    form = form or format_of(report)
    length = len(os.fsencode(report.name))
    if length > LONGEST_NAME:
        raise HarnessError(
            f"report's file name has {length} bytes; at most {LONGEST_NAME} are allowed, as its pictures "
            "have longer names; give a shorter one"
        )
    refused = [character for character in NOT_IN_TEX if character in report.name]
    if refused and form == "latex":
        raise HarnessError(
            f"report's file name {report.name!r} holds {' '.join(map(repr, refused))}, which LaTeX does not "
            "allow in names of pictures; give another name"
        )
    require_plain_output(report, "report")
    if report.name in FILES_OF_RUNS:
        raise HarnessError(
            f"report '{report}' would replace {report.name}, a file of a run; give another name"
        )
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        try_writing(report)
    except OSError as error:
        raise HarnessError(f"report '{report}' cannot be written: {error.strerror}") from error
