"""Accelerate's FSDP runs on CUDA alone: what it wraps, gathers and casts is as the closed forms expect."""

from __future__ import annotations

from itertools import product

import pytest

from tests.gpu_stub.machine import Machine
from tests.representatives import first
from tests.traps.matrix import ABOUT_TIME

TIED = "model.config.tie_word_embeddings=true"
SETTINGS = {
    "fp32": [],
    "fp32, tied": [TIED],
    "bf16-mixed, two micro-steps": ["training.precision=bf16-mixed", "training.accumulation_steps=2"],
    "fp32, three micro-steps": ["training.global_batch_size=12", "training.accumulation_steps=3"],
    "library defaults": ["training.precision=bf16-mixed", "runtime.preset=library-defaults", TIED],
}


LABELS = ("accelerate-fsdp", "accelerate-fsdp1")
FEW = (("accelerate-fsdp", "library defaults"), ("accelerate-fsdp1", "bf16-mixed, two micro-steps"))


@pytest.mark.parametrize(("label", "case"), first(FEW, product(LABELS, SETTINGS)))
def test_nothing_is_unexpected(label: str, case: str, machine: Machine) -> None:
    comparison = machine.compare([label], settings=SETTINGS[case])
    assert {row.record.status for row in comparison.rows} == {"ok"}
    assert [(f.id, f.text) for f in comparison.findings if f.id not in ABOUT_TIME] == []
