"""The document of `compare --json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.compare.findings.catalogue import find_all
from harness.compare.repeats import repeat_spreads
from harness.compare.rows import Row, set_apart
from harness.compare.settings_in_force import differing_settings


def compare_document(rows: Sequence[Row]) -> dict[str, Any]:
    """The document of `compare --json`."""
    noises = {row.record.job_id: row.noise for row in rows if row.noise is not None}
    ids = list(dict.fromkeys(row.record.job_id for row in rows))
    return {
        "job_id": ids[0] if len(ids) == 1 else None,
        "job_ids": ids,
        "rows": [row.as_json() for row in rows],
        "not_comparable": [_set_apart(row) for row in set_apart(rows)],
        "noise": {job_id: noise.as_json() for job_id, noise in noises.items()},
        "repeat_spreads": repeat_spreads(rows),
        "settings": [setting.as_json() for setting in differing_settings(rows)],
        "findings": [finding.as_json() for finding in find_all(rows)],
    }


def _set_apart(row: Row) -> dict[str, Any]:
    """A run that is not the job of the others: whose job it was held against, and each field that differs."""
    record, other = row.record, row.same_job_as
    return {
        "backend": record.backend.label,
        "world_size": record.world.world_size,
        "repeat": record.repeat,
        "run_id": record.run_id,
        "beside": other.run_id if other is not None else None,
        "differences": [difference.as_json() for difference in row.judgement.not_same_job],
    }
