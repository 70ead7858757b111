"""The published reports that explain a difference: what the code of today says of their records."""

import pytest

from harness.forms.terms import STATE_KINDS
from harness.judge.findings.finding import Statement, statements
from harness.judge.quantities import rank_states
from harness.judge.wording import CellName
from tests.records import published_comparison


def said(name: str) -> list[Statement]:
    """What is said of the training; figures of speed and memory are no question of these reports."""
    return [told for told in statements(published_comparison(name).findings) if told.role != "figures"]


def test_a_default_clipping_is_named_before_what_follows_from_it() -> None:
    first, *others = said("explain-clipping")
    assert (first.id, first.role) == ("clipping-differs", "cause")
    assert first.sentence == (
        "zero1:default_clipping=True on 2 ranks: gradient clipping differs: 1 against none in the reference"
    )
    assert {statement.id: statement.role for statement in others} == {
        "update-differs": "consequence",
        "diverged": "consequence",
    }
    assert {cell for statement in others for cell in statement.cells} == set(first.cells)


def test_missing_masters_are_named_before_the_updates_that_vanish() -> None:
    told = said("explain-master-weights")
    assert [statement.id for statement in told] == [
        "master-dtype-differs",
        "master-dtype-differs",
        "lost-updates",
        "update-differs",
        "diverged",
    ]
    assert [statement.text for statement in told[:2]] == [
        "dtype of masters differs: bfloat16 against float32 in the reference",
        "dtype of optimizer states differs: bfloat16 against float32 in the reference",
    ]
    assert {statement.cells for statement in told} == {(CellName("fsdp:master_dtype=compute", 2),)}


def test_states_without_masters_are_their_closed_form_to_the_byte() -> None:
    records = [row.record for row in published_comparison("explain-master-weights").rows]
    (record,) = (r for r in records if r.backend.label == "fsdp:master_dtype=compute")
    held = rank_states(record)
    assert len(held) == 2
    for states in held:
        assert states.expected is not None
        expected = states.expected.kinds()
        off = {kind: states.measured.get(kind, 0) - expected.get(kind, 0) for kind in STATE_KINDS}
        assert set(off.values()) == {0}, off


@pytest.mark.parametrize("name", ["explain-clipping", "explain-master-weights"])
def test_the_other_backends_of_the_job_agree(name: str) -> None:
    blamed = {cell for statement in said(name) for cell in statement.cells}
    sound = [row for row in published_comparison(name).rows if row.cell not in blamed]
    assert {row.judgement.parity for row in sound} <= {"exact", "tight", "band"}
    assert {"ddp", "zero1", "zero3", "fsdp"} & {row.record.backend.label for row in sound}
