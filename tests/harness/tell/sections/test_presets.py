from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.document import Paragraph, Table
from harness.tell.sections.job import presets_section
from tests.records import make_record


def run(label: str) -> Record:
    return make_record(label=label)


def test_a_change_stands_once_with_all_its_backends() -> None:
    section = presets_section(Comparison([make_record(), run("zero1"), run("zero2"), run("ddp")]))
    assert section is not None
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    backends = {line[0]: line[-1] for line in table.texts()}
    assert backends["reduce_bucket_size"] == "zero1; zero2"
    assert backends["gradient_as_bucket_view"] == "ddp"


def test_a_row_under_another_preset_is_named_and_changes_nothing() -> None:
    own = run("zero3:preset=library-defaults")
    section = presets_section(Comparison([make_record(), run("zero3"), own]))
    assert section is not None
    first, *_, table = section.blocks
    assert isinstance(first, Paragraph)
    assert isinstance(table, Table)
    start = "Preset: like-for-like; library-defaults for zero3:preset=library-defaults."
    assert str(first.text).startswith(start)
    assert {line[-1] for line in table.texts()} == {"zero3"}


def test_without_changes_the_library_defaults_are_said_to_be_kept() -> None:
    section = presets_section(Comparison([run("zero3:preset=library-defaults")]))
    assert section is not None
    (only,) = section.blocks
    assert isinstance(only, Paragraph)
    assert str(only.text) == (
        "Preset: library-defaults for zero3:preset=library-defaults. library-defaults keeps a library's "
        "settings, except those that change the mathematics."
    )
