"""On one and two ranks where nothing is wrong, no finding is raised."""

from __future__ import annotations

from itertools import product

import pytest

from tests.representatives import COSTLY, EXHAUSTIVE

from .clean import ACCUMULATIONS, AFTER_TRACE, FEW, PRECISIONS, assert_clean, assert_no_finding
from .matrix import Matrix

pytestmark = pytest.mark.long(seconds=75)


ALWAYS = (2, "bf16-mixed", 2)
"""The others are exhaustive, but for some backends on one rank."""


def test_a_family_each_has_no_finding(matrix: Matrix, tally) -> None:
    assert_no_finding(*ALWAYS, matrix, tally, FEW)


@pytest.mark.parametrize(
    ("world_size", "precision", "accumulation"),
    [
        pytest.param(*ALWAYS, marks=COSTLY),
        *(pytest.param(*case, marks=EXHAUSTIVE) for case in product((1, 2), PRECISIONS, ACCUMULATIONS)),
    ],
)
def test_a_clean_matrix_has_no_finding(
    world_size: int, precision: str, accumulation: int, matrix: Matrix, tally
) -> None:
    assert_no_finding(world_size, precision, accumulation, matrix, tally)


@COSTLY
def test_groups_of_ranks_and_cut_layers_on_four_ranks_have_no_finding(matrix: Matrix, tally) -> None:
    labels = ("fsdp-hybrid", "zero3:hpz=2", "autotp-zero2")
    settings = (
        "training.precision=fp32", "training.accumulation_steps=2", "training.global_batch_size=16",
        AFTER_TRACE,
    )  # fmt: skip
    assert_clean(labels, 4, settings, matrix, tally)
    within = {row.phase for row in matrix.record("zero3:hpz=2", 4, settings).comm if row.role == "shard"}
    assert within
    assert within <= {"forward", "backward"}


def test_some_backends_on_one_rank_have_no_finding(matrix: Matrix, tally) -> None:
    settings = ("training.precision=fp32", "training.global_batch_size=16", AFTER_TRACE)
    assert_clean(("zero3", "fsdp"), 1, settings, matrix, tally)
