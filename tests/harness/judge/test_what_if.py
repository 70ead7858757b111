"""Closed forms of measured cells on other numbers of ranks; of published runs, which have layouts."""

from functools import cache
from pathlib import Path

import pytest

from harness.judge.states import expected_model_state_bytes
from harness.judge.volume import expected_sent_bytes_per_step
from harness.record import Record
from harness.record.record_files import ARCHIVE_NAME
from harness.record.store import read_runs
from harness.tell.short.decision import sent_with, states_on
from tests.records import make_record

REPORTS = Path(__file__).resolve().parents[3] / "reports"
SHARDED = ("zero1", "zero2", "zero3", "fsdp", "fsdp1")


@cache
def cells(report: str) -> dict[tuple[str, int], Record]:
    """The first sound run of each cell of built-in backends."""
    found: dict[tuple[str, int], Record] = {}
    for _, record in read_runs([REPORTS / report / ARCHIVE_NAME])[0]:
        if record.status == "ok" and not record.backend.name.startswith("planted-"):
            found.setdefault((record.backend.label, record.world.world_size), record)
    return found


@pytest.mark.parametrize("report", ["default", "full-matrix", "same-job-on-nodes", "twelve-ways"])
def test_on_its_own_ranks_and_micro_steps_a_cell_has_the_figures_that_its_run_is_held_to(report: str) -> None:
    for (label, size), record in cells(report).items():
        states = states_on(record, size)
        has_none = "hybrid" in label or bool(record.world.dimensions)
        assert states == expected_model_state_bytes(record) or (states is None and has_none), label
        expected = expected_sent_bytes_per_step(record)
        if expected is not None:
            assert sent_with(record, record.world.accumulation_steps) == expected, label


def test_what_one_run_predicts_for_more_ranks_is_what_a_run_on_more_ranks_is_held_to() -> None:
    of = cells("full-matrix")
    pairs = [(of[label, 2], of[label, 4]) for label, size in of if size == 2 and (label, 4) in of]
    assert len(pairs) > 10
    for here, there in pairs:
        assert states_on(here, 4) == expected_model_state_bytes(there), here.backend.label


def test_sharded_states_shrink_with_the_ranks_and_replicated_ones_do_not() -> None:
    of = cells("default")
    for label in (*SHARDED, "ddp", "zero0"):
        sizes = [states_on(of[label, 2], size) for size in (2, 4, 16, 64)]
        assert None not in sizes
        assert (sizes == sorted(set(sizes), reverse=True)) is (label in SHARDED), label  # type: ignore[type-var]
        assert (len(set(sizes)) == 1) is (label not in SHARDED), label


def test_only_those_who_gather_or_reduce_in_every_micro_step_send_more_with_accumulation() -> None:
    of = cells("default")
    growth = {}
    for label in ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op"):
        once, several = (sent_with(of[label, 2], steps) for steps in (1, 8))
        assert once
        assert several
        growth[label] = several / once
    assert all(growth[label] == 1 for label in ("ddp", "zero0", "zero1"))
    assert all(1 < growth[label] <= 8 for label in ("zero2", "zero3", "fsdp", "fsdp-grad-op"))
    assert growth["zero3"] > growth["zero2"]


def test_a_run_without_a_layout_or_with_forms_of_its_own_has_none() -> None:
    assert states_on(make_record(label="ddp"), 4) is None
    assert sent_with(make_record(label="ddp"), 4) is None
    planted = next(
        record
        for _, record in read_runs([REPORTS / "full-matrix" / ARCHIVE_NAME])[0]
        if record.backend.name == "planted-gradients-summed" and record.status == "ok"
    )
    assert states_on(planted, 4) is None
