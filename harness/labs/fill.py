"""Which function fills which table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.labs import tables
from harness.labs.arithmetic import lecture_tables, memory_tables
from harness.labs.catalogue import Lab, TableKind
from harness.labs.document import LabTable
from harness.labs.waits import waits_tables
from harness.record import Record

OF_RECORDS: dict[TableKind, Callable[[Sequence[Record]], list[LabTable]]] = {
    "scaling": tables.scaling_tables,
    "stages": tables.stages_tables,
    "strategies": tables.strategies_tables,
    "custom": tables.custom_tables,
    "weak": tables.weak_tables,
    "images": tables.images_tables,
    "dtypes": tables.dtypes_tables,
    "times": tables.times_tables,
    "waits": waits_tables,
}
OF_ARITHMETIC: dict[TableKind, Callable[[], list[LabTable]]] = {
    "lecture": lecture_tables,
    "memory": memory_tables,
}


def fill(lab: Lab, records: Sequence[Record]) -> list[LabTable]:
    """The tables of a lab; one of arithmetic needs no records."""
    return OF_ARITHMETIC[lab.table]() if lab.table in OF_ARITHMETIC else OF_RECORDS[lab.table](records)
