"""Runs that trained another job than their reference, and tables with several jobs."""

from __future__ import annotations

from collections.abc import Sequence

from harness.backends.registry import REFERENCE
from harness.judge.findings.finding import Finding
from harness.judge.parity import has_dropout
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.judge.run import Run
from harness.judge.wording import both
from harness.nested import differences, value_at

CUT = {("training", name) for name in ("global_batch_size", "micro_batch_size", "accumulation_steps")}
"""Settings that weak scaling changes with the number of ranks."""


def find(runs: Runs) -> list[Finding]:
    """Jobs side by side, then for each run everything in which it is another job."""
    found = _several_jobs(runs.rows)
    for row in runs.rows:
        # `_several_jobs` reports once that a table holds several jobs.
        for difference in () if row.is_of_another_job else row.judgement.not_same_job:
            given, other = both(difference.given, difference.reference)
            whose = "the reference" if row.reference is row.same_job_as else _name(row.same_job_as)
            found.append(
                Finding(
                    id=difference.kind,
                    about=row.cell,
                    text=f"{difference.differs} from {whose}: {given} against {other}",
                    values={"reference": difference.reference, "given": difference.given},
                )
            )
        live = row.record.observed.dropout if row.record.observed else None
        if row.record.status == "ok" and has_dropout(row.record):
            found.append(
                Finding(
                    id="not-deterministic",
                    about=row.cell,
                    text="dropout is active, so runs differ by chance and parity cannot be judged",
                    values={"job": row.record.job.model.dropout, "live": live},
                )
            )
    return found


def _several_jobs(rows: Sequence[Row]) -> list[Finding]:
    jobs = {row.record.job_id: row.record.job.model_dump() for row in rows}
    if len(jobs) < 2:
        return []
    first, *others = jobs.values()
    differing = dict.fromkeys(keys for other in others for keys, _, _ in differences(first, other))
    if differing.keys() <= CUT and _grows_with_ranks(rows):
        return []
    values = {".".join(keys): [value_at(job, keys) for job in jobs.values()] for keys in differing}
    named = "; ".join(f"{path}: {' / '.join(map(str, given))}" for path, given in values.items())
    return [
        Finding(
            id="several-jobs",
            about=tuple(sorted({row.label for row in rows})),
            text=f"not the same job: these rows belong to {len(jobs)} jobs, each compared with its own "
            f"reference only ({named or 'the contents of their files differ'})",
            values=values,
        )
    ]


def _grows_with_ranks(rows: Sequence[Row]) -> bool:
    """Whether every rank of every run has equally many samples: weak scaling, which is no mistake."""
    records = [row.record for row in rows if row.record.backend.name != REFERENCE]
    if len({record.world.world_size for record in records}) < 2:
        return False
    return len({(r.job.training.global_batch_size or 0) / r.world.world_size for r in records}) == 1


def _name(run: Run | None) -> str:
    """The run that replaces a reference without a result."""
    return "the others" if run is None else f"{run.label}, as the reference has no result"
