"""Model states of real runs are their closed forms, and leave nothing unnamed."""

import pytest

from tests.memory.conftest import EACH, LLAMA, MICRO_STEPS, Outcome, compare
from tests.traps.clean import differing_states

pytestmark = pytest.mark.long(seconds=15)

DEFAULTS = ("ddp,fsdp", "ddp,fsdp1")
"""Backends that run with their libraries' own settings; ZeRO would keep buckets of 2 GB."""
UNNAMED_BYTES = 4096
"""The loss, a batch of 16 tokens, and counters of the libraries."""
REDUCING = ("zero2", "zero3", EACH)
"""Reduce in every micro-step and keep their part; the others keep the whole gradient until the last one."""


@pytest.fixture(
    scope="module",
    params=["outcome", *(pytest.param(names, marks=pytest.mark.exhaustive) for names in DEFAULTS)],
)
def accumulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    if request.param == "outcome":
        return request.getfixturevalue("outcome")
    settings = (f"training.accumulation_steps={MICRO_STEPS}", "runtime.preset=library-defaults")
    return compare(tmp_path_factory.mktemp("defaults"), request.param, 2, f"model.config={LLAMA}", *settings)


def test_nothing_large_is_without_a_name(accumulated: Outcome) -> None:
    """In the step where it is least: gloo's threads may hold a buffer for a moment longer."""
    for record in accumulated.records.values():
        assert differing_states(record) == []
    unnamed: dict[tuple[str, int, str], list[int]] = {}
    for name, record in accumulated.records.items():
        for part in record.ranks:
            for moment in part.memory:
                if moment.kinds is not None and moment.step > 0:
                    unnamed.setdefault((name, part.rank, moment.moment), []).append(moment.kinds["other"])
    assert {where: sizes for where, sizes in unnamed.items() if min(sizes) > UNNAMED_BYTES} == {}


def test_gradients_before_the_reduction_are_whole_or_a_part(accumulated: Outcome) -> None:
    for name, record in accumulated.records.items():
        whole = 4 * accumulated.parameters(name)
        for part in record.ranks:
            held = {m.kinds["gradients"] for m in part.memory if m.moment == "after_forward" and m.step > 0}  # type: ignore[index]
            if name in REDUCING:
                assert max(held) <= 0.55 * whole, name
            else:
                assert held == {whole}, name


def test_buckets_of_ddp_are_communication(accumulated: Outcome) -> None:
    """Beside gradients that are not reduced, and after the update, when there are none."""
    for moment in accumulated.records["ddp"].ranks[0].memory:
        if moment.moment in ("after_setup", "after_forward", "after_step"):
            assert moment.kinds["communication"] == 4 * accumulated.parameters("ddp")
