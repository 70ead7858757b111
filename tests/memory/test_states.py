"""Model states of real runs are their closed forms, fall as strategies promise, and leave nothing unnamed."""

import pytest

from harness.forms.terms import STATE_KINDS
from harness.judge.quantities import rank_states
from tests.built_in import HYBRID, NATIVE, THROUGH_ACCELERATE
from tests.memory.conftest import BLOOM, EACH, LLAMA, MICRO_STEPS, Outcome, compare

pytestmark = pytest.mark.long(seconds=15)

BACKENDS = NATIVE + THROUGH_ACCELERATE
GEOMETRIES = {"bloom": BLOOM, "llama": LLAMA}
DEFAULTS = ("ddp,fsdp", "ddp,fsdp1")
"""Backends that run with their libraries' own settings; ZeRO would keep buckets of 2 GB."""
WIDE = (("bloom", 4), ("llama", 1), ("bloom", 2), ("llama", 4))
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


@pytest.fixture(
    scope="module",
    params=["accumulated", *(pytest.param(case, marks=pytest.mark.exhaustive) for case in WIDE)],
    ids=lambda param: param if isinstance(param, str) else "-".join(map(str, param)),
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, int]:
    if request.param == "accumulated":
        return request.getfixturevalue("outcome"), 2
    geometry, ranks = request.param
    folder = tmp_path_factory.mktemp(f"{geometry}{ranks}")
    names = BACKENDS + (HYBRID if ranks == 4 else ())
    return compare(folder, ",".join(names), ranks, f"model.config={GEOMETRIES[geometry]}"), ranks


def differences(outcome: Outcome) -> dict[tuple[str, int, str], tuple[int | None, int | None]]:
    found = {}
    for name, record in outcome.records.items():
        held = rank_states(record)
        assert len(held) == record.world.world_size, f"{name}: {record.status}"
        for states in held:
            expected = states.expected.kinds()
            for kind in (*STATE_KINDS, "gathered", "communication", "buffers"):
                if states.measured.get(kind, 0) != expected.get(kind, 0):
                    found[name, states.rank, kind] = (states.measured.get(kind), expected.get(kind))
    return found


def test_every_byte_of_every_backend_has_its_term(run: tuple[Outcome, int]) -> None:
    outcome, ranks = run
    assert {record.world.world_size for record in outcome.records.values()} == {1, ranks}
    assert differences(outcome) == {}
    ids = {finding["id"] for finding in outcome.document["findings"]}
    assert not ids & {"communication-differs", "memory-differs", "memory-grows"}


def test_nothing_large_is_without_a_name(accumulated: Outcome) -> None:
    """In the step where it is least: gloo's threads may hold a buffer for a moment longer."""
    assert differences(accumulated) == {}
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
