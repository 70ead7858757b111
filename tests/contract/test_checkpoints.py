"""A checkpoint restores training exactly, and an evaluation leaves the full weights as they are."""

from __future__ import annotations

import pytest

from tests.contract.ranks import on_ranks
from tests.representatives import first

RESUMED = ("ddp", "zero1", "zero3", "fsdp", "fsdp1", "accelerate-zero3", "pp")
EVALUATED = ("ddp", "zero3", "fsdp", "fsdp-grad-op", "fsdp1-grad-op", "pp")


@pytest.mark.parametrize("name", first(["zero3", "fsdp", "fsdp1", "pp"], [*RESUMED]))
def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(name, tmp_path) -> None:
    assert on_ranks("resume", name, 2, tmp_path) == [0.0, 0.0]


@pytest.mark.parametrize("name", first(["zero3", "fsdp1-grad-op"], [*EVALUATED]))
def test_evaluation_leaves_the_full_weights_as_they_are(name, tmp_path) -> None:
    assert on_ranks("evaluate", name, 2, tmp_path) == [0.0, 0.0]
