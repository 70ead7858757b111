"""A comparison whose figures several modules read."""

from __future__ import annotations

import pytest

from tests.made_once import MadeOnce

from .runs import LLAMA, Outcome, compare

MICRO_STEPS = 4
EACH = "fsdp:sync_each_batch=True"
BACKENDS = ("ddp", "zero1", "zero2", "zero3", "fsdp", EACH, "fsdp1")


@pytest.fixture(scope="session")
def outcome(made_once: MadeOnce, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Of two ranks that add up micro-steps, and save a checkpoint in the end."""
    settings = (
        f"model.config={LLAMA}", f"training.accumulation_steps={MICRO_STEPS}", "measure.checkpoint=true",
    )  # fmt: skip
    return made_once.value(
        "memory", lambda: compare(tmp_path_factory.mktemp("memory"), ",".join(BACKENDS), 2, *settings)
    )
