"""Records and verified reports of runs, kept in a folder to be published."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.record import Record
from harness.store import read_record


def keep(runs: Path, output: Path, reports: Sequence[str] = ("report.md", "report.html")) -> list[Record]:
    """Copy the records to `output`/runs, and write and verify reports of them there.

    Ends the program if a run failed: nothing is published then.
    """
    records = []
    for path in sorted(runs.glob("*/record.json")):
        record = read_record(path)
        if record.status not in ("ok", "unsupported"):
            raise SystemExit(f"{record.run_id}: {record.status}: {record.error}")
        target = output / "runs" / record.run_id
        target.mkdir(parents=True)
        shutil.copy(path, target)
        records.append(record)
    for name in reports:
        for words in (["report", "runs", "-o", name], ["verify", name]):
            subprocess.run([sys.executable, "-m", "harness", *words], cwd=output, check=True)
    return records
