"""Packs a comparison for somebody else: report, records, predictions, traces and snapshots, without names."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.doctor.gpu.anonymous import nameless_document
from harness.errors import HarnessError
from harness.judge.comparison import Comparison
from harness.judge.measures import median_step_seconds, peak_bytes, predicted_peak_bytes
from harness.record import Record
from harness.record.record_files import ARCHIVE_NAME, RECORD_NAME
from harness.record.run_id import as_name
from harness.record.store import archive_runs, read_runs, record_text
from harness.snapshots.account import accounts
from harness.snapshots.reading import read_snapshot
from harness.tell.document import Document
from harness.tell.loose import write_document
from harness.tell.narrow import fitted
from harness.tell.report import write_report
from harness.tell.snapshots import snapshot_document
from harness.tell.terminal import finding_lines, terminal_table
from harness.tell.traces import trace_document
from harness.traces.analysis import read_traces
from harness.traces.skew import skew_of
from harness.traces.strategy import likeness_of

MOST_RAW_BYTES = 2**24
"""Of the traces and snapshots themselves in a comparison, the smallest files first."""
RAW = "raw"
"""Folder of what a reader needs only to look closer."""
NOT_MEASURED = "-"
Runs = Sequence[tuple[Path, Record]]


def pack_matrix(runs: Runs, folder: Path, predicted: dict[str, Any] | str) -> list[str]:
    """Write what a comparison found into a new folder; returns the lines that a person reads of it."""
    (folder / RAW).mkdir(parents=True)
    with tempfile.TemporaryDirectory() as place:
        for _, record in runs:
            own = Path(place, record.run_id, RECORD_NAME)
            own.parent.mkdir()
            own.write_text(json.dumps(nameless_document(json.loads(record_text(record)))), encoding="utf-8")
        named, problems = read_runs([Path(place)])
        packed = archive_runs(named, folder / ARCHIVE_NAME)
    write_report(packed, folder / "report.md", folders=[folder / ARCHIVE_NAME])
    for path, record in runs:
        for kind, tell in TELLERS.items():
            files = [path.parent / part.path for part in record.artifacts if part.kind == kind]
            if files:
                output = folder / f"{_name(record)}.{as_name(kind)}.md"
                problems += _tried(partial(_write, tell, files, output))
    problems += _pack_raw(runs, folder / RAW)
    comparison = Comparison(record for _, record in packed)
    rows = beside([record for _, record in packed], predicted)
    (folder / "predictions.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return [terminal_table(comparison), *finding_lines(comparison), "", *_table(rows, predicted), *problems]


def beside(records: Sequence[Record], predicted: dict[str, Any] | str) -> list[dict[str, Any]]:
    """Memory and time of each strategy as predicted and as measured; None: n/a."""
    rows = predicted["rows"] if isinstance(predicted, dict) else []
    estimates = {(row["backend"], row["world_size"]): row for row in rows}
    found = []
    for record in records:
        label, ranks = record.backend.label, record.world.world_size
        found.append({
            "backend": label,
            "ranks": ranks,
            "status": record.status,
            "predicted_peak_bytes": predicted_peak_bytes(record),
            "peak_bytes": max(peak_bytes(record), default=None),
            "predicted_step_seconds": estimates.get((label, ranks), {}).get("step_seconds"),
            "step_seconds": median_step_seconds(record),
        })  # fmt: skip
    return found


def _table(rows: Sequence[dict[str, Any]], predicted: dict[str, Any] | str) -> list[str]:
    def of(row: dict[str, Any], key: str, scale: float) -> str:
        return NOT_MEASURED if row[key] is None else f"{row[key] * scale:,.4g}"

    figures = (
        ("predicted_peak_bytes", 2**-30), ("peak_bytes", 2**-30), ("predicted_step_seconds", 1e3),
        ("step_seconds", 1e3),
    )  # fmt: skip
    cells = [
        (row["backend"], str(row["ranks"]), row["status"], *(of(row, *figure) for figure in figures))
        for row in rows
    ]
    titles = ("backend", "ranks", "status", "predicted peak GiB", "peak GiB", "predicted step ms", "step ms")
    why = [f"no time was predicted: {predicted}"] if isinstance(predicted, str) else []
    return [*fitted(cells, titles).splitlines(), *why]


def _told_traces(files: Sequence[Path]) -> Document:
    ranks = read_traces(files)
    return trace_document(ranks, skew_of(ranks), [likeness_of(rank) for rank in ranks])


def _told_snapshots(files: Sequence[Path]) -> Document:
    return snapshot_document([(file.name, accounts(read_snapshot(file))) for file in files])


TELLERS: dict[str, Callable[[Sequence[Path]], Document]] = {
    "trace": _told_traces, "memory snapshot": _told_snapshots,
}  # fmt: skip
"""What reads the files that ranks leave next to their records, by kind."""


def _write(tell: Callable[[Sequence[Path]], Document], files: Sequence[Path], output: Path) -> None:
    write_document(tell(files), output, "harness doctor")


def _pack_raw(runs: Runs, folder: Path) -> list[str]:
    """Copy traces and snapshots without names as far as there is room; a line for those left out."""
    files = [
        (path.parent / part.path, f"{_name(record)}-{part.path}")
        for path, record in runs
        for part in record.artifacts
        if part.kind in TELLERS
    ]
    left, problems, omitted = MOST_RAW_BYTES, list[str](), 0
    for file, name in sorted(files, key=lambda found: found[0].stat().st_size):
        left -= file.stat().st_size
        if left < 0:
            omitted += 1
        else:
            problems += _tried(partial(_copy, file, folder / name))
    return [*problems, *([f"{omitted} traces and snapshots are too large for the bundle"] if omitted else [])]


def _copy(file: Path, output: Path) -> None:
    if output.suffix == ".gz":
        document = nameless_document(json.loads(gzip.decompress(file.read_bytes())))
        output.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
    else:
        document = nameless_document(read_snapshot(file))
        output.with_suffix(".json").write_text(json.dumps(document), encoding="utf-8")


def _tried(write: Callable[[], None]) -> list[str]:
    """What went wrong: one file that cannot be read costs no other."""
    try:
        write()
    except (HarnessError, OSError, ValueError, EOFError) as error:
        return [f"not packed: {error}"]
    return []


def _name(record: Record) -> str:
    return as_name(f"{record.backend.label}-{record.world.world_size}-{record.repeat}")
