"""What is known of a step without going through it: bytes that it needs at least."""

from __future__ import annotations

import pytest

from harness.job.config import load_experiment
from harness.plan.models import load_model
from harness.plan.prediction import least_memory, predict_memory
from harness.plan.scenario import Scenario

PIPELINE = "pp:stages=2,micro_batches=4"
LABELS = (
    "single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3:hpz=2", "fsdp", "fsdp:prefetch=2",
    "fsdp-grad-op", "fsdp1", "fsdp1-grad-op", "fsdp-hybrid:shard_size=2", "fsdp:reshard=2", "tp:tensor=2",
    "autotp-zero3:tensor=2", "ulysses-zero3:sequence=2", PIPELINE,
)  # fmt: skip
MODEL = load_model("llama-3.2-1b")
OFFLOADED = ("zero1:offload=optimizer", "zero3:offload=cpu", "fsdp:offload=cpu", "fsdp1:offload=cpu")


@pytest.mark.parametrize("label", [*LABELS, *OFFLOADED])
def test_no_peak_lies_below_what_is_known_without_the_step(label: str) -> None:
    for checkpointing in ("false", "true"):
        for preset, steps in BOTH:
            scenario = _scenario(label, checkpointing, preset, steps)
            least, predicted = least_memory(scenario), predict_memory(scenario)
            assert least <= predicted.device_bytes
            states = sum(scenario.held_states.values()) - scenario.held_states.get("gradients", 0)
            assert label == PIPELINE or least > states + sum(term.bytes for term in predicted.saved)


BOTH = (("library-defaults", 3), ("like-for-like", 3), ("like-for-like", 1))


def _scenario(label: str, checkpointing: str, preset: str, steps: int) -> Scenario:
    given = "training.precision=bf16-mixed", f"training.activation_checkpointing={checkpointing}"
    scenario = Scenario.of(
        label, MODEL, load_experiment(None, given).job(), world_size=1 if label == "single" else 4,
        ranks_per_node=4, preset=preset, micro_batch_size=4, accumulation_steps=steps,  # type: ignore[arg-type]
    )  # fmt: skip
    assert scenario is not None
    return scenario
