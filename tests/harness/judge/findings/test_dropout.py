"""Dropout: which layers it does not reach, and which ranks draw the same masks."""

import pytest

from harness.judge.comparison import Comparison
from harness.record import DimensionPart, ObservedPart, Record
from tests.records import make_ranks, make_record

ALL_ALIKE = "all ranks begin in the same random state"
PEERS = "ranks that share samples begin in different random states"


def dropped(*states: str | None, evaluating: list[str] | None = None, shared: bool = False) -> str:
    parts = [
        part.model_copy(update={"random_state": state})
        for part, state in zip(make_ranks(len(states)), states, strict=True)
    ]
    record: Record = make_record(label="tp" if shared else "ddp", ranks=parts)
    observed = ObservedPart(dropout=0.1, evaluating_in_training=evaluating)
    dimensions = [DimensionPart(name="tensor", size=len(states))] if shared else []
    world = record.world.model_copy(update={"world_size": len(states), "dimensions": dimensions})
    comparison = Comparison([record.model_copy(update={"observed": observed, "world": world})])
    return next(f.message for f in comparison.findings if f.id == "not-deterministic")


@pytest.mark.parametrize(
    ("states", "shared", "said"),
    [
        (("a", "a"), False, [ALL_ALIKE]),
        (("a", "b"), False, []),
        (("a", None), False, []),
        (("a", "a"), True, []),
        (("a", "b"), True, [PEERS]),
    ],
)
def test_ranks_that_draw_alike_are_told(states: tuple[str, ...], shared: bool, said: list[str]) -> None:
    text = dropped(*states, shared=shared)
    assert [words for words in (ALL_ALIKE, PEERS) if words in text] == said


def test_layers_that_are_kept_in_evaluation_mode_are_named() -> None:
    assert "in evaluation mode in training passes: drop" in dropped("a", "b", evaluating=["drop"])
    assert "evaluation mode" not in dropped("a", "b", evaluating=[])
