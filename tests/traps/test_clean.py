"""On one and two ranks where nothing is wrong, no finding is raised."""

from __future__ import annotations

from itertools import product

import pytest

from .clean import ACCUMULATIONS, PRECISIONS, assert_no_finding
from .matrix import Matrix

pytestmark = pytest.mark.long(seconds=85)


FEW = {(1, "fp32", 1), (2, "bf16-mixed", 4)}
"""Which have each value of each axis; the others are exhaustive."""


@pytest.mark.parametrize(
    ("world_size", "precision", "accumulation"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.exhaustive)
        for case in product((1, 2), PRECISIONS, ACCUMULATIONS)
    ],
)
def test_a_clean_matrix_has_no_finding(
    world_size: int, precision: str, accumulation: int, matrix: Matrix, tally
) -> None:
    assert_no_finding(world_size, precision, accumulation, matrix, tally)
