"""Model states of real runs are their closed forms, and fall as the strategies promise."""

from __future__ import annotations

import pytest

from harness.forms.terms import STATE_KINDS
from harness.judge.quantities import rank_states
from harness.record import Record
from tests.built_in import HYBRID, NATIVE, THROUGH_ACCELERATE, strategy
from tests.memory.runs import BLOOM, LLAMA, Outcome, compare

pytestmark = pytest.mark.long(seconds=15)

BACKENDS = NATIVE + THROUGH_ACCELERATE
GEOMETRIES = {"bloom": BLOOM, "llama": LLAMA}
WIDE = (("bloom", 4), ("llama", 1), ("bloom", 2), ("llama", 4))
SHARDED = {
    "optimizer": tuple(name for name in NATIVE if strategy(name).stage >= 1),
    "gradients": tuple(name for name in NATIVE if strategy(name).stage >= 2),
    # FSDP shards the weights again after the backward pass, whatever it does between forward and backward.
    "weights": tuple(
        name for name in NATIVE if strategy(name).stage >= (2 if name.startswith("fsdp") else 3)
    ),
}


@pytest.fixture(
    scope="module",
    params=[None, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in WIDE)],
    ids=lambda param: "-".join(map(str, param)) if param else "accumulated",
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, int]:
    if request.param is None:
        return request.getfixturevalue("outcome"), 2
    geometry, ranks = request.param
    folder = tmp_path_factory.mktemp(f"{geometry}{ranks}")
    names = BACKENDS + (HYBRID if ranks == 4 else ())
    return compare(folder, ",".join(names), ranks, f"model.config={GEOMETRIES[geometry]}"), ranks


def test_every_byte_of_every_backend_has_its_term(run: tuple[Outcome, int]) -> None:
    outcome, ranks = run
    differences = {}
    assert {record.world.world_size for record in outcome.records.values()} == {1, ranks}
    for name, record in outcome.records.items():
        held = rank_states(record)
        assert len(held) == record.world.world_size, f"{name}: {record.status}"
        for states in held:
            assert states.expected is not None
            expected = states.expected.kinds()
            for kind in (*STATE_KINDS, "gathered", "communication", "buffers"):
                if states.measured.get(kind, 0) != expected.get(kind, 0):
                    differences[name, states.rank, kind] = (states.measured.get(kind), expected.get(kind))
    assert differences == {}


def test_no_memory_finding_is_raised(run: tuple[Outcome, int]) -> None:
    outcome, _ = run
    assert [f for f in outcome.document["findings"] if f["id"] in ("memory-differs", "memory-grows")] == []


@pytest.mark.parametrize("kind", SHARDED)
def test_what_a_strategy_shards_falls_as_one_over_the_ranks(run: tuple[Outcome, int], kind: str) -> None:
    outcome, ranks = run
    for name in SHARDED[kind]:
        if name not in outcome.records:
            continue
        record = outcome.records[name]
        whole = _parameters(record) * (8 if kind == "optimizer" else 4)
        for states in rank_states(record):
            extra = sum(t.bytes for t in states.expected.terms if t.kind == kind and t.extra)  # type: ignore[union-attr]
            assert states.measured[kind] - extra <= whole / ranks * 1.05, name


def test_what_a_strategy_does_not_shard_stays_whole(run: tuple[Outcome, int]) -> None:
    outcome, _ = run
    for name, kind in (
        ("ddp", "optimizer"),
        ("ddp", "gradients"),
        ("zero1", "weights"),
        ("zero2", "weights"),
    ):
        record = outcome.records[name]
        whole = _parameters(record) * (8 if kind == "optimizer" else 4)
        assert all(states.measured[kind] >= whole for states in rank_states(record)), name


def _parameters(record: Record) -> int:
    assert record.model is not None
    return record.model.parameters
