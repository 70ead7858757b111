"""What lives while micro-steps add up has a name: unreduced gradients and buckets are not 'other'."""

from __future__ import annotations

import pytest

from harness.judge.quantities import rank_states
from harness.record import Record
from tests.memory.conftest import EACH, MICRO_STEPS
from tests.memory.runs import LLAMA, Outcome, compare
from tests.representatives import first

pytestmark = pytest.mark.long(seconds=10)

UNNAMED_BYTES = 4096
"""The loss, a batch of 16 tokens, and counters of the libraries."""
SHARDED = ("zero2", "zero3", EACH)
"""Reduce in every micro-step and keep their part; the others keep the whole gradient until the last one."""


@pytest.fixture(
    scope="module",
    params=first(["like-for-like"], ["like-for-like", "ddp,fsdp", "ddp,fsdp1"]),
)
def accumulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Backends named so run with their libraries' own settings; ZeRO would keep buckets of 2 GB."""
    if request.param == "like-for-like":
        shared: Outcome = request.getfixturevalue("outcome")
        return shared
    settings = (f"training.accumulation_steps={MICRO_STEPS}", "runtime.preset=library-defaults")
    return compare(tmp_path_factory.mktemp("defaults"), request.param, 2, f"model.config={LLAMA}", *settings)


def test_nothing_large_is_without_a_name(accumulated: Outcome) -> None:
    """In the step where it is least: gloo's threads may hold a buffer for a moment longer."""
    unnamed: dict[tuple[str, int, str], list[int]] = {}
    for name, record in accumulated.records.items():
        for part in record.ranks:
            for moment in part.memory:
                if moment.kinds is not None and moment.step > 0:
                    unnamed.setdefault((name, part.rank, moment.moment), []).append(moment.kinds["other"])
    assert {where: sizes for where, sizes in unnamed.items() if min(sizes) > UNNAMED_BYTES} == {}


def test_states_are_their_closed_forms(accumulated: Outcome) -> None:
    for name, record in accumulated.records.items():
        for states in rank_states(record):
            assert states.expected is not None
            expected = states.expected.kinds()
            measured = {kind: states.measured.get(kind, 0) for kind in expected}
            assert measured == expected, name


def test_gradients_before_the_reduction_are_whole_or_a_part(accumulated: Outcome) -> None:
    for name, record in accumulated.records.items():
        whole = 4 * parameters(record)
        for part in record.ranks:
            held = {m.kinds["gradients"] for m in part.memory if m.moment == "after_forward" and m.step > 0}  # type: ignore[index]
            if name in SHARDED:
                assert max(held) <= 0.55 * whole, name
            else:
                assert held == {whole}, name


def test_buckets_of_ddp_are_communication(accumulated: Outcome) -> None:
    """Beside gradients that are not reduced, and after the update, when there are none."""
    record = accumulated.records["ddp"]
    for moment in record.ranks[0].memory:
        if moment.moment in ("after_setup", "after_forward", "after_step"):
            assert moment.kinds is not None
            assert moment.kinds["communication"] == 4 * parameters(record)


def parameters(record: Record) -> int:
    assert record.model is not None
    return record.model.parameters
