"""What the short report holds, in its order; every line refers to the details that show its evidence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison, strong_scaling, weak_scaling
from harness.judge.findings.finding import Statement, statements
from harness.judge.library_notes.note import ReportNote
from harness.judge.library_notes.rules import library_notes
from harness.judge.wording import counted, listed, name_cells
from harness.record import WorldPart
from harness.tell.document import Block, Code, Document, Folded, Items, Line, Picture, Section, report_cells
from harness.tell.pictures.bars import memory_picture, volume_picture
from harness.tell.pictures.plots import loss_picture, strong_picture, throughput_picture, weak_picture
from harness.tell.sections.job import commands_of
from harness.tell.sections.results import KEY, TITLE, no_findings
from harness.tell.short.choice import choice_section
from harness.tell.short.summary import MOST_ROWS, summary_section
from harness.tell.short.title import job_words, rank_words, title
from harness.tell.short.verdict import trust_lines, verdict_section
from harness.tell.short.words import fitting, shortened
from harness.tell.tables import prose
from harness.tell.writers.markdown import render_markdown

VERIFY = "harness verify FILE  # this report, in any format"
MEANT = {"bf16": "bf16 without fp32 master weights"}
"""What a precision says too little of."""
MOST_WORDS_CHECK = 30
"""Of a command that is shown here."""


def check_section(comparison: Comparison, question: ReportFocus) -> Section:
    """The first command that made the runs, if it is short, and the one that verifies this report."""
    first, *others = commands_of(comparison)
    shown = [first] if len(first.split()) <= MOST_WORDS_CHECK else []
    hidden = others if shown else [first, *others]
    more = f", {counted(len(hidden), 'more command')}" if hidden else ""
    return Section(
        "check",
        "Reproduce and verify",
        [
            Code("sh", "\n".join([*shown, VERIFY])),
            Line(f"Commit, versions and configuration{more}:", details="reproduce"),
            Line(
                "harness verify recomputes every line from the records:",
                details="records",
            ),
        ],
    )


LIBRARIES = ("torch", "deepspeed")


def scope_section(comparison: Comparison, question: ReportFocus) -> Section | None:
    """What ran and where, and whether its figures can be trusted; None without runs."""
    if not comparison.rows:
        return None
    worlds = [row.record.world for row in comparison.rows]
    transports = listed(list(dict.fromkeys(world.collectives for world in worlds)))
    known = dict.fromkeys(row.record.job.training.precision for row in comparison.rows)
    precisions = listed([MEANT.get(precision, precision) for precision in known if precision is not None])
    facts = [f"{rank_words(comparison)} over {transports}", _threads(comparison)]
    facts += [job_words(comparison), precisions, _preset(worlds), _versions(comparison), _runs(comparison)]
    text = ", ".join(fact for fact in facts if fact)
    if any(row.record.on_stub for row in comparison.rows):
        text += f": {prose('outline_on_stub')}"
    elif any(world.device == "cpu" for world in worlds):
        text += f": {prose('outline_on_cpu')}"
    trust = Items(trust_lines(comparison, question))
    return Section("scope", "Scope", [Line(f"{text}.", details="machine"), trust])


def _threads(comparison: Comparison) -> str:
    """'1 thread per rank', of CPU ranks that all have as many; the reference aside."""
    groups = [group for group in comparison.groups if not group.is_reference]
    worlds = [group.record.world for group in groups if group.has_result]
    counts = {world.threads_per_rank for world in worlds}
    if len(counts) != 1 or any(world.device != "cpu" for world in worlds):
        return ""
    return f"{counted(counts.pop(), 'thread')} per rank"


def _preset(worlds: Sequence[WorldPart]) -> str:
    """'preset like-for-like'; empty where runs differ in it."""
    presets = {world.preset for world in worlds}
    return f"preset {presets.pop()}" if len(presets) == 1 else ""


def _versions(comparison: Comparison) -> str:
    """'torch 2.13.0, deepspeed 0.19.8'; of libraries that all runs had in one version."""
    found = []
    for name in LIBRARIES:
        versions = {row.record.environment.packages.get(name) for row in comparison.rows}
        if len(versions) == 1 and (version := versions.pop()):
            found.append(f"{name} {version.partition('+')[0]}")
    return ", ".join(found)


def _runs(comparison: Comparison) -> str:
    """'7 runs of each cell', '3 to 7 runs of each cell'."""
    counts = sorted({len(group.rows) for group in comparison.groups})
    if counts == [1]:
        return "one run of each cell"
    least, most = counts[0], counts[-1]
    return f"{most} runs of each cell" if least == most else f"{least} to {most} runs of each cell"


MOST_LINES = 6
MOST_WORDS_SURPRISES = 185
"""Of the section, references included."""
WORDS_OF_LINE = 35


def surprises_section(comparison: Comparison, question: ReportFocus) -> Section | None:
    """Those that bear on the question, largest effect first; None where there are none."""
    found = library_notes(comparison.comparable, question)
    if not found:
        return None
    lines = fitting(
        [_line(note) for note in found],
        most_lines=MOST_LINES, most_words=MOST_WORDS_SURPRISES, link_words=len(TITLE.split()),
    )  # fmt: skip
    rest = len(found) - len(lines)
    more = [Line(f"{counted(rest, 'smaller difference')}.", details=KEY)] if rest else []
    return Section("surprises", "What surprises here", [Items([*lines, *more])])


def _line(note: ReportNote) -> Line:
    cells = note.short_cells
    text = shortened(sentence(note), WORDS_OF_LINE - len(cells.split()))
    return Line(text, cells, KEY)


def sentence(note: ReportNote) -> str:
    """'1.5 x the textbook's bytes: ... (DeepSpeed 0.19.8, not the transport). Set ...'."""
    origin = f" ({note.origin})" if note.origin else ""
    return f"{note.what}{origin}. {note.library_note.advice}".strip()


MOST_LINES_WARNINGS = 6
MOST_WORDS_WARNINGS = 100
"""Of the section, references included."""
WORDS_OF_LINE_WARNINGS = 25
MOST_LABELS = 3


def warnings_section(comparison: Comparison, question: ReportFocus) -> Section:
    """One line for each kind, causes first; those that do not fit by name; or that there is none."""
    kinds: dict[str, list[Statement]] = {}
    for statement in statements(comparison.findings):
        kinds.setdefault(statement.id, []).append(statement)
    if not kinds:
        return Section("warnings", "Findings", [Line(no_findings(comparison), details="findings")])
    lines = fitting(
        [_warning(alike) for alike in kinds.values()],
        most_lines=MOST_LINES_WARNINGS, most_words=MOST_WORDS_WARNINGS, link_words=1,
    )  # fmt: skip
    rest = list(kinds)[len(lines) :]
    more = [Line(f"{counted(len(rest), 'other kind')}: {listed(rest)}.", details="findings")] if rest else []
    return Section("warnings", "Findings", [Items([*lines, *more])])


def _warning(alike: Sequence[Statement]) -> Line:
    """The first statement of a kind, and how many others there are."""
    first, rest = alike[0], len(alike) - 1
    where = f"{name_cells(first.cells, MOST_LABELS)}: " if first.cells else ""
    others = f" ({counted(rest, 'similar finding')})" if rest else ""
    text = shortened(f"{where}{first.text}", WORDS_OF_LINE_WARNINGS - len(others.split()))
    return Line(f"{text}{others}", first.id, "findings")


SECTIONS: tuple[Callable[[Comparison, ReportFocus], Section | None], ...] = (
    verdict_section,
    scope_section,
    choice_section,
    summary_section,
    surprises_section,
    warnings_section,
    check_section,
)
MOST_WORDS = 1350
"""Of the short report as markdown, whatever the number of cells."""
ROWS = range(MOST_ROWS, 3, -1)
"""Of the results, at most: the largest number with which the report is short enough."""
MOST_PICTURES = 4


PICTURES: dict[ReportFocus, tuple[Callable[[Comparison], Picture | None], ...]] = {
    "all": (memory_picture, volume_picture, loss_picture, throughput_picture),
    "speed": (throughput_picture, volume_picture, memory_picture),
    "memory": (memory_picture,),
    "footprint": (memory_picture, volume_picture),
    "parity": (loss_picture,),
    "scaling": (lambda c: strong_picture(strong_scaling(c)), lambda c: weak_picture(weak_scaling(c))),
}
"""At most `MOST_PICTURES` each: one with the verdict, the others after the results, none in the details."""


def short_document(
    comparison: Comparison, question: ReportFocus, details: Document, *, subject: str = ""
) -> Document:
    """The short report that answers `question`, in front of its details.

    As many rows of the results as `MOST_WORDS` leave room for.
    """
    made = {make: make(comparison, question) for make in SECTIONS}
    pictures = [p for make in PICTURES[question] if (p := make(comparison.comparable)) is not None]
    shown = {picture.key for picture in pictures}
    verdict = made[verdict_section]
    if verdict is not None:
        made[verdict_section] = replace(verdict, blocks=[*verdict.blocks, *pictures[:1]])
    without = [replace(section, blocks=_without(section.blocks, shown)) for section in details.sections]
    rest = [section for section in without if section.blocks]
    whole = Document(
        title(comparison, question, subject), [], replace(details, sections=rest), report_cells(comparison)
    )
    for most_rows in ROWS:
        results = summary_section(comparison, question, most_rows)
        if results is not None:
            made[summary_section] = replace(results, blocks=[*results.blocks, *pictures[1:]])
        whole = replace(whole, sections=[section for section in made.values() if section is not None])
        if words_of(whole) <= MOST_WORDS:
            break
    return whole


def words_of(document: Document) -> int:
    """Words of the short report as markdown, the marks of tables and alternative texts included."""
    pictures = {picture.key: picture.key for picture in document.pictures()}
    return len(render_markdown(document, pictures, "", "report.details.md").split())


def _without(blocks: Sequence[Block], keys: Collection[str]) -> list[Block]:
    """The blocks without the pictures of these keys."""
    return [
        replace(block, blocks=_without(block.blocks, keys)) if isinstance(block, Folded) else block
        for block in blocks
        if not (isinstance(block, Picture) and block.key in keys)
    ]
