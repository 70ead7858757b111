from harness.judge.comparison import Comparison
from harness.record import MemoryPart, Record
from harness.tell.document import Paragraph, Table
from harness.tell.sections.amounts import process_memory_blocks
from tests.records import make_ranks, make_record


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
