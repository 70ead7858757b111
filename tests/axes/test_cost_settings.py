"""Settings of DeepSpeed that decide cost alone leave losses alone."""

import pytest

from harness.record import Record
from tests.representatives import EXHAUSTIVE

from .parity import assert_parity

LABELS = (
    "zero2", "zero2:overlap_comm=true", "zero2:contiguous_gradients=false",
    "zero2:contiguous_gradients=false,overlap_comm=true",
)  # fmt: skip
FEW = (LABELS[0], LABELS[-1])


def assert_equal_losses(records: dict[str, Record]) -> None:
    """Bit by bit; the reference is another strategy."""
    traces = {
        label: [(step.loss, step.gradient_norm) for step in record.steps]
        for label, record in records.items()
        if label != "single"
    }
    assert len({str(trace) for trace in traces.values()}) == 1, traces


@pytest.mark.parametrize("labels", [FEW, pytest.param(LABELS, marks=EXHAUSTIVE)])
@pytest.mark.costly
def test_overlap_and_contiguous_gradients_leave_losses_alone(labels: tuple[str, ...], matrix) -> None:
    records = assert_parity(matrix, ["training.accumulation_steps=2"], labels)
    assert_equal_losses(records)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 3])
def test_they_do_so_at_every_stage(stage: int, matrix) -> None:
    labels = [f"zero{stage}", f"zero{stage}:overlap_comm=true", f"zero{stage}:contiguous_gradients=false"]
    records = assert_parity(matrix, [], labels)
    assert_equal_losses(records)
