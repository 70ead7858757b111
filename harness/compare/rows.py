"""Records to comparison rows: each run beside the reference of its own job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from backends.registry import REFERENCE
from harness.compare import measures
from harness.compare.parity import Judgement, judge
from harness.record import Record


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run and how it compares with its reference."""

    record: Record
    judgement: Judgement

    def as_json(self) -> dict[str, Any]:
        """The row of `compare --json`: bytes per rank, rates over all ranks, None if not measured."""
        record = self.record
        peaks = measures.peak_bytes(record)
        return {
            "backend": record.backend.label,
            "world_size": record.world.world_size,
            "repeat": record.repeat,
            "job_id": record.job_id,
            "status": record.status,
            "reason": reason(record),
            "run_id": record.run_id,
            "tokens_per_second": measures.rate(record, "tokens"),
            "samples_per_second": measures.rate(record, "samples"),
            "step_seconds": measures.median_step_seconds(record),
            "peak_bytes": max(peaks) if peaks else None,
            "model_state_bytes": measures.model_state_bytes(record),
            "sent_bytes_per_step": measures.sent_bytes_per_step(record),
            "expected_sent_bytes_per_step": None,
            "textbook_sent_bytes_per_step": measures.textbook_bytes_per_step(record),
            "max_loss_difference": self.judgement.loss_difference,
            "max_grad_norm_difference": self.judgement.norm_difference,
            "parity": self.judgement.parity,
            "parity_reason": self.judgement.reason,
        }


def reason(record: Record) -> str | None:
    """Why a run has no whole result, in one line; None if it has."""
    if record.reasons:
        return "; ".join(record.reasons)
    if record.error is None:
        return None
    where = f" (rank {record.error.rank})" if record.error.rank is not None else ""
    message = record.error.message.strip() or "no message"
    return f"{record.error.kind}{where}: {message.splitlines()[0]}"


def make_rows(records: Iterable[Record]) -> list[Row]:
    """Judge each run by the reference run of the same job; order is kept."""
    records = list(records)
    references: dict[str, Record] = {}
    for record in records:
        if record.backend.name == REFERENCE:
            known = references.get(record.job_id)
            if known is None or known.status != "ok":
                references[record.job_id] = record
    return [Row(record=r, judgement=judge(references.get(r.job_id), r)) for r in records]


def findings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What a reader must be told: {id, backends, message, values}."""
    found = []
    for row in rows:
        size = row.record.world.world_size
        label = f"{row.record.backend.label} on {size} rank{'s' if size > 1 else ''}"
        values = row.as_json()
        if row.judgement.not_same_job:
            first = row.judgement.not_same_job[0]
            found.append(
                {
                    "id": "not-same-job",
                    "backends": [row.record.backend.label],
                    "message": f"{label}: {first.field} differs from the reference",
                    "values": {"reference": first.reference, "given": first.given},
                }
            )
        elif row.judgement.parity == "diverged":
            found.append(
                {
                    "id": "diverged",
                    "backends": [row.record.backend.label],
                    "message": f"{label}: losses or gradient norms leave the reference",
                    "values": {
                        key: values[key] for key in ("max_loss_difference", "max_grad_norm_difference")
                    },
                }
            )
    found += _untimed(rows)
    layouts: dict[int, dict[str, list[str]]] = {}
    for row in rows:
        world = row.record.world
        if row.record.backend.name != REFERENCE and row.record.status == "ok":
            cut = f"{world.micro_batch_size} x {world.accumulation_steps}"
            layouts.setdefault(world.world_size, {}).setdefault(cut, []).append(row.record.backend.label)
    for size, cuts in layouts.items():
        if len(cuts) > 1:
            found.append(
                {
                    "id": "micro-batch-differs",
                    "backends": sorted({label for labels in cuts.values() for label in labels}),
                    "message": f"on {size} ranks micro-batch x accumulation differs: "
                    + ", ".join(sorted(cuts)),
                    "values": cuts,
                }
            )
    return found


def _untimed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Runs that ended well but were too short for a step to be timed."""
    short = [r.record for r in rows if r.record.status == "ok" and not measures.timed_steps(r.record)]
    if not short:
        return []
    steps = max(len(record.steps) for record in short)
    return [
        {
            "id": "nothing-timed",
            "backends": sorted({record.backend.label for record in short}),
            "message": f"{steps} steps leave none to time after those of measure.warmup_steps and "
            "measure.counted_steps: speed is n/a",
            "values": {"steps": steps},
        }
    ]


def compare_document(rows: Sequence[Row]) -> dict[str, Any]:
    """The document of `compare --json`."""
    ids = list(dict.fromkeys(row.record.job_id for row in rows))
    return {
        "job_id": ids[0] if len(ids) == 1 else None,
        "job_ids": ids,
        "rows": [row.as_json() for row in rows],
        "findings": findings(rows),
    }
