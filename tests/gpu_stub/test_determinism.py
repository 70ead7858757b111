"""Repeats on CUDA under deterministic kernels."""

from __future__ import annotations

import pytest

from tests.gpu_stub.machine import Machine
from tests.representatives import first


@pytest.mark.parametrize("label", first(["fsdp"], ["ddp", "zero3", "fsdp"]))
def test_repeats_are_bit_equal(label: str, machine: Machine) -> None:
    first, again = (machine.run(label, repeat=repeat) for repeat in (0, 1))
    assert first.status == again.status == "ok", (first.error, again.error)
    assert first.observed is not None
    assert first.observed.deterministic
    assert first.final_weights is not None
    assert again.final_weights is not None
    assert first.final_weights.digest == again.final_weights.digest
    assert [step.loss for step in first.steps] == [step.loss for step in again.steps]
