"""Records whose communication is what their implementation is expected to move, to be doctored by tests."""

from dataclasses import replace
from math import prod
from typing import Any

from harness.forms.layout import Layout, Tensor
from harness.judge.quantities import volume_of
from harness.record import BackendPart, CommunicationPart, Record, WindowsPart
from tests.records import changed, make_effective, make_record

SHAPES = {
    "embedding.weight": [10, 4], "blocks.0.weight": [6, 4], "blocks.0.bias": [6], "blocks.1.weight": [4, 4],
}  # fmt: skip
ELEMENTS = sum(prod(shape) for shape in SHAPES.values())


def make_volume_record(label: str, **changes: Any) -> Record:
    """A run on 2 ranks (hybrid: 4) with a layout, moving exactly what is expected of it.

    `accumulation_steps`, `precision` and fields of the record may be given.
    """
    size = 4 if label.endswith("-hybrid") else 2
    accumulation_steps = changes.pop("accumulation_steps", 1)
    precision = changes.pop("precision", "fp32")
    details = {"shard_size": 2} if size == 4 else {}
    record = make_record(
        label=label,
        world_size=size,
        comm=[],
        training={"precision": precision},
        layout=make_layout(),
        windows=WindowsPart(warmup=1, probed=1, timed=2),
        backend=BackendPart(label=label, name=label, effective=make_effective(details=details)),
    )
    steps = [replace(step, step=step.step + 3) for step in record.steps]
    record = changed(
        record, **{"world": {"accumulation_steps": accumulation_steps}, "steps": steps} | changes
    )
    return record.model_copy(update={"comm": expected_rows(record)})


def make_layout() -> Layout:
    tensors = [Tensor(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()]
    return Layout(
        parameters=tensors,
        decaying=[name for name, shape in SHAPES.items() if len(shape) > 1],
        buffers=[],
        blocks=["blocks.0", "blocks.1"],
    )


def expected_rows(record: Record) -> list[CommunicationPart]:
    """Rows as the counter would write them if every rank did what is expected."""
    pair = volume_of(record)
    assert pair is not None
    setting, volume = pair
    return [
        CommunicationPart(
            rank=rank, phase=c.phase, op=c.op, dtype=c.dtype, group=c.role, group_ranks=[],
            group_size=setting.group_size(c.role), calls=c.calls or 1, payload_bytes=c.payload_bytes,
            role=c.role,
        )
        for rank in range(record.world.world_size)
        for c in volume.collectives
    ]  # fmt: skip


def with_rows(record: Record, change: Any) -> Record:
    """The record with `change(row)` applied to its rows; a row that becomes None is gone."""
    rows = [new for row in record.comm if (new := change(row)) is not None]
    return record.model_copy(update={"comm": rows})


def moving(label: str, **changes: Any) -> Record:
    """A run that moves what is expected of it and states the size of its model."""
    record = make_volume_record(label, **changes)
    assert record.backend.effective is not None
    effective = replace(record.backend.effective, parameter_count=ELEMENTS)
    record = changed(record, backend={"effective": effective})
    return record.model_copy(update={"comm": expected_rows(record)})
