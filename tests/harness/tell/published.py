"""Runs that a report is written of, and what tests of `verify` do to it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness.record import Record
from harness.record.store import write_record
from harness.tell.verify import Verification
from tests.records import LOSSES, make_record, make_steps, make_weights

Runs = list[tuple[Path, Record]]


def write_runs(folder: Path, slower: float = 0.0) -> Runs:
    """Three repeats of two backends and a reference."""
    records = [make_record()]
    for label, seconds in (("ddp", 0.5), ("fsdp", 0.6)):
        records += [
            make_record(
                label=label, repeat=n, run_id=f"run-{label}-{n}",
                steps=make_steps([loss + 1e-6 for loss in LOSSES], seconds=seconds + n / 100 + slower),
                final_weights=make_weights("c" * 64),
            )
            for n in range(3)
        ]  # fmt: skip
    runs = []
    for record in records:
        directory = folder / "runs" / record.run_id
        directory.mkdir(parents=True)
        runs.append((write_record(directory, record), record))
    return runs


def edit(path: Path, old: str, new: str) -> int:
    """Replace the first occurrence; returns the number of its line."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return text[: text.index(old)].count("\n") + 1


def point_to_the_list(folder: Path) -> int:
    """Have report.md name the digest of its list of records as it is now; returns the number of its line."""
    digest = hashlib.sha256((folder / "report.manifest.json").read_bytes()).hexdigest()
    text = (folder / "report.md").read_text(encoding="utf-8")
    given = text.rpartition('"sha256":"')[2].partition('"')[0]
    return edit(folder / "report.md", given, digest)


def found(result: Verification) -> list[str]:
    return [str(problem) for problem in result.problems]


def line_of_picture(folder: Path, key: str, name: str = "report.md") -> str:
    """Where a report shows a picture: 'report.md, line 7'."""
    shown = {"report.md": f"](report.{key}.svg)", "report.tex": f"{{report.{key}.png}}"}[name]
    lines = (folder / name).read_text(encoding="utf-8").split("\n")
    (number,) = [number for number, line in enumerate(lines, 1) if shown in line]
    return f"{name}, line {number}"
