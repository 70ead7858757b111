""" """

from typing import Any

import pytest

from harness.forms.terms import Collective, Volume
from harness.judge.comparison import Comparison
from harness.record import MemoryPart, Record
from harness.record.workload import of_record
from harness.tell.document import Paragraph, Table
from harness.tell.sections import amounts
from harness.tell.sections.amounts import (
    communication_section,
    memory_section,
    prediction_section,
    process_memory_blocks,
)
from tests.harness.tell.cells import blocks_in
from tests.records import changed, make_prediction, make_ranks, make_record
from tests.volumes import make_layout


def test_a_kind_that_holds_nothing_anywhere_has_no_column() -> None:
    table, *_ = blocks_in(memory_section(Comparison([make_record(), make_record(label="ddp")])), Table)
    keys = [column.key for column in table.columns]
    assert keys[:5] == ["backend", "world_size", "weights_bytes", "gradients_bytes", "optimizer_bytes"]
    assert "gathered_bytes" not in keys
    assert table.texts()[0][:5] == ["single", "1", "0.004", "0.004", "0.008"]


def moment(name: str, **figures) -> MemoryPart:
    return MemoryPart(
        step=1, moment=name, peak_bytes=None, kinds=None, **({"allocated_bytes": None} | figures)
    )


def record(*ranks: list[MemoryPart], label: str = "ddp") -> Record:
    parts = zip(make_ranks(len(ranks)), ranks, strict=True)
    return make_record(
        label=label,
        world_size=len(ranks),
        ranks=[part.model_copy(update={"memory": memory}) for part, memory in parts],
    )


def table(*records: Record) -> Table:
    (found,) = (b for b in process_memory_blocks(Comparison(list(records))) if isinstance(b, Table))
    return found


def test_least_and_most_over_ranks_of_the_largest_moment() -> None:
    quiet = [moment("after_setup", host_resident_bytes=5), moment("after_step", host_resident_bytes=30)]
    loud = [moment("after_setup", host_resident_bytes=50), moment("after_step", host_resident_bytes=40)]
    held = table(record(quiet, loud))
    assert [column.key for column in held.columns] == [
        "backend", "world_size", "least_host_resident_bytes", "most_host_resident_bytes",
    ]  # fmt: skip
    assert held.rows == [["ddp", 2, 30, 50]]


def test_fragmentation_is_what_is_reserved_and_not_served() -> None:
    memory = [
        moment("after_forward", allocated_bytes=900, reserved_bytes=1000),
        moment("after_step", allocated_bytes=300, reserved_bytes=1000),
    ]
    held = table(record(memory))
    assert [column.key for column in held.columns][2:] == [
        "least_reserved_bytes", "most_reserved_bytes",
        "least_fragmentation_bytes", "most_fragmentation_bytes",
    ]  # fmt: skip
    assert held.rows == [["ddp", 1, 1000, 1000, 700, 700]]


def test_a_figure_that_one_record_has_is_a_column_for_all() -> None:
    with_driver = record([moment("after_step", device_used_bytes=7, pinned_bytes=3)])
    without = record([moment("after_step", device_used_bytes=9)], label="fsdp")
    assert table(with_driver, without).rows == [["ddp", 1, 7, 7, 3, 3], ["fsdp", 1, 9, 9, None, None]]


def test_records_without_such_figures_have_no_table() -> None:
    assert process_memory_blocks(Comparison([record([moment("after_step")])])) == []


def test_a_missing_figure_of_the_driver_is_explained_once() -> None:
    memory = [
        moment(name, reserved_bytes=1, device_used_unknown="nvidia-ml-py is not installed")
        for name in ("after_forward", "after_step")
    ]
    last = process_memory_blocks(Comparison([record(memory, memory)]))[-1]
    assert isinstance(last, Paragraph)
    assert last.text == "The driver's figure is not known: nvidia-ml-py is not installed."


def test_each_prediction_has_its_error() -> None:
    """Of the largest of the measured peaks: 2,001,000 bytes on the second rank."""
    ddp = make_record(label="ddp", prediction=make_prediction(2_101_050))
    single = make_record(prediction=make_prediction(1_900_000))
    section = prediction_section(Comparison([single, ddp]))
    (text,), (table,) = blocks_in(section, Paragraph), blocks_in(section, Table)
    assert table.texts() == [
        ["single", "1", "1.90", "2.00", "-5.0 %", "optimizer step"],
        ["ddp", "2", "2.10", "2.00", "+5.0 %", "optimizer step"],
    ]
    assert "5 % on average and 5 % at most" in text.text


def test_a_prediction_without_a_measurement_is_left_out() -> None:
    unmeasured = make_record(label="ddp", ranks=[], prediction=make_prediction(5))
    assert prediction_section(Comparison([make_record(), unmeasured])) is None


def expected(record: Record) -> dict[str, Any]:
    """The payload that is expected of collectives, by phase."""
    (table,) = blocks_in(communication_section(Comparison([record])), Table)
    keys = [column.key for column in table.columns]
    place = keys.index("expected_payload_bytes")
    return {row[keys.index("phase")]: row[place] for row in table.values()}


def test_every_kind_of_collective_stands_beside_its_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(label="ddp", layout=make_layout())
    part = Collective(
        phase="backward", op="all_reduce", dtype="float32", term="gradients", payload_bytes=100
    )  # fmt: skip
    forms = Volume(collectives=(part,))
    monkeypatch.setattr(amounts, "volume_of", lambda record: (of_record(record), forms))
    assert expected(record)["backward"] == 100 / record.windows.probed


def test_a_backend_without_a_closed_form_has_none() -> None:
    record = changed(make_record(label="ddp"), backend={"label": "own", "name": "own"})
    assert set(expected(record).values()) == {None}
