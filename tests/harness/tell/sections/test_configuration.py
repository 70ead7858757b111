from harness.judge.comparison import Comparison
from harness.tell.document import Code, Folded, Paragraph
from harness.tell.sections.job import configuration_section, difference
from tests.records import make_record


def test_difference_is_nested_and_names_what_is_gone() -> None:
    whole = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    assert difference({"a": 1, "b": {"c": 5, "d": 3}, "f": 6}, whole) == {"b": {"c": 5}, "f": 6, "e": None}
    assert difference(whole, whole) == {}


def test_a_backend_is_told_once_and_other_sizes_by_what_differs() -> None:
    two, four, eight = (make_record(label="ddp", world_size=size) for size in (2, 4, 8))
    backend = four.backend.model_copy(update={"native_config": {"buckets": 4}})
    four = four.model_copy(update={"backend": backend})
    section = configuration_section(Comparison([two, four, eight]))
    assert section is not None
    (folded,) = section.blocks
    assert isinstance(folded, Folded)
    assert folded.title == "ddp, 2 ranks, 4 ranks, 8 ranks"
    whole, *rest = folded.blocks
    assert isinstance(whole, Code)
    assert "effective" in whole.text
    assert rest == [
        Paragraph("ddp on 4 ranks: as ddp on 2 ranks, but for"),
        Code("yaml", "native_config:\n  buckets: 4\n"),
        Paragraph("ddp on 8 ranks: as ddp on 2 ranks."),
    ]
