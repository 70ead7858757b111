"""The table of errors in docs/planning.md is what the evidence comes to."""

from pathlib import Path

from benchmarks.errors_table import BEGIN, END, with_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


def test_the_page_has_the_table_of_the_published_evidence() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert with_table(page) == page
