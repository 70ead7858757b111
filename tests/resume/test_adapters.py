"""Jobs with adapters: frozen weights come back as they were, adapters train on as if never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume.engines import resume_job
from tests.resume.pairs import Resumption, Side, is_exact, loss_difference, resume_all, save_all, trained

pytestmark = pytest.mark.long(seconds=20)

ADAPTER = {"kind": "lora", "rank": 3, "targets": ["q_proj", "up_proj"]}
SIDES = [Side(name, 2) for name in ("ddp", "zero1", "zero3", "fsdp", "fsdp1", "accelerate-zero3")]
FEW = [Side(name, 2) for name in ("ddp", "zero3", "fsdp", "fsdp1")]
CROSSED = [("fsdp1", "zero3"), ("zero3", "fsdp"), ("fsdp", "ddp")]
LOSS_TOLERANCE = 5e-6
"""Nats per token, as of jobs without adapters."""


@pytest.mark.parametrize("sides", [FEW, pytest.param(SIDES, marks=pytest.mark.exhaustive)], ids=len)
@pytest.mark.costly
def test_resuming_is_exact_and_other_backends_go_on_alike(sides: list[Side], tmp_path: Path) -> None:
    job = resume_job(tied=True, adapter=ADAPTER, optimizer={"learning_rate": 2e-2})
    uninterrupted = trained(save_all(sides, job, tmp_path))
    same = [Resumption(side, side, form) for form in ("native", "neutral") for side in sides]
    crossed = [Resumption(Side(a, 2), Side(b, 2)) for a, b in CROSSED]
    resumed = trained(resume_all([*same, *crossed], job, tmp_path))
    assert [pair for pair in same if not is_exact(uninterrupted[pair.source], resumed[pair])] == []
    for pair in crossed:
        assert loss_difference(uninterrupted[pair.target], resumed[pair]) <= LOSS_TOLERANCE
    moved = [
        name
        for name, weight in uninterrupted[sides[0]].weights.items()
        if ".lora_B." in name and weight.any()
    ]
    assert len(moved) == 4


@pytest.mark.costly
def test_frozen_weights_keep_their_dtype(tmp_path: Path) -> None:
    job = resume_job(precision="bf16-mixed", adapter=ADAPTER | {"base_dtype": "bf16"})
    sides = [Side(name, 2) for name in ("zero3", "fsdp")]
    uninterrupted = trained(save_all(sides, job, tmp_path))
    same = [Resumption(side, side, form) for form in ("native", "neutral") for side in sides]
    resumed = trained(resume_all(same, job, tmp_path))
    assert [pair for pair in same if not is_exact(uninterrupted[pair.source], resumed[pair])] == []
