"""Doctored records; `tests/contract/test_communication.py` plants the same defects in real runs."""

from typing import Any

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.record import Record
from tests.volumes import make_volume_record, with_rows


def finding_of(record: Record) -> Finding | None:
    found = [f for f in Comparison([record]).findings if f.id == "communication-differs"]
    assert len(found) <= 1
    return found[0] if found else None


def backward(change: Any, *, role: str = "world") -> Any:
    """Apply `change` to what the backward pass reduces."""
    return lambda row: (
        change(row) if row.phase == "backward" and "reduce" in row.op and row.role == role else row
    )


def test_agreement_is_no_finding() -> None:
    for label in ("ddp", "fsdp", "zero2"):
        assert finding_of(make_volume_record(label, accumulation_steps=4)) is None


def test_synchronising_every_micro_step_is_named() -> None:
    record = make_volume_record("ddp", accumulation_steps=4)
    often = with_rows(
        record, backward(lambda row: row.model_copy(update={"payload_bytes": 4 * row.payload_bytes}))
    )
    found = finding_of(often)
    assert found is not None
    assert found.backends == ("ddp",)
    assert found.message.startswith("ddp on 2 ranks: synchronised at every micro-step: all_reduce")
    assert "4 times as much" in found.message


def test_another_dtype_is_named_with_both() -> None:
    record = make_volume_record("fsdp", precision="bf16-mixed")
    halved = with_rows(
        record,
        backward(
            lambda row: row.model_copy(update={"dtype": "bfloat16", "payload_bytes": row.payload_bytes // 2})
        ),
    )
    found = finding_of(halved)
    assert found is not None
    assert "reduce_scatter in backward runs in bfloat16, expected float32" in found.message
    assert len(found.values["differences"]) == 2


def test_replicas_that_never_reduce_are_named() -> None:
    record = with_rows(make_volume_record("fsdp-hybrid"), backward(lambda row: None, role="replica"))
    found = finding_of(record)
    assert found is not None
    assert "never reduces across replicas" in found.message


def test_a_run_that_failed_is_not_judged() -> None:
    record = make_volume_record("ddp").model_copy(update={"comm": [], "status": "failed"})
    assert finding_of(record) is None
