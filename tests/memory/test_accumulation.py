"""What lives while micro-steps add up has a name: unreduced gradients and buckets are not 'other'."""

from __future__ import annotations

import pytest

from harness.judge.states import rank_states
from harness.record import Record
from tests.memory.runs import LLAMA, Outcome, compare

pytestmark = pytest.mark.long(seconds=10)

MICRO_STEPS = 4
UNNAMED_BYTES = 4096
"""The loss, a batch of 16 tokens, and counters of the libraries."""
WHOLE = ("ddp", "zero1", "fsdp", "fsdp1")
"""Keep the whole gradient of every micro-step until the last one is reduced."""
SHARDED = ("zero2", "zero3")
"""Reduce in every micro-step and keep their part."""
CASES = {
    "like-for-like": (*WHOLE, *SHARDED),
    # ZeRO would keep buckets of 500,000,000 elements.
    "library-defaults": ("ddp", "fsdp", "fsdp1"),
}


@pytest.fixture(scope="module", params=CASES)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    preset = request.param
    return compare(
        tmp_path_factory.mktemp(preset),
        ",".join(CASES[preset]),
        2,
        f"model.config={LLAMA}",
        f"runtime.preset={preset}",
        f"training.accumulation_steps={MICRO_STEPS}",
    )


def test_nothing_large_is_without_a_name(outcome: Outcome) -> None:
    """In the step where it is least: gloo's threads may hold a buffer for a moment longer."""
    unnamed: dict[tuple[str, int, str], list[int]] = {}
    for name, record in outcome.records.items():
        for part in record.ranks:
            for moment in part.memory:
                if moment.kinds is not None and moment.step > 0:
                    unnamed.setdefault((name, part.rank, moment.moment), []).append(moment.kinds["other"])
    assert {where: sizes for where, sizes in unnamed.items() if min(sizes) > UNNAMED_BYTES} == {}


def test_states_are_their_closed_forms(outcome: Outcome) -> None:
    for name, record in outcome.records.items():
        for states in rank_states(record):
            assert states.expected is not None
            expected = states.expected.kinds()
            measured = {kind: states.measured.get(kind, 0) for kind in expected}
            assert measured == expected, name


def test_gradients_before_the_reduction_are_whole_or_a_part(outcome: Outcome) -> None:
    for name, record in outcome.records.items():
        whole = 4 * parameters(record)
        for part in record.ranks:
            held = {m.kinds["gradients"] for m in part.memory if m.moment == "after_forward" and m.step > 0}  # type: ignore[index]
            if name in SHARDED:
                assert max(held) <= 0.55 * whole, name
            else:
                assert held == {whole}, name


def test_buckets_of_ddp_are_communication(outcome: Outcome) -> None:
    """Beside gradients that are not reduced, and after the update, when there are none."""
    record = outcome.records["ddp"]
    for moment in record.ranks[0].memory:
        if moment.moment in ("after_setup", "after_forward", "after_step"):
            assert moment.kinds is not None
            assert moment.kinds["communication"] == 4 * parameters(record)


def parameters(record: Record) -> int:
    assert record.model is not None
    return record.model.parameters
