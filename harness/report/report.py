"""Writes the report of a set of records. The same records give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.compare.rows import make_rows
from harness.record import Record
from harness.report.contents import comparison
from harness.report.drawing import draw
from harness.report.sections.records import records_section
from harness.report.writers.markdown import render_markdown


def write_report(runs: Sequence[tuple[Path, Record]], output: Path) -> Path:
    """Write the report and its pictures beside it; return the report's path."""
    output.parent.mkdir(parents=True, exist_ok=True)
    document = comparison(make_rows(record for _, record in runs), records_section(runs, output.parent))
    names = {}
    for picture in document.pictures():
        for form, image in draw(picture).items():
            output.with_suffix(f".{picture.key}.{form}").write_bytes(image)
        names[picture.key] = output.with_suffix(f".{picture.key}.svg").name
    output.write_text(render_markdown(document, names), encoding="utf-8")
    return output
