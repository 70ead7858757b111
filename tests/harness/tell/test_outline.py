from harness.judge.comparison import Comparison
from harness.tell.document import Document, Folded, Table
from harness.tell.report import LONGEST_OPEN_TABLE, details_document
from harness.tell.writers.html import render_html
from tests.records import make_record


def document(cells: int) -> Document:
    return details_document(Comparison([make_record(label=f"ddp:cell={number}") for number in range(cells)]))


def open_tables(of: Document) -> set[str]:
    return {block.key for section in of.sections for block in section.blocks if isinstance(block, Table)}


def test_a_long_table_stands_behind_its_name_and_length_the_results_never() -> None:
    short, long = document(LONGEST_OPEN_TABLE), document(LONGEST_OPEN_TABLE + 1)
    assert {"results", "memory_after_backward"} <= open_tables(short)
    assert "results" in open_tables(long)
    assert "memory_after_backward" not in open_tables(long)
    titles = [
        block.title for section in long.sections for block in section.blocks if isinstance(block, Folded)
    ]
    assert "Memory after backward: 31 lines" in titles


def test_html_begins_with_a_link_to_each_section() -> None:
    of = document(2)
    text = render_html(of, {picture.key: "data:," for picture in of.pictures()}, "manifest")
    for section in of.sections:
        assert text.index(f'<a href="#{section.key}">') < text.index(f'<section id="{section.key}">')
