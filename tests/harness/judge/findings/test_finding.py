"""The published reports that explain a difference: what the code of today says of their records."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import findings_page
from harness.backends.libraries.facts import fact
from harness.judge import wording
from harness.judge.agreement.causes import HYPOTHESES
from harness.judge.comparison import Comparison
from harness.judge.effective import SETTINGS
from harness.judge.findings.finding import PARTS, ROLES, Finding, Statement, of_cells, role_of, statements
from harness.judge.rows import JudgedRun
from harness.judge.wording import CellName, entries, name_cells
from tests.records import (
    make_record,
    make_weights,
    published_comparison,
)

JUDGE = Path(__file__).resolve().parents[4] / "harness" / "judge"


def test_the_page_is_written_from_the_catalogue(update_golden: bool) -> None:
    if update_golden:
        findings_page.write()
    assert findings_page.PAGE.read_text(encoding="utf-8") == findings_page.page()
    assert findings_page.LIST.read_text(encoding="utf-8") == findings_page.hypotheses()


def test_the_catalogue_has_what_the_modules_find_and_nothing_else() -> None:
    nodes = [node for path in JUDGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    made = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "found"]
    ids = {call.args[0].value for call in made if isinstance(call.args[0], ast.Constant)}
    assert len(ids) > 40
    words |= {setting.finding for setting in SETTINGS if setting.finding} | {one.kind for one in HYPOTHESES}
    assert ids <= entries().keys() <= words


@pytest.mark.parametrize("kind", entries())
def test_every_kind_has_a_role_a_sentence_and_says_cause_confirmation_and_remedy(kind: str) -> None:
    entry = entries()[kind]
    assert all(entry[part] for part in PARTS if part != "reported")
    assert not entry["title"].endswith(".")
    assert role_of(kind) in ROLES
    texts = entry["text"] if isinstance(entry["text"], dict) else {"": entry["text"]}
    for case in texts:
        wording._environment().get_template(f"{kind}/{case}")


def test_the_version_that_clips_is_that_of_the_table() -> None:
    cause = entries()["clipping-differs"]["cause"]
    assert f"DeepSpeed {fact('zero-clips-by-default').first} and later" in cause


def test_another_job_is_a_finding_with_both_values() -> None:
    other = make_record(label="ddp", initial_weights=make_weights("d" * 64))
    (found,) = Comparison([make_record(), other]).findings
    assert found.id == "initial-weights-differ"
    assert "initial weights" in found.message
    assert found.values == {"reference": "a" * 64, "given": "d" * 64}


def test_different_micro_batches_on_one_world_are_a_finding() -> None:
    cut = {"micro_batch_size": 2, "accumulation_steps": 2}
    other = make_record(label="zero1", world=cut, effective={"accumulation_steps": 2})
    (found,) = Comparison([make_record(), make_record(label="ddp"), other]).findings
    assert found.id == "micro-batch-differs"
    assert found.values == {"4 x 1": ["ddp"], "2 x 2": ["zero1"]}


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
        ("clipping-differs", "cause"), ("update-differs", "consequence"), ("diverged", "consequence"),
        ("slow-data", "figures"),
    ]  # fmt: skip


def test_a_message_about_the_whole_table_keeps_its_colons() -> None:
    several = Finding(id="several-jobs", about=("ddp",), text="not the same job: a: 1 / 2")
    (statement,) = statements([several])
    assert (statement.cells, statement.sentence) == ((), "not the same job: a: 1 / 2")
    assert statement.reference == "docs/findings.md#several-jobs"


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ([("single", 1), ("a", 2), ("b", 2)], "single on 1 rank; a and b on 2 ranks"),
        ([("a", 1), ("b", 1), ("a", 4), ("b", 4)], "a and b on 1 and 4 ranks"),
        ([("ddp", n) for n in (64, 2, 4, 8, 16, 32, 1, 2)], "ddp on 1, 2, 4, 8, 16, 32 and 64 ranks"),
        ([("a", 1), ("a", 2), ("b", 2), ("b", 1)], "a and b on 1 and 2 ranks"),
    ],
)
def test_cells_are_told_by_their_numbers_of_ranks(cells: list[tuple[str, int]], told: str) -> None:
    assert name_cells([CellName(*cell) for cell in cells]) == told


def test_what_is_no_cell_is_not_lost_among_cells() -> None:
    assert name_cells([CellName("ddp", 1), ("ddp",)]) == "ddp; ddp on 1 rank"


def test_of_many_cells_as_many_are_named_as_asked_for() -> None:
    cells = [CellName(name, 2) for name in "abcd"]
    assert name_cells(cells, most=3) == "a, b and 2 more on 2 ranks"
    assert name_cells(cells) == "a, b, c and d on 2 ranks"


def judge(row: JudgedRun) -> Iterator[Finding]:
    if row.record.repeat < 2:
        text = f"rank {row.record.repeat} waits"
        yield Finding(id="slow-rank", about=CellName.of(row.record), text=text)


def test_what_not_all_repeats_say_is_told_with_their_number() -> None:
    comparison = Comparison([make_record(label="ddp", repeat=repeat) for repeat in range(3)])
    assert [finding.message for finding in of_cells(comparison, judge)] == [
        "ddp on 2 ranks: rank 0 waits; in 1 of 3 runs",
        "ddp on 2 ranks: rank 1 waits; in 1 of 3 runs",
    ]


def test_what_every_repeat_says_is_told_plainly() -> None:
    comparison = Comparison([make_record(label="ddp")])
    assert [finding.message for finding in of_cells(comparison, judge)] == ["ddp on 2 ranks: rank 0 waits"]


def said(name: str) -> list[Statement]:
    """What is said of the training; figures of speed and memory are no question of these reports."""
    return [told for told in statements(published_comparison(name).findings) if told.role != "figures"]


def test_missing_masters_are_named_before_the_updates_that_vanish() -> None:
    told = said("explain-master-weights")
    assert [statement.id for statement in told] == [
        "master-dtype-differs", "master-dtype-differs", "lost-updates", "update-differs", "diverged",
    ]  # fmt: skip
    assert [statement.text for statement in told[:2]] == [
        "dtype of masters differs: bfloat16 against float32 in the reference",
        "dtype of optimizer states differs: bfloat16 against float32 in the reference",
    ]
    assert {statement.cells for statement in told} == {(CellName("fsdp:master_dtype=compute", 2),)}


@pytest.mark.parametrize("name", ["explain-clipping", "explain-master-weights"])
def test_the_other_backends_of_the_job_agree(name: str) -> None:
    blamed = {cell for statement in said(name) for cell in statement.cells}
    sound = [row for row in published_comparison(name).rows if row.cell not in blamed]
    assert {row.judgement.parity for row in sound} <= {"exact", "tight", "band"}
    assert {"ddp", "zero1", "zero3", "fsdp"} & {row.record.backend.label for row in sound}
