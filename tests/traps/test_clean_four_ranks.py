"""On four ranks without accumulation, where nothing is wrong, no finding is raised; a module of its own for the time it takes."""

from __future__ import annotations

import pytest

from .clean import PRECISIONS, assert_no_finding
from .matrix import Matrix

pytestmark = pytest.mark.long(seconds=70)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_clean_matrix_without_accumulation_has_no_finding(precision: str, matrix: Matrix, tally) -> None:
    assert_no_finding(4, precision, 1, matrix, tally)
