"""A page with tables made from records that are packed next to it: run, pack, and write between marks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tabulate import tabulate

from harness.judge.quantities import volume_differences
from harness.record import Record
from harness.record.store import ARCHIVE_NAME, RECORD_NAME, read_runs, write_archive

DOCS = Path(__file__).resolve().parents[1] / "docs"
END = "<!-- end of runs -->"


def archive_of_page(name: str) -> Path:
    """Where the records of a table lie."""
    return DOCS / name / ARCHIVE_NAME


def packed(name: str, labels: Collection[str]) -> dict[str, Record]:
    """The records of a table by label, in the order of `labels`."""
    found = {record.backend.label: record for _, record in read_runs([archive_of_page(name)])[0]}
    return {label: found[label] for label in labels}


def with_tables(page: str, module: str, tables: Sequence[str]) -> str:
    """The page with its tables between its marks."""
    return between(page, f"<!-- runs: python -m {module} -->", END, "\n\n".join(tables))


def between(page: str, begin: str, end: str, text: str) -> str:
    """The page with `text` between two marks that it has."""
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    assert found, begin
    assert closed, end
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def table(body: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    return tabulate(body, headers=headers, tablefmt="pipe", disable_numparse=True)


def run(folder: Path, name: str, labels: Collection[str], ranks: int, settings: Sequence[str]) -> None:
    """Run one comparison and pack its records.

    Exits where a run failed, or moved other bytes than its closed form says.
    """
    sets = [part for setting in settings for part in ("--set", setting)]
    words = ["compare", "--backends", ",".join(labels), "--nproc", str(ranks), "--runs", str(folder), *sets]
    subprocess.run([sys.executable, "-m", "harness", *words], check=True)
    files: dict[str, bytes] = {}
    for path, record in read_runs([folder])[0]:
        label = record.backend.label
        if record.status not in ("ok", "unsupported") or volume_differences(record):
            raise SystemExit(f"{label}: {record.status}, or bytes differ from their closed form")
        if label in labels:
            text = path.read_text(encoding="utf-8").replace(str(folder), "runs")
            text = text.replace(tempfile.gettempdir(), "/tmp")
            files[f"{record.run_id}/{RECORD_NAME}"] = text.encode()
    archive_of_page(name).parent.mkdir(exist_ok=True)
    write_archive(archive_of_page(name), files, folder="runs")


def write(page: Path, runs: Callable[[Path], None], page_of: Callable[[str], str]) -> None:
    """Run if the command names a folder, then write the page."""
    if len(sys.argv) > 1:
        runs(Path(sys.argv[1]))
    page.write_text(page_of(page.read_text(encoding="utf-8")), encoding="utf-8")
