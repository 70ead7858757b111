"""Where nothing is wrong, no finding is raised."""

from __future__ import annotations

import pytest

from .matrix import CLEAN_SIZES, Matrix, clean_labels


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("world_size", CLEAN_SIZES)
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
