from collections.abc import Callable

import pytest

from harness.judge.comparison import Comparison
from harness.judge.library_notes import ReportNote, library_notes
from harness.record import CommunicationPart, Record
from tests.harness.judge.library_notes.moving import moving
from tests.volumes import expected_rows, with_rows


def seen(*records: Record) -> dict[str, ReportNote]:
    return {note.library_note.id: note for note in library_notes(Comparison(records), "speed")}


def on_nccl(record: Record) -> Record:
    return record.model_copy(update={"world": record.world.model_copy(update={"collectives": "nccl"})})


@pytest.mark.parametrize("label", ["zero1", "zero2"])
def test_stages_1_and_2_all_reduce_and_the_transport_is_not_the_cause(label: str) -> None:
    note = seen(moving(label))["gradients-all-reduced"]
    assert note.figure == "1.5"
    assert note.origin == "DeepSpeed 0.19.8, not the transport"
    assert str(note.cells[0]) == f"{label} on 2 ranks"


def test_gradients_that_are_reduced_to_their_owners_surprise_nobody() -> None:
    record = moving("zero1")
    options = {"use_multi_rank_bucket_allreduce": False}
    backend = record.backend.model_copy(update={"options": options})
    record = record.model_copy(update={"backend": backend})
    owned = record.model_copy(update={"comm": expected_rows(record)})
    assert any(row.op == "reduce" for row in owned.comm)
    assert "gradients-all-reduced" not in seen(owned)


def test_stage_2_reduces_in_every_micro_step_and_stage_1_does_not() -> None:
    stage_1, stage_2 = (moving(label, accumulation_steps=3) for label in ("zero1", "zero2"))
    assert "reduced-every-micro-step" not in seen(stage_1)
    # Two more all-reduces of 2 f P bytes on 2 f P of the textbook.
    assert seen(stage_2)["reduced-every-micro-step"].figure == "3"
    assert "reduced-every-micro-step" not in seen(moving("zero2"))


def test_fsdp1_sends_less_than_the_textbook_by_its_root() -> None:
    note = seen(moving("fsdp1"))["root-not-resharded"]
    assert note.figures[0] < 1
    assert "root-not-resharded" not in seen(moving("fsdp"))


def test_gloo_emulates_a_reduce_scatter_and_nccl_does_not() -> None:
    note = seen(moving("fsdp"))["transport-emulates"]
    assert note.library_note.cause == "transport"
    assert note.origin.startswith("gloo in torch ")
    assert note.origin.endswith("not the library")
    assert "transport-emulates" not in seen(on_nccl(moving("fsdp")))
    assert "transport-emulates" not in seen(moving("zero1"))


def _one_byte_more(row: CommunicationPart) -> CommunicationPart:
    return row.model_copy(update={"payload_bytes": row.payload_bytes + 1})


def _nothing(row: CommunicationPart) -> None:
    return None


@pytest.mark.parametrize("change", [_one_byte_more, _nothing])
def test_a_cause_is_named_only_where_every_byte_is_as_its_closed_form_expects(
    change: Callable[[CommunicationPart], CommunicationPart | None],
) -> None:
    assert "gradients-all-reduced" not in seen(with_rows(moving("zero1"), change))


def test_nothing_surprises_where_figures_equal_the_textbook() -> None:
    assert library_notes(Comparison([moving("ddp")]), "speed") == []


def test_cells_that_differ_alike_are_one_line() -> None:
    note = seen(moving("zero1"), moving("zero2"))["gradients-all-reduced"]
    assert note.short_cells == "zero1 and zero2 on 2 ranks"
