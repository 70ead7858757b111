"""Writes a document that is of no records: markdown with its pictures, or one HTML page."""

from __future__ import annotations

from pathlib import Path

from harness.errors import HarnessError
from harness.files import stream_number, write_all_atomically
from harness.tell.document import Document
from harness.tell.pictures.drawing import draw
from harness.tell.report import require_writable
from harness.tell.writers.html import data_address, render_html
from harness.tell.writers.markdown import render_markdown


def write_document(document: Document, output: Path, made_by: str) -> None:
    """Write it; the format follows from the extension. Raises HarnessError if it cannot be written."""
    is_page = output.suffix.lower() in (".html", ".htm")
    require_writable(output, "html" if is_page else "md")
    images = {picture.key: draw(picture, ("svg",))["svg"] for picture in document.pictures()}
    files: dict[Path, bytes | str] = {}
    if is_page:
        files[output] = render_html(
            document, {key: data_address(svg) for key, svg in images.items()}, made_by
        )
    else:
        names = {key: output.with_suffix(f".{key}.svg").name for key in images}
        if stream_number(output) is None:
            files |= {output.parent / names[key]: svg for key, svg in images.items()}
        files[output] = render_markdown(document, names, made_by, "")
    try:
        write_all_atomically(files)
    except OSError as error:
        raise HarnessError(f"report '{error.filename}' cannot be written: {error.strerror}") from error
