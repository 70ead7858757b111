"""A record of a pipeline of two stages."""

from typing import Any

from harness.record import BackendPart, CommunicationPart, DimensionPart, Record
from tests.records import changed, make_effective, make_ranks, make_record
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
    phases = [{phase: [value] * 4 for phase, value in seconds.items()} for seconds in PHASES]
    ranks = make_ranks(2, phase_seconds=phases, final_digest=[*digests])
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
    return changed(record, **{"world": {"dimensions": dimensions}} | changes)
