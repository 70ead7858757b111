from harness.judge.comparison import Comparison
from harness.tell.document import Items, Line
from harness.tell.short.outline import MOST_LINES_WARNINGS as MOST_LINES
from harness.tell.short.outline import WORDS_OF_LINE_WARNINGS as WORDS_OF_LINE
from harness.tell.short.outline import warnings_section
from tests.records import LOSSES, make_record, make_steps, make_weights


def agreeing(label: str) -> Comparison:
    return Comparison([make_record(), make_record(label=label, final_weights=make_weights("c" * 64))])


def test_no_finding_is_one_plain_line() -> None:
    (line,) = warnings_section(agreeing("ddp"), "all").blocks
    assert isinstance(line, Line)
    assert line.text == "None: every judged run trained the same job as its reference and agrees with it."
    assert line.details == "findings"


def test_each_kind_has_one_short_line_and_tells_how_many_others_there_are() -> None:
    worse = [
        make_record(
            label=label, steps=make_steps([loss + size for loss in LOSSES]),
            final_weights=make_weights("c" * 64),
        )
        for size, label in enumerate(("zero0", "zero1", "ddp"), start=1)
    ]  # fmt: skip
    (block,) = warnings_section(Comparison([make_record(), *worse]), "all").blocks
    assert isinstance(block, Items)
    lines = block.lines()
    names = [line.name for line in lines if line.name]
    assert len(names) == len(set(names)) <= MOST_LINES
    assert any(line.text.endswith("(2 similar findings)") for line in lines)
    assert all(len(line.text.split()) <= WORDS_OF_LINE + 1 for line in lines)
