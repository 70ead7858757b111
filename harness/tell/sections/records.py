"""The records that the report was computed from."""

from __future__ import annotations

from pathlib import PurePosixPath

from harness.judge.comparison import Comparison
from harness.judge.ranking import EQUAL
from harness.judge.statistics import LEAST_FOR_P95, LEVEL, interval_runs
from harness.record.record_files import RECORD_NAME
from harness.tell.document import Block, Column, Items, Paragraph, Section, Shown, Table
from harness.tell.formats import percent
from harness.tell.manifest import Manifest, RecordEntry
from harness.tell.tables import NO_TEXT, of_no_text, prose, table_columns

COLUMNS = table_columns("records")
SIDE = Column("side", "side", align="left")


def records_section(manifest: Manifest) -> Section:
    """Each record's path and digest, once, and what was left out."""
    sides = manifest.kind == "baseline"
    body = [
        [*(["before" if entry.before else "after"] if sides else []),
         Shown(entry.path, _short(entry)), entry.status, entry.sha256]
        for entry in manifest.records
    ]  # fmt: skip
    columns = (SIDE, *COLUMNS) if sides else COLUMNS
    short = sorted({_folder(entry) for entry in manifest.records if _is_named_after_its_run(entry)})
    where = f" A record named by its run alone is {' or '.join(f'{f}/RUN/{RECORD_NAME}' for f in short)}."
    blocks: list[Block] = [
        Paragraph(
            f"Written by sharding-harness {manifest.harness}, pictures by {manifest.drawing}. "
            "harness verify recomputes this file from these records and lists every line that differs. Paths "
            "are relative to the folder of this file; its manifest, which harness verify reads, "
            "holds them and the digests in full. Digests show that these are the records it was computed "
            f"from; that they are what was measured, only another run can show.{where if short else ''}"
        ),
        Table(key="records", columns=columns, rows=body),
    ]
    if manifest.left_out:
        count = len(manifest.left_out)
        what = "1 other record lies" if count == 1 else f"{count} other records lie"
        blocks.append(Paragraph(f"{what} in the same folder, not part of this report."))
    return Section("records", "Records", blocks)


def _short(entry: RecordEntry) -> str:
    return entry.run_id if _is_named_after_its_run(entry) else entry.path


def _is_named_after_its_run(entry: RecordEntry) -> bool:
    return entry.path == f"{_folder(entry)}/{entry.run_id}/{RECORD_NAME}"


def _folder(entry: RecordEntry) -> str:
    return PurePosixPath(entry.path).parent.parent.as_posix()


TITLE = "How to read the numbers"


def reading_section(comparison: Comparison) -> Section:
    """Definitions and formulae of the columns."""
    unit = [f"{NO_TEXT}."] if of_no_text(comparison) else []
    turns = [BY_TURN] if any(row.record.turns for row in comparison.rows) else []
    return Section("reading", TITLE, [Items([*_COMMON[:1], *unit, *_SPEEDS, *turns, *_COMMON[1:]])])


def reading_without_speeds(comparison: Comparison) -> Section:
    """The same for a report without figures of speed."""
    return Section("reading", TITLE, [Items(_COMMON)])


BY_TURN = prose("records_by_turn")
_SPEEDS = prose(
    "records_speeds",
    least_for_p95=LEAST_FOR_P95,
    rounds=interval_runs(),
    level=percent(LEVEL),
    equal=percent(EQUAL),
    chance=percent(1 - LEVEL),
).split("\n")
_COMMON = prose("records_common").split("\n")
