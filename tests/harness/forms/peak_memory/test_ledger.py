"""The ledger keeps the fullest state of each phase."""

from __future__ import annotations

from harness.forms.peak_memory.step import BELOW, Ledger
from harness.forms.terms import Term

WEIGHTS = Term(kind="weights", name="weights")
BUFFER = Term(kind="communication", name="buffer")


def test_the_fullest_state_of_a_phase_names_its_causes() -> None:
    ledger = Ledger()
    ledger.add(WEIGHTS, 10)
    ledger.compute(5)
    ledger.briefly((BUFFER, 7))
    ledger.look()
    assert ledger.moments()["forward"].bytes == 22
    assert ledger.moments()["forward"].held == {WEIGHTS: 10, BUFFER: 7, BELOW: 5}
    assert ledger.held == {WEIGHTS: 10, BUFFER: 0}


def test_phases_are_kept_apart() -> None:
    ledger = Ledger()
    ledger.add(WEIGHTS, 10)
    ledger.look()
    with ledger.during("reduction"):
        ledger.briefly((BUFFER, 1))
    assert (ledger.moments()["forward"].bytes, ledger.moments()["reduction"].bytes) == (10, 11)
    assert ledger.phase == "forward"


def test_each_stream_keeps_what_it_once_needed() -> None:
    ledger, elsewhere = Ledger(), Term(kind="gradients", name="reduced", stream="reduce-scatter")
    ledger.compute(50)
    ledger.look()
    ledger.compute(0)
    ledger.briefly((elsewhere, 20))
    ledger.add(elsewhere, 10)
    ledger.look()
    ledger.drop(elsewhere)
    assert ledger.moments()["forward"].bytes == 50
    assert ledger.moments()["forward"].reserved == 70
