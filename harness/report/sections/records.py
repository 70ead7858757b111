"""The records that the report was computed from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from harness.record import Record
from harness.report.document import Column, Section, Table

COLUMNS = (
    Column("run_id", "run", align="left"),
    Column("status", "status", align="left"),
    Column("path", "record", align="left"),
    Column("sha256", "SHA-256 (first 16)", lambda digest: digest[:16], align="left"),
)


def records_section(runs: Sequence[tuple[Path, Record]], folder: Path) -> Section:
    """Each record's path relative to the report's folder, and its digest."""
    body = [
        [
            record.run_id,
            record.status,
            os.path.relpath(path, folder.resolve()),
            hashlib.sha256(path.read_bytes()).hexdigest(),
        ]
        for path, record in runs
    ]
    return Section("records", "Records", [Table(key="records", columns=COLUMNS, rows=body)])
