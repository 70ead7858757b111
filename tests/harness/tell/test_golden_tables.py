"""The tables as CSV, HTML and LaTeX, word for word; that of markdown is in test_markdown.py."""

import re
from pathlib import Path

import pytest

from harness.judge.comparison import Comparison
from harness.tell.document import Document
from harness.tell.report import details_document
from harness.tell.writers.data import MANIFEST, render_csv
from harness.tell.writers.html import render_html
from harness.tell.writers.latex import render_latex
from tests.harness.tell.test_markdown import fixed_records

GOLDEN = Path(__file__).parent.parent.parent / "golden"
HTML_TABLE = re.compile(r'<div class="table">.*?</div>', flags=re.DOTALL)
LATEX_TABLE = re.compile(r"\\begin\{adjustbox\}.*?\\end\{adjustbox\}", flags=re.DOTALL)


def tables(document: Document, form: str) -> list[str]:
    """Each table as the writer of a format puts it."""
    pictures = {picture.key: "picture" for picture in document.pictures()}
    match form:
        case "html":
            return HTML_TABLE.findall(render_html(document, pictures, "manifest"))
        case "tex":
            return LATEX_TABLE.findall(render_latex(document, pictures, "manifest"))
        case _:
            main, others = render_csv(document, "manifest")
            return [main, *(text for key, text in others.items() if key != MANIFEST)]


@pytest.mark.parametrize("form", ["csv", "html", "tex"])
def test_tables_are_the_golden_ones(form: str, update_golden: bool) -> None:
    document = details_document(Comparison(fixed_records()))
    found = tables(document, form)
    assert len(found) == len(document.tables())
    golden = GOLDEN / f"tables.{form}"
    text = "\n".join(table.rstrip() + "\n" for table in found)
    if update_golden:
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
