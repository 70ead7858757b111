"""Bytes beyond the textbook, or below it."""

from __future__ import annotations

from harness.forms.network import EMULATED
from harness.forms.terms import (
    BACKWARD,
    FORWARD,
    FURTHER_BACKWARD,
    FURTHER_FORWARD,
    FURTHER_GRADIENTS,
    GRADIENTS,
    UPDATED,
)
from harness.forms.textbook import TermDifference
from harness.forms.zero.zero3 import TIED_TERM
from harness.judge.library_notes.note import SMALL_SHARE, TRAFFIC, CellNote, LibraryNote
from harness.judge.quantities import (
    sent_bytes_per_step,
    textbook_bytes_per_step,
    textbook_differences,
    transport_bytes_per_step,
    volume_differences,
)
from harness.judge.rows import CellRuns
from harness.record import Record
from harness.record.workload import known_strategy, of_record

LEAST_EMULATED = 0.05
"""Of the counted bytes."""
MANY_CALLS = 2.0
"""Gathers relative to one per block."""
CALLS_EFFECT = 0.3
"""A gather costs latency, which bytes do not show: ranked as 30 % of bytes."""
BY_TERM: dict[tuple[str, str], str] = {
    ("zero12", GRADIENTS): "gradients-all-reduced",
    ("zero12", FURTHER_GRADIENTS): "reduced-every-micro-step",
    ("zero3", FORWARD): "weights-stay-gathered",
    ("zero3", BACKWARD): "weights-stay-gathered",
    ("zero3", UPDATED): "weights-stay-gathered",
    ("zero3", TIED_TERM): "tied-weights-gathered-twice",
    ("fsdp1", BACKWARD): "root-not-resharded",
    ("fsdp2", BACKWARD): "root-not-resharded",
    **{("zero3", term): "moved-every-micro-step"
       for term in (FURTHER_FORWARD, FURTHER_BACKWARD, FURTHER_GRADIENTS)},
    **{(family, term): "gathered-every-micro-step"
       for family in ("fsdp1", "fsdp2") for term in (FURTHER_FORWARD, FURTHER_BACKWARD)},
    **{(family, FURTHER_GRADIENTS): "sync-each-batch" for family in ("ddp", "fsdp1", "fsdp2")},
}  # fmt: skip
"""Facts by family and term of the closed form; other terms are shown with the remark of the closed form."""


def find_in_traffic(group: CellRuns) -> list[CellNote]:
    """Every one of a cell whose bytes were counted."""
    return [*_terms(group.record), *_emulated(group.record), *_by_module(group.record)]


def _terms(record: Record) -> list[CellNote]:
    """The terms of one note together, relative to all that the textbook sends."""
    strategy, textbook = known_strategy(record), textbook_bytes_per_step(record)
    if strategy is None or not textbook or volume_differences(record) != []:
        return []
    surplus: dict[LibraryNote, float] = {}
    for difference in textbook_differences(record) or ():
        name = BY_TERM.get((strategy.family, difference.term))
        note = LibraryNote.of(name) if name else _unlisted(difference, strategy.family)
        surplus[note] = surplus.get(note, 0.0) + difference.difference
    return [
        CellNote(library_note=note, figure=1 + sent / textbook)
        for note, sent in surplus.items()
        if abs(sent) >= SMALL_SHARE * textbook
    ]


def _unlisted(difference: TermDifference, family: str) -> LibraryNote:
    remark = f" ({difference.remark})" if difference.remark else ""
    return LibraryNote(
        id="other-traffic",
        what=f"{{figure}} x the textbook's bytes: {difference.term}{remark}",
        advice="No action: the implementation does so.",
        questions=TRAFFIC,
        packages=("deepspeed",) if family.startswith("zero") else ("torch",),
    )


def _emulated(record: Record) -> list[CellNote]:
    """What the transport sends for the same calls, relative to what is counted."""
    transport = record.world.collectives
    replaced = EMULATED.get(transport, {})
    counted, moved = sent_bytes_per_step(record), transport_bytes_per_step(record)
    if not replaced or not counted or moved is None or moved < (1 + LEAST_EMULATED) * counted:
        return []
    words = " and ".join(
        f"{one.replace('_', '-')} runs as {other.replace('_', '-')}" for one, other in replaced.items()
    )
    note = LibraryNote(
        id="transport-emulates",
        what=f"{{figure}} x the counted bytes cross the wire: {words}",
        advice="Compare counted bytes.",
        questions=TRAFFIC,
        packages=("torch",),
        cause="transport",
        since="torch 2.13, csrc/distributed/c10d/ProcessGroupGloo.cpp; confirmed by bytes on a wire",
    )
    return [CellNote(library_note=note, figure=moved / counted)]


def _by_module(record: Record) -> list[CellNote]:
    """Counted calls of a forward pass, relative to one for each block and the root."""
    strategy, workload = known_strategy(record), of_record(record)
    if strategy is None or strategy.family != "zero3" or workload is None or record.windows is None:
        return []
    passes = record.windows.probed * record.world.accumulation_steps
    calls = sum(
        row.calls
        for row in record.comm
        if row.rank == 0 and row.phase == "forward" and row.op == "all_gather"
    )
    by_block = len(workload.layout.units())
    if not passes or calls < MANY_CALLS * by_block * passes:
        return []
    by_module = LibraryNote.of("gathers-by-module")
    return [CellNote(library_note=by_module, figure=calls / passes / by_block, effect=CALLS_EFFECT)]
