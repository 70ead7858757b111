"""On one and two ranks where nothing is wrong, no finding is raised."""

from __future__ import annotations

import pytest

from .clean import ACCUMULATIONS, PRECISIONS, assert_no_finding
from .matrix import Matrix

pytestmark = pytest.mark.long(seconds=85)


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_clean_matrix_has_no_finding(
    world_size: int, precision: str, accumulation: int, matrix: Matrix, tally
) -> None:
    assert_no_finding(world_size, precision, accumulation, matrix, tally)
