"""On one and two ranks where nothing is wrong, no finding is raised."""

from __future__ import annotations

from itertools import product

import pytest

from .clean import ACCUMULATIONS, AFTER_TRACE, PRECISIONS, assert_clean, assert_no_finding
from .matrix import Matrix

pytestmark = pytest.mark.long(seconds=55)


ALWAYS = (2, "bf16-mixed", 2)
"""The others are exhaustive, but for some backends on one rank."""


@pytest.mark.parametrize(
    ("world_size", "precision", "accumulation"),
    [
        ALWAYS,
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in product((1, 2), PRECISIONS, ACCUMULATIONS)
        ),
    ],
)
def test_a_clean_matrix_has_no_finding(
    world_size: int, precision: str, accumulation: int, matrix: Matrix, tally
) -> None:
    assert_no_finding(world_size, precision, accumulation, matrix, tally)


def test_some_backends_on_one_rank_have_no_finding(matrix: Matrix, tally) -> None:
    settings = ("training.precision=fp32", "training.global_batch_size=16", AFTER_TRACE)
    assert_clean(("zero3", "fsdp"), 1, settings, matrix, tally)
