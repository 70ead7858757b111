from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding, statements
from harness.judge.wording import CellName, name_cells
from tests.records import NORMS, make_record, make_steps, make_weights


def finding(kind: str, label: str, text: str, size: int = 2) -> Finding:
    return Finding(id=kind, about=CellName(label, size), text=text)


def test_what_is_said_alike_of_several_cells_is_said_once() -> None:
    found = [
        finding("clipping-differs", "zero1", "gradient clipping differs: 1 against none"),
        finding("clipping-differs", "zero2:offload=cpu", "gradient clipping differs: 1 against none"),
        finding("clipping-differs", "zero1", "gradient clipping differs: 1 against none", size=4),
        finding("clipping-differs", "zero3", "gradient clipping differs: 2 against none"),
    ]
    assert [statement.sentence for statement in statements(found)] == [
        "zero1 on 2 and 4 ranks; zero2:offload=cpu on 2 ranks: gradient clipping differs: 1 against none",
        "zero3 on 2 ranks: gradient clipping differs: 2 against none",
    ]


def test_repeats_of_a_cell_are_one_subject() -> None:
    found = [finding("clipping-differs", "zero1", "clips")] * 3
    assert [statement.cells for statement in statements(found)] == [(CellName("zero1", 2),)]


def test_causes_come_before_what_follows_and_figures_last() -> None:
    found = [
        finding("slow-data", "ddp", "40% of the step goes into fetching batches"),
        finding("diverged", "zero1", "leaves the reference"),
        finding("update-differs", "zero1", "the update differs"),
        finding("clipping-differs", "zero1", "gradient clipping differs"),
    ]
    assert [(s.id, s.role) for s in statements(found)] == [
        ("clipping-differs", "cause"),
        ("update-differs", "consequence"),
        ("diverged", "consequence"),
        ("slow-data", "figures"),
    ]


def test_divergence_names_its_cause_first() -> None:
    steps = make_steps(norms=[norm * 2 for norm in NORMS])
    other = make_record(label="zero1", steps=steps, final_weights=make_weights("c" * 64))
    assert [s.id for s in statements(Comparison([make_record(), other]).findings)] == [
        "gradient-scale",
        "diverged",
    ]


def test_a_message_about_the_whole_table_keeps_its_colons() -> None:
    several = Finding(id="several-jobs", about=("ddp",), text="not the same job: a: 1 / 2")
    (statement,) = statements([several])
    assert (statement.cells, statement.sentence) == ((), "not the same job: a: 1 / 2")
    assert statement.reference == "docs/findings.md#several-jobs"


def test_cells_are_told_by_their_number_of_ranks() -> None:
    assert name_cells([CellName("single", 1), CellName("a", 2), CellName("b", 2)]) == (
        "single on 1 rank; a and b on 2 ranks"
    )
    assert (
        name_cells([CellName("a", 1), CellName("b", 1), CellName("a", 4), CellName("b", 4)])
        == "a and b on 1 and 4 ranks"
    )


def test_every_number_of_ranks_is_told_once_and_in_order() -> None:
    sizes = [64, 2, 4, 8, 16, 32, 1, 2]
    cells = [CellName("ddp", size) for size in sizes]
    assert name_cells(cells) == "ddp on 1, 2, 4, 8, 16, 32 and 64 ranks"
    backwards = [CellName("a", 1), CellName("a", 2), CellName("b", 2), CellName("b", 1)]
    assert name_cells(backwards) == "a and b on 1 and 2 ranks"


def test_what_is_no_cell_is_not_lost_among_cells() -> None:
    assert name_cells([CellName("ddp", 1), ("ddp",)]) == "ddp; ddp on 1 rank"


def test_of_many_cells_as_many_are_named_as_asked_for() -> None:
    cells = [CellName(name, 2) for name in "abcd"]
    assert name_cells(cells, most=3) == "a, b and 2 more on 2 ranks"
    assert name_cells(cells) == "a, b, c and d on 2 ranks"
