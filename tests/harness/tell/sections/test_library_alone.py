from dataclasses import replace

from harness.judge.comparison import Comparison
from harness.tell.document import Table
from harness.tell.sections.parity import library_alone_section
from tests.records import make_record


def told(label: str, **subjects: str):
    record = make_record(label=label)
    effective = record.backend.effective
    assert effective is not None
    effective = replace(effective, details={"library_alone": subjects})
    return record.model_copy(update={"backend": record.backend.model_copy(update={"effective": effective})})


def test_subjects_are_listed_once_with_the_cells_that_tell_them() -> None:
    records = [
        make_record(label="ddp"),
        told("trainer-ddp", loss="a"),
        told("trainer-zero3", loss="a", batches="b"),
    ]
    section = library_alone_section(Comparison(records))
    assert section is not None
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    assert table.rows == [
        ["loss", "a", "trainer-ddp and trainer-zero3 on 2 ranks"],
        ["batches", "b", "trainer-zero3 on 2 ranks"],
    ]


def test_without_a_library_that_loops_there_is_no_section() -> None:
    assert library_alone_section(Comparison([make_record(label="ddp")])) is None
