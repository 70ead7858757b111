"""What the details hold, in their order. A new section is a function of a comparison and a line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from harness.job.experiment import ReportFocus, speeds_are_asked
from harness.judge.comparison import Comparison
from harness.tell.document import Block, Document, Folded, Picture, Section, Table
from harness.tell.pictures.bars import memory_picture, overlap_picture, phases_picture, volume_picture
from harness.tell.sections.amounts import (
    checkpoints_section,
    communication_section,
    memory_section,
    nodes_section,
    pipeline_section,
    prediction_section,
    states_section,
    volume_section,
)
from harness.tell.sections.choice import choice_section
from harness.tell.sections.job import (
    configuration_section,
    given_section,
    job_section,
    machine_section,
    measurement_section,
    not_comparable_section,
    observed_section,
    presets_section,
    reproduce_section,
    settings_section,
)
from harness.tell.sections.parity import levels_section, library_alone_section, loss_section
from harness.tell.sections.results import (
    failures_section,
    findings_section,
    reading_section,
    reading_without_speeds,
    results_section,
    results_without_speeds,
    scaling_section,
    surprises_all_section,
)
from harness.tell.sections.time import energy_section, overlap_section, time_section
from harness.tell.tables import blocks_of

TITLE = "Details of the comparison"
Maker = Callable[[Comparison], Section | None]
SECTIONS: tuple[Maker, ...] = (
    job_section,
    machine_section,
    measurement_section,
    results_section,
    choice_section,
    not_comparable_section,
    loss_section,
    levels_section,
    memory_section,
    prediction_section,
    states_section,
    volume_section,
    communication_section,
    checkpoints_section,
    surprises_all_section,
    nodes_section,
    time_section,
    pipeline_section,
    energy_section,
    overlap_section,
    scaling_section,
    findings_section,
    failures_section,
    given_section,
    observed_section,
    presets_section,
    settings_section,
    library_alone_section,
    reading_section,
    reproduce_section,
    configuration_section,
)

OF_EVERY_RUN = {
    job_section,
    not_comparable_section,
    scaling_section,
    findings_section,
    failures_section,
    given_section,
    observed_section,
    configuration_section,
}
"""Sections that look at each run by itself, or that leave out themselves what is not the same job. The
others compare runs, and get only comparable ones."""
OF_SPEED = {time_section, energy_section, overlap_section, scaling_section}
"""Sections that a report leaves out whose question is neither speed nor scaling."""
WITHOUT_SPEEDS: dict[Maker, Maker] = {
    results_section: results_without_speeds,
    reading_section: reading_without_speeds,
}
"""Sections that such a report replaces."""
PICTURES: dict[str, Callable[[Comparison], Picture | None]] = {
    "time": phases_picture,
    "overlap": overlap_picture,
    "memory": memory_picture,
    "communication_volume": volume_picture,
}
"""The picture that opens a section, by its key."""
PICTURE_KEYS = (
    "throughput", "loss", "trade-off", "memory", "communication", "time", "overlap", "strong-scaling",
    "weak-scaling",
)  # fmt: skip
"""Of every picture that a report may hold."""
LONGEST_OPEN_TABLE = 30
"""Lines of a table that stands open; the results always do."""


def details_document(comparison: Comparison, *last: Section, question: ReportFocus = "all") -> Document:
    """Everything about a comparison that its question asks for; `last` follows what is computed from it."""
    makers = SECTIONS
    if not speeds_are_asked(question):
        makers = tuple(WITHOUT_SPEEDS.get(make, make) for make in SECTIONS if make not in OF_SPEED)
    makers = tuple(partial(make, question=question) if make is choice_section else make for make in makers)
    made = [make(comparison if make in OF_EVERY_RUN else comparison.comparable) for make in makers]
    sections = [*filter(None, made), *last]
    return Document(TITLE, [_laid_out(section, comparison.comparable) for section in sections])


def _laid_out(section: Section, comparison: Comparison) -> Section:
    """The section after its pictures, its long tables behind a title each, so that what follows is found."""
    make = PICTURES.get(section.key)
    picture = make(comparison) if make is not None else None
    blocks: list[Block] = [
        Folded(f"{block.key.replace('_', ' ').capitalize()}: {len(block.rows)} lines", [block])
        if isinstance(block, Table) and len(block.rows) > LONGEST_OPEN_TABLE and block.key != "results"
        else block
        for block in section.blocks
    ]
    return Section(section.key, section.title, [*blocks_of(picture), *blocks])
