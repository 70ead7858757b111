"""Where nothing is wrong, no finding is raised."""

from __future__ import annotations

from itertools import product

import pytest

from .matrix import CLEAN_SIZES, Matrix, clean_labels

ALWAYS = {(1, "fp32", 4), (1, "bf16-mixed", 1), (2, "fp32", 1), (2, "bf16-mixed", 4),
          (4, "fp32", 4), (4, "bf16-mixed", 1)}  # fmt: skip
"""Every two of the values together; all three of them only where exhaustive tests are asked for."""
SETTINGS = [
    pytest.param(*setting, marks=() if setting in ALWAYS else pytest.mark.exhaustive)
    for setting in product(CLEAN_SIZES, ("fp32", "bf16-mixed"), (1, 4))
]


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "precision", "accumulation"), SETTINGS)
def test_a_clean_matrix_has_no_finding(
    world_size: int, precision: str, accumulation: int, matrix: Matrix, tally
) -> None:
    settings = (f"training.precision={precision}", f"training.accumulation_steps={accumulation}")
    labels = clean_labels(world_size)
    found = matrix.findings(labels, world_size, (*settings, "training.global_batch_size=16"))
    tally["clean"][0] += len(found)
    tally["clean"][1] += len(labels)
    assert [(f.id, f.message) for f in found] == []
    rows = matrix.rows(labels, world_size, (*settings, "training.global_batch_size=16"))
    wanted = {"exact", "tight"} if precision == "fp32" else {"exact", "tight", "band"}
    assert {row.judgement.parity for row in rows} <= wanted
