"""Memory and time of jobs that train adapters, recompute in part, or compute the loss in chunks."""

from __future__ import annotations

from typing import Any

import pytest

from harness.job.job import Job
from harness.plan.hardware import load_hardware
from harness.plan.models import load_model
from harness.plan.prediction import predict_memory
from harness.plan.scenario import Scenario
from harness.plan.step_time import predict_speed

GIB = 2**30
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QWEN = {"kind": "lora", "rank": 64, "targets": LINEAR}
"""As Qwen's finetune.py adapts its models."""


def scenario(model: str, label: str, ranks: int, settings: dict[str, Any], **values: Any) -> Scenario:
    found = Scenario.of(
        label, load_model(model), Job.model_validate(settings), world_size=ranks, ranks_per_node=8,
        preset="library-defaults", device=load_hardware().device("A100-80"),
        **({"micro_batch_size": 1, "accumulation_steps": 1} | values),
    )  # fmt: skip
    assert found is not None
    return found


def job(
    length: int, precision: str = "bf16", *, checkpointing: bool | str = True, **more: Any
) -> dict[str, Any]:
    training = {"precision": precision, "activation_checkpointing": checkpointing}
    return {"data": {"sequence_length": length}, "training": training, **more}


@pytest.mark.parametrize(
    ("model", "adapter", "gib", "tokens_per_second"),
    [("qwen-7b", QWEN, 34.09, 3077), ("qwen-14b", QWEN, 51.41, 1820)],
)
def test_lora_needs_what_others_measured(
    model: str, adapter: dict[str, Any], gib: float, tokens_per_second: float
) -> None:
    """QwenLM/Qwen, README, LoRA on one A100-80 at 8,192 tokens: no constant here was estimated from it."""
    asked = scenario(model, "single", 1, job(8192, adapter=adapter), accumulation_steps=8)
    speed = predict_speed(asked)
    assert predict_memory(asked).device_bytes == pytest.approx(gib * GIB, rel=0.12)
    assert speed.tokens_per_second_per_gpu == pytest.approx(tokens_per_second, rel=0.1)


@pytest.mark.parametrize("label", ["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op"])
def test_packed_weights_need_less_under_every_strategy(label: str) -> None:
    peaks = []
    for base in ("bf16", "nf4"):
        adapter = {"kind": "lora", "base_dtype": base}
        asked = scenario("llama-2-7b", label, 8, job(2048, "bf16-mixed", adapter=adapter))
        assert predict_speed(asked) is not None
        peaks.append(predict_memory(asked).peak_bytes)
    whole = predict_memory(scenario("llama-2-7b", label, 8, job(2048, "bf16-mixed"))).peak_bytes
    assert peaks[1] < peaks[0] < whole


def test_recomputing_in_part_lies_between_none_and_all() -> None:
    found = {}
    for checkpointing in (False, "every-3", "every-2", True, "selective"):
        settings = job(2048, "bf16-mixed", checkpointing=checkpointing)
        asked = scenario("llama-2-7b", "fsdp", 8, settings, micro_batch_size=2)
        speed = predict_speed(asked)
        found[checkpointing] = (predict_memory(asked).peak_bytes, speed.tokens_per_second_per_gpu)
    for quantity in (0, 1):
        none, third, half, everything, selective = (pair[quantity] for pair in found.values())
        assert everything < half < third < none
        assert everything < selective < none


@pytest.mark.parametrize(("micro_batch", "length"), [(2, 4096), (1, 8192)])
def test_a_loss_in_chunks_holds_the_logits_of_one_chunk(micro_batch: int, length: int) -> None:
    """What a token holds per entry of the vocabulary is there for 1,024 of 8,192 tokens."""
    whole, chunks = (
        predict_memory(
            scenario(
                "llama-3.1-8b", "fsdp", 8, job(length, "bf16-mixed", **more), micro_batch_size=micro_batch
            )
        ).peak_bytes
        for more in ({}, {"loss": {"chunk_tokens": 1024}})
    )
    logits = 4 * 8192 * 128256
    assert logits < whole - chunks < 4 * logits
