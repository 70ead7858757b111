"""What is predicted of loading initial weights, next to what real ranks measure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.backends.model_source import Loading
from harness.plan.prediction import loading_bytes
from harness.plan.scenario import Scenario, job_model
from tests.contract.ranks import on_ranks
from tests.contract.setup_memory import CONFIG, EMBEDDING, setup_job
from tests.representatives import COSTLY, EXHAUSTIVE

pytestmark = [
    pytest.mark.long(seconds=30),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status"),
]
DEEDS: dict[str, tuple[Loading, dict[str, Any]]] = {
    "of_slices": ("slices", CONFIG),
    "of_broadcast": ("broadcast", CONFIG),
    "of_whole_model": ("full", CONFIG),
    "of_a_large_embedding": ("slices", EMBEDDING),
    "of_a_large_embedding_whole": ("full", EMBEDDING),
}
"""Functions of `setup_memory`: whole, the first model has 208 MB, the second 147 and a tied output layer."""
LEAST, MOST = 0.88, 1.05
"""Of the prediction. Less: the unit is the largest block, of which most models draw one layer at a time."""
FEW = [("fsdp", "of_slices"), ("fsdp", "of_whole_model"), ("zero1", "of_slices")]
FURTHER = [
    ("fsdp", "of_broadcast"), ("fsdp", "of_a_large_embedding"), ("fsdp", "of_a_large_embedding_whole"),
    ("fsdp:offload=cpu", "of_slices"), ("fsdp1", "of_slices"), ("fsdp1", "of_whole_model"),
    ("zero3", "of_slices"), ("zero3", "of_whole_model"), ("accelerate-zero3", "of_slices"),
    ("ddp", "of_slices"), ("pp", "of_slices"),
]  # fmt: skip


def planned(label: str, deed: str) -> Scenario:
    loading, config = DEEDS[deed]
    job = setup_job(config)
    found = Scenario.of(
        label, job_model(job), job, world_size=2, ranks_per_node=2, preset="like-for-like",
        micro_batch_size=2, accumulation_steps=1, loading=loading, torch_device="cpu",
    )  # fmt: skip
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("label", "deed"),
    [
        *(pytest.param(*case, marks=COSTLY) for case in FEW),
        *(pytest.param(*case, marks=EXHAUSTIVE) for case in FURTHER),
    ],
)
def test_ranks_that_load_hold_what_is_predicted(label: str, deed: str, tmp_path: Path) -> None:
    plan = planned(label, deed)
    of_rank = loading_bytes(plan) / 2
    in_step = sum(plan.held_states.values())
    for rank in on_ranks(f"tests.contract.setup_memory:{deed}", label, 2, tmp_path):
        assert LEAST * of_rank <= rank.loading_peak <= MOST * of_rank
        assert rank.added_peak <= MOST * max(of_rank, in_step)
