"""Runs that are not the job of their reference."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.findings.finding import Finding, Kind, subject
from harness.compare.rows import Row

KINDS = (
    Kind(
        id="not-same-job",
        title="A run did not train what its reference trained, so it is not compared",
        cause="Its data, initial weights, learning rates, steps or optimizer constants are others.",
        confirm="The message names the first field that differs; the values hold both sides.",
        fix="Give both the same setting. Initial weights: build the model from one seed on every rank, or "
        "broadcast them (FSDP1: `sync_module_states=True`). Samples: shard the data once, either in the "
        "sampler or in the library's loader.",
    ),
)


def find(rows: Sequence[Row]) -> list[Finding]:
    """One finding per run that differs from its reference in what makes the job."""
    found = []
    for row in rows:
        if row.judgement.not_same_job:
            first = row.judgement.not_same_job[0]
            found.append(
                Finding(
                    id="not-same-job",
                    backends=(row.record.backend.label,),
                    message=f"{subject(row)}: {first.field} differs from the reference",
                    values={"reference": first.reference, "given": first.given},
                )
            )
    return found
