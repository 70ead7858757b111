from harness.judge.comparison import Comparison
from harness.tell.document import Items, Section
from harness.tell.sections.results import KEY, surprises_all_section
from harness.tell.short.outline import MOST_LINES, WORDS_OF_LINE, surprises_section
from tests.harness.judge.library_notes.moving import moving

LABELS = ("zero1", "zero2", "zero3", "fsdp", "fsdp1", "fsdp-hybrid")


def items(section: Section | None) -> Items:
    assert section is not None
    (block,) = section.blocks
    assert isinstance(block, Items)
    return block


def test_each_line_names_cells_version_and_what_to_do_and_refers_to_all() -> None:
    first = items(surprises_section(Comparison([moving("zero1")]), "speed")).lines()[0]
    assert first.name == "zero1 on 2 ranks"
    assert first.text.startswith("1.5 x the textbook's bytes")
    assert "(DeepSpeed 0.19.8, not the transport)." in first.text
    assert first.details == KEY


def test_lines_are_few_and_short_and_the_rest_is_counted() -> None:
    records = [moving(label, accumulation_steps=3) for label in LABELS]
    comparison = Comparison(records)
    *lines, rest = items(surprises_section(comparison, "all")).lines()
    assert 0 < len(lines) <= MOST_LINES
    assert all(len(f"{line.name} {line.text}".split()) <= WORDS_OF_LINE + 1 for line in lines)
    details = surprises_all_section(comparison)
    assert details is not None
    table = details.blocks[1]
    assert rest.text == f"{len(table.rows) - len(lines)} smaller differences."  # type: ignore[union-attr]


def test_a_question_about_memory_gets_no_bytes_on_a_wire() -> None:
    assert surprises_section(Comparison([moving("zero1")]), "memory") is None


def test_nothing_is_shown_where_nothing_differs() -> None:
    comparison = Comparison([moving("ddp")])
    assert surprises_section(comparison, "all") is None
    assert surprises_all_section(comparison) is None
