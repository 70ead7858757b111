"""Bubble and stages of a pipeline's record, and the findings that only pipelines have."""

from __future__ import annotations

from typing import Any

import pytest

from harness.compare.comparison import Comparison
from harness.compare.pipeline import pipeline_use
from harness.record import BackendPart, CommunicationPart, DimensionPart, Record
from harness.report.document import Table
from harness.report.sections.pipeline import pipeline_section
from tests.records import make_effective, make_ranks, make_record
from tests.volumes import make_layout

SHARED = ["embedding.weight"]
PHASES = (
    {"forward": 1.0, "backward": 2.0, "waiting": 1.0, "step": 0.1},
    {"forward": 1.0, "backward": 1.0, "waiting": 2.0, "step": 0.1},
)
"""Seconds of each rank."""
SAME, OTHER = "a" * 64, "b" * 64
SENT = (("forward", "send", 0, 4096), ("backward", "recv", 0, 4096), ("backward", "send", 1, 4096))


def make_pipeline(digests: tuple[str, str] = (SAME, SAME), **changes: Any) -> Record:
    """Two stages of one block each, four micro-batches; of 4 seconds the ranks wait 1 and 2."""
    ranks = []
    for part, seconds, digest in zip(make_ranks(2), PHASES, digests, strict=True):
        phases = {phase: [value] * 4 for phase, value in seconds.items()}
        ranks.append(part.model_copy(update={"phase_seconds": phases, "final_digest": digest}))
    effective = make_effective(details={"tied_across_stages": SHARED, "micro_batches": 4}, reduce_dtype=None)
    options = {"schedule": "1f1b", "stages": None, "micro_batches": 4, "stages_per_rank": 2}
    comm = [
        CommunicationPart(
            rank=rank, phase=phase, op=op, dtype="float32", group="1", group_ranks=[0, 1], group_size=2,
            calls=4, payload_bytes=size, role="world",
        )
        for phase, op, rank, size in SENT
    ]  # fmt: skip
    backend = BackendPart(
        label="pp", name="pp", options=options, effective=effective, native_config={}, versions={}
    )
    record = make_record(label="pp", layout=make_layout(), ranks=ranks, comm=comm, backend=backend)
    dimensions = [DimensionPart(name="pipeline", size=2), DimensionPart(name="data", size=1)]
    world = record.world.model_copy(update={"dimensions": dimensions})
    return record.model_copy(update={"world": world} | changes)


def test_bubble_is_predicted_from_the_schedule_and_measured_from_waiting() -> None:
    use = pipeline_use(make_pipeline())
    assert use is not None
    assert use.expected_bubble == pytest.approx(1 / 5)
    assert use.measured_bubble == pytest.approx((1 / 4 + 2 / 4) / 2)


def test_messages_are_told_apart_by_what_they_carry() -> None:
    use = pipeline_use(make_pipeline())
    assert use is not None
    assert [(stage.activation_bytes, stage.gradient_bytes) for stage in use.by_rank] == [(4096, 0), (0, 4096)]
    assert [stage.blocks for stage in use.by_rank] == [1, 1]


def test_other_strategies_have_no_stages() -> None:
    assert pipeline_use(make_record(label="ddp")) is None
    assert pipeline_section(Comparison([make_record(label="ddp")])) is None


def test_the_section_has_a_line_per_pipeline_and_per_rank() -> None:
    section = pipeline_section(Comparison([make_pipeline()]))
    assert section is not None
    tables = {block.key: block for block in section.blocks if isinstance(block, Table)}
    assert [len(tables[key].rows) for key in ("pipelines", "pipeline_stages")] == [1, 2]


def test_copies_of_a_tied_weight_that_came_apart_are_named() -> None:
    apart = Comparison([make_pipeline((SAME, OTHER))]).findings
    assert [f.values for f in apart if f.id == "tied-weight-apart"] == [{"weights": SHARED}]
    assert not any(f.id == "tied-weight-apart" for f in Comparison([make_pipeline()]).findings)
