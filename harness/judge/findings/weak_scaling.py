"""Weak scaling with a model that grows: whether every rank has as much to compute."""

from __future__ import annotations

from itertools import pairwise

from harness.backends.registry import REFERENCE
from harness.forms.flops import hardware_flops_per_token
from harness.judge.findings.finding import Finding
from harness.judge.repeats import Runs
from harness.judge.speed import geometry, recomputation
from harness.record import Record

LARGEST_RATIO = 1.1


def find(runs: Runs) -> list[Finding]:
    """At most one finding: of the runs on each number of ranks, whose models grow with it."""
    records = [r.record for r in runs.rows if r.record.status == "ok" and r.record.backend.name != REFERENCE]
    sizes = sorted({record.world.world_size for record in records})
    models = [{r.job.model.model_dump_json() for r in records if r.world.world_size == n} for n in sizes]
    if len(sizes) < 2 or any(len(found) != 1 for found in models):
        return []
    first = [next(record for record in records if record.world.world_size == size) for size in sizes]
    parameters = [record.model.parameters if record.model else 0 for record in first]
    work = [work_per_rank(record) for record in first]
    known = [amount for amount in work if amount is not None]
    grows = all(one < other for one, other in pairwise(parameters))
    if not grows or len(known) < len(work) or max(known) <= LARGEST_RATIO * min(known):
        return []
    words = ", ".join(f"{flops:.2e} on {size}" for size, flops in zip(sizes, known, strict=True))
    return [
        Finding(
            id="uneven-weak-scaling",
            about=tuple(sorted({record.backend.label for record in records})),
            text=f"the model grows with the ranks, but a rank's work per step does not stay equal: {words} "
            "ranks, in FLOP",
            values={"world_sizes": sizes, "parameters": parameters, "flops_per_rank_and_step": known},
        )
    ]


def work_per_rank(record: Record) -> float | None:
    """FLOPs that a rank computes in a step; None where the geometry is not known."""
    shape, batch = geometry(record), record.job.training.global_batch_size
    if shape is None or batch is None or record.model is None:
        return None
    each = hardware_flops_per_token(shape, recomputation=recomputation(record))
    return each * shape.sequence_length * batch / record.world.world_size
