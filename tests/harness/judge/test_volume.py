from dataclasses import replace

import pytest

from harness.judge.quantities import (
    expected_sent_bytes_per_step,
    textbook_differences,
    volume_differences,
    why_unknown,
)
from harness.record import CommunicationPart, WindowsPart
from tests.records import make_model, make_record
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


@pytest.mark.parametrize(("ranks", "differing"), [([0], 0), ([0, 1], 1)])
def test_a_collective_of_one_rank_alone_sends_nothing(ranks: list[int], differing: int) -> None:
    record = make_volume_record("ddp")
    own = CommunicationPart(
        rank=0, phase="forward", op="all_reduce", dtype="float64", group="7", group_ranks=ranks,
        group_size=len(ranks), calls=1, payload_bytes=8,
    )  # fmt: skip
    found = volume_differences(record.model_copy(update={"comm": [*record.comm, own]})) or []
    assert [(d.op, d.dtype) for d in found] == [("all_reduce", "float64")] * differing


def test_without_a_layout_nothing_is_expected() -> None:
    record = make_record(label="ddp")
    assert volume_differences(record) is None
    assert expected_sent_bytes_per_step(record) is None
    assert textbook_differences(record) is None


def test_a_backend_of_somebody_else_is_not_judged() -> None:
    record = make_volume_record("ddp")
    mine = record.model_copy(update={"backend": record.backend.model_copy(update={"name": "mine"})})
    assert volume_differences(mine) is None


def test_a_group_of_the_right_size_and_other_ranks_is_a_difference() -> None:
    def turned(row: CommunicationPart) -> CommunicationPart:
        replicas = {0: [0, 3], 3: [0, 3], 1: [1, 2], 2: [1, 2]}[row.rank]
        return row.model_copy(update={"group_ranks": replicas}) if row.role == "replica" else row

    found = volume_differences(with_rows(make_volume_record("fsdp-hybrid"), turned)) or []
    assert {(d.group, d.measured_bytes > 0) for d in found} == {("replica", False), ("ranks 0, 3", True)}


def test_groups_with_the_ranks_of_their_role_are_no_difference() -> None:
    groups = {"world": ([0, 1, 2, 3],), "shard": ([0, 1], [2, 3]), "replica": ([0, 2], [1, 3])}

    def named(row: CommunicationPart) -> CommunicationPart:
        (ranks,) = (group for group in groups[row.role] if row.rank in group)
        return row.model_copy(update={"group_ranks": ranks})

    assert volume_differences(with_rows(make_volume_record("fsdp-hybrid"), named)) == []


def test_where_nothing_is_expected_the_reason_is_named() -> None:
    assert why_unknown(make_volume_record("zero3")) is None
    record = make_volume_record("zero3")
    training = record.job.training.model_copy(update={"activation_checkpointing": True})
    recomputed = record.model_copy(update={"job": record.job.model_copy(update={"training": training})})
    assert "is not modelled for this architecture" in (why_unknown(recomputed) or "")
    known = recomputed.model_copy(update={"model": make_model(architecture="LlamaForCausalLM")})
    assert why_unknown(known) is None
    mine = record.model_copy(update={"backend": record.backend.model_copy(update={"name": "mine"})})
    assert why_unknown(mine) == "mine has no closed form here"
    assert "does not describe the model" in (why_unknown(make_record(label="ddp")) or "")
    unprobed = record.model_copy(update={"windows": WindowsPart(warmup=1, probed=0, timed=3)})
    assert "no step was probed" in (why_unknown(unprobed) or "")


def test_of_complex_parameters_nothing_is_expected() -> None:
    record = make_volume_record("ddp")
    assert record.layout is not None
    first, *rest = record.layout.parameters
    turned = [first.model_copy(update={"dtype": "complex64"}), *rest]
    layout = record.layout.model_copy(update={"parameters": turned})
    record = record.model_copy(update={"layout": layout})
    assert volume_differences(record) is None
    assert str(why_unknown(record)).startswith(f"{first.name} is complex, which")


@pytest.mark.parametrize("phase", ["setup", "digest", "evaluation", "checkpoint", "checkpoint_load"])
def test_what_is_sent_outside_of_steps_is_not_judged(phase: str) -> None:
    record = make_volume_record("ddp")
    sent = CommunicationPart(
        rank=0, phase=phase, op="all_reduce", dtype="uint8", group="0", group_ranks=[0, 1], group_size=2,
        calls=2, payload_bytes=41,
    )  # fmt: skip
    assert volume_differences(record.model_copy(update={"comm": [*record.comm, sent]})) == []


def test_of_unknown_steps_nothing_is_judged() -> None:
    record = make_volume_record("zero3")
    early = [replace(step, step=step.step - 3) for step in record.steps]
    record = record.model_copy(update={"steps": early})
    assert volume_differences(record) == []
    assert expected_sent_bytes_per_step(record) is None
