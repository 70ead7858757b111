"""Low precision: masters, weights in use and the loss scaler."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.backends.piece import OptimizerProgress
from tests.resume.engines import resume_job
from tests.resume.pairs import Resumption, Side, is_exact, loss_difference, resume_all, save_all, trained

pytestmark = [pytest.mark.long(seconds=25), pytest.mark.exhaustive]

LOSS_TOLERANCE = 2e-3
"""Nats per token: strategies round low-precision sums in other orders."""


@pytest.mark.parametrize(
    ("precision", "names"),
    [("bf16-mixed", ("zero0", "zero1", "zero3", "fsdp1")), ("bf16", ("zero2", "zero3", "fsdp"))],
)
def test_low_precision_is_exact_too(precision: str, names: tuple[str, ...], tmp_path: Path) -> None:
    job = resume_job(precision=precision, tied=True)
    sides = [Side(name, 2) for name in names]
    uninterrupted = trained(save_all(sides, job, tmp_path))
    same = [Resumption(side, side, form) for form in ("native", "neutral") for side in sides]
    crossed = [Resumption(sides[-1], side) for side in sides]
    resumed = trained(resume_all(dict.fromkeys([*same, *crossed]), job, tmp_path))
    assert [pair for pair in same if not is_exact(uninterrupted[pair.source], resumed[pair])] == []
    for pair in crossed:
        assert loss_difference(uninterrupted[pair.target], resumed[pair]) <= LOSS_TOLERANCE


def test_the_loss_scaler_goes_on_and_losing_it_shows_in_the_progress(tmp_path: Path) -> None:
    job, side = resume_job(precision="fp16-mixed"), Side("fsdp1", 2)
    uninterrupted = trained(save_all([side], job, tmp_path))[side]
    sound = Resumption(side, side)
    forgetful = Resumption(side, side, "neutral", "lost scaler")
    resumed = trained(resume_all([sound, forgetful], job, tmp_path))
    expected = OptimizerProgress(updates=6, loss_scale=2.0**13, clean_steps=0)
    assert is_exact(uninterrupted, resumed[sound])
    assert resumed[sound].progress == uninterrupted.progress == expected
    assert resumed[forgetful].progress != expected
