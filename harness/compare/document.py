"""The document of `compare --json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.compare.findings.catalogue import find_all
from harness.compare.rows import Row, repeat_spreads


def compare_document(rows: Sequence[Row]) -> dict[str, Any]:
    """The document of `compare --json`."""
    noises = {row.record.job_id: row.noise for row in rows if row.noise is not None}
    ids = list(dict.fromkeys(row.record.job_id for row in rows))
    return {
        "job_id": ids[0] if len(ids) == 1 else None,
        "job_ids": ids,
        "rows": [row.as_json() for row in rows],
        "noise": {job_id: noise.as_json() for job_id, noise in noises.items()},
        "repeat_spreads": repeat_spreads(rows),
        "findings": [finding.as_json() for finding in find_all(rows)],
    }
