"""A pipeline continues what data-parallel ranks saved, and they continue it."""

from __future__ import annotations

from pathlib import Path

from tests.resume.engines import resume_job
from tests.resume.pairs import (
    Resumption,
    Side,
    loss_difference,
    resume_all,
    save_all,
    trained,
    weight_difference,
)
from tests.resume.test_pairs import LOSS_TOLERANCE, WEIGHT_TOLERANCE

SIDES = (Side("ddp", 2), Side("pp", 2))


def test_a_pipeline_and_data_parallel_ranks_continue_each_other(tmp_path: Path) -> None:
    job = resume_job()
    whole = trained(save_all(SIDES, job, tmp_path))
    crossed = [Resumption(*SIDES), Resumption(*reversed(SIDES)), Resumption(SIDES[1], SIDES[1], "native")]
    for resumption, given in trained(resume_all(crossed, job, tmp_path)).items():
        assert loss_difference(whole[SIDES[0]], given) <= LOSS_TOLERANCE, resumption
        assert weight_difference(whole[SIDES[0]], given) <= WEIGHT_TOLERANCE, resumption
