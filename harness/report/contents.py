"""What the report holds, in its order. A new section is a function of rows and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.compare.rows import Row
from harness.report.document import Document, Section
from harness.report.sections.communication import communication_section
from harness.report.sections.failures import failures_section
from harness.report.sections.findings import findings_section
from harness.report.sections.job import job_section
from harness.report.sections.loss import loss_section
from harness.report.sections.machine import machine_section
from harness.report.sections.memory import memory_section
from harness.report.sections.overlap import overlap_section
from harness.report.sections.reading import reading_section
from harness.report.sections.reproduce import configuration_section, reproduce_section
from harness.report.sections.results import results_section
from harness.report.sections.time import time_section
from harness.report.sections.verdict import verdict_section
from harness.report.sections.volume import volume_section

TITLE = "Comparison of data-parallel sharding strategies"
SECTIONS: tuple[Callable[[Sequence[Row]], Section | None], ...] = (
    verdict_section,
    job_section,
    machine_section,
    results_section,
    loss_section,
    time_section,
    overlap_section,
    memory_section,
    volume_section,
    communication_section,
    findings_section,
    failures_section,
    reading_section,
    reproduce_section,
    configuration_section,
)


def comparison(rows: Sequence[Row], *last: Section) -> Document:
    """The report of rows; `last` follows what is computed from the rows alone."""
    sections = [section for make in SECTIONS if (section := make(rows)) is not None]
    return Document(TITLE, [*sections, *last])
