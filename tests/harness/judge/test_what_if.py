"""Closed forms of measured cells on other numbers of ranks; of published runs, which have layouts."""

from functools import cache

import pytest

from harness.judge.quantities import expected_model_state_bytes, expected_sent_bytes_per_step
from harness.record import Record
from harness.tell.sections.choice import held_with, sent_with
from tests.records import make_record, published

SHARDED = ("zero1", "zero2", "zero3", "fsdp", "fsdp1")


@cache
def cells(report: str) -> dict[tuple[str, int], Record]:
    """The first sound run of each cell of built-in backends."""
    found: dict[tuple[str, int], Record] = {}
    for record in published(report):
        if record.status == "ok" and not record.backend.name.startswith("planted-"):
            found.setdefault((record.backend.label, record.world.world_size), record)
    return found


@pytest.mark.parametrize("report", ["default", "full-matrix", "same-job-on-nodes", "twelve-ways"])
def test_on_its_own_ranks_and_micro_steps_a_cell_has_the_figures_that_its_run_is_held_to(report: str) -> None:
    for (label, _), record in cells(report).items():
        held = held_with(record, record.world.accumulation_steps)
        states = expected_model_state_bytes(record)
        # All states lie on the GPU but AdamW's counters, 4 bytes a parameter tensor.
        assert held is None or states is None or held >= 0.9999 * states, label
        expected = expected_sent_bytes_per_step(record)
        if expected is not None:
            assert sent_with(record, record.world.accumulation_steps) == expected, label


def test_what_one_run_predicts_for_more_ranks_is_what_a_run_on_more_ranks_is_held_to() -> None:
    of = cells("full-matrix")
    pairs = [(of[label, 2], of[label, 4]) for label, size in of if size == 2 and (label, 4) in of]
    assert len(pairs) > 10
    for here, there in pairs:
        assert sent_with(here, 1, 4) == sent_with(there, 1, 4), here.backend.label
        assert held_with(here, 1, 4) == held_with(there, 1, 4), here.backend.label


def test_of_a_script_it_need_not_be_known_how_long_samples_are_nor_how_its_update_works() -> None:
    for label in (*SHARDED, "ddp"):
        record = cells("default")[label, 2]
        data = record.job.data.model_copy(update={"sequence_length": None})
        optimizer = record.job.optimizer.model_copy(update={"implementation": None})
        job = record.job.model_copy(update={"data": data, "optimizer": optimizer})
        held = held_with(record.model_copy(update={"job": job}), 8, 64)
        assert held is not None
        assert held == held_with(record, 8, 64)


def test_with_the_ranks_what_is_held_shrinks_where_states_are_sharded_and_only_there() -> None:
    of = cells("default")
    for label in (*SHARDED, "ddp", "zero0"):
        sizes = [held_with(of[label, 2], 1, size) for size in (2, 4, 16, 64)]
        assert None not in sizes
        assert (sizes == sorted(set(sizes), reverse=True)) is (label in SHARDED), label  # type: ignore[type-var]
        assert (len(set(sizes)) == 1) is (label not in SHARDED), label


def test_traffic_of_many_ranks_is_that_of_a_ring_of_as_many() -> None:
    record = cells("default")["ddp", 2]
    weights = record.initial_weights
    assert weights
    size = 4 * weights.parameter_count
    # Beside the gradients the norm and the loss go around, some bytes each.
    assert sent_with(record, 8, 64) == pytest.approx(2 * 63 / 64 * size, rel=1e-4)
    assert sent_with(record, 8) == pytest.approx(size, rel=1e-4)


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
    assert held_with(make_record(label="ddp"), 1, 4) is None
    assert sent_with(make_record(label="ddp"), 4) is None
    planted = next(
        record
        for record in published("full-matrix")
        if record.backend.name == "planted-gradients-summed" and record.status == "ok"
    )
    assert held_with(planted, 1, 4) is None
