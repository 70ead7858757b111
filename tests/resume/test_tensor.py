"""Ranks that cut layers continue what others saved, and others continue them; their own to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.job.job import Job
from tests.resume.engines import resume_job
from tests.resume.pairs import (
    Resumption,
    Side,
    is_exact,
    loss_difference,
    resume_all,
    save_all,
    trained,
    weight_difference,
)
from tests.resume.test_pairs import LOSS_TOLERANCE, WEIGHT_TOLERANCE

pytestmark = pytest.mark.long(seconds=10)
DDP = Side("ddp", 2)
TWO = (DDP, Side("tp", 2), Side("autotp-zero1", 2))
FOUR = (
    DDP, Side("tp:tensor=2", 4), Side("fsdp-tp", 4), Side("autotp-zero1", 4), Side("autotp-zero2", 4),
    Side("autotp-zero3", 4),
)  # fmt: skip


def divisible_job(*, tied: bool) -> Job:
    job = resume_job(tied=tied)
    heads = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = {**(job.model.config or {}), **heads}
    return job.model_copy(update={"model": job.model.model_copy(update={"config": config})})


@pytest.mark.parametrize(
    ("sides", "tied"),
    [
        (TWO, False),
        pytest.param(TWO, True, marks=pytest.mark.exhaustive),
        pytest.param(FOUR, False, marks=pytest.mark.exhaustive),
        pytest.param(FOUR, True, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.costly
def test_ranks_that_cut_layers_and_others_continue_each_other(
    sides: tuple[Side, ...], tied: bool, tmp_path: Path
) -> None:
    job = divisible_job(tied=tied)
    whole = trained(save_all(sides, job, tmp_path))
    own = [Resumption(side, side, form) for side in sides[1:] for form in ("native", "neutral")]
    ring = zip(sides, (*sides[1:], sides[0]), strict=True)
    crossed = [Resumption(source, target) for pair in ring for source, target in (pair, pair[::-1])]
    for resumption, given in trained(resume_all(dict.fromkeys([*own, *crossed]), job, tmp_path)).items():
        assert loss_difference(whole[DDP], given) <= LOSS_TOLERANCE, resumption
        assert weight_difference(whole[DDP], given) <= WEIGHT_TOLERANCE, resumption
        if resumption in own:
            assert is_exact(whole[resumption.source], given), resumption
