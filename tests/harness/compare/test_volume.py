from dataclasses import replace

import pytest

from harness.compare.volume import (
    expected_sent_bytes_per_step,
    textbook_differences,
    volume_differences,
)
from tests.records import make_record
from tests.volumes import SHAPES, make_volume_record, with_rows

ELEMENTS = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in SHAPES.values())


@pytest.mark.parametrize("label", ["ddp", "zero1", "zero3", "fsdp", "fsdp1", "fsdp-hybrid"])
def test_what_is_expected_differs_nowhere(label: str) -> None:
    assert volume_differences(make_volume_record(label)) == []


def test_one_byte_is_a_difference() -> None:
    record = with_rows(
        make_volume_record("ddp"),
        lambda row: (
            row.model_copy(update={"payload_bytes": row.payload_bytes + 1})
            if row.rank == 1 and row.phase == "backward"
            else row
        ),
    )
    (found,) = volume_differences(record) or []
    assert (found.rank, found.measured_bytes, found.expected_bytes) == (1, 4 * ELEMENTS + 1, 4 * ELEMENTS)


def test_a_rank_that_counted_nothing_is_a_difference() -> None:
    record = with_rows(make_volume_record("fsdp"), lambda row: row if row.rank == 0 else None)
    assert {d.measured_bytes for d in volume_differences(record) or []} == {0}


def test_sent_bytes_follow_from_the_job_alone() -> None:
    record = make_volume_record("ddp")
    assert expected_sent_bytes_per_step(record.model_copy(update={"comm": []})) == 4 * ELEMENTS


def test_a_checkpoint_is_not_judged() -> None:
    record = make_volume_record("ddp")
    saved = record.comm[0].model_copy(update={"phase": "checkpoint"})
    assert volume_differences(record.model_copy(update={"comm": [*record.comm, saved]})) == []


def test_without_a_layout_nothing_is_expected() -> None:
    record = make_record(label="ddp")
    assert volume_differences(record) is None
    assert expected_sent_bytes_per_step(record) is None
    assert textbook_differences(record) is None


def test_a_backend_of_somebody_else_is_not_judged() -> None:
    record = make_volume_record("ddp")
    mine = record.model_copy(update={"backend": record.backend.model_copy(update={"name": "mine"})})
    assert volume_differences(mine) is None


def test_unknown_steps_leave_the_setup_to_compare() -> None:
    record = make_volume_record("zero3")
    early = [replace(step, step=step.step - 3) for step in record.steps]
    record = record.model_copy(update={"steps": early})
    assert volume_differences(record) == []
    assert expected_sent_bytes_per_step(record) is None
    without = with_rows(record, lambda row: None if row.phase == "setup" else row)
    assert {d.phase for d in volume_differences(without) or []} == {"setup"}
