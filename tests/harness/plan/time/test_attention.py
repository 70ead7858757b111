"""The attention kernel of a plan, and its seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from harness.job.job import ModelSection
from harness.plan.architectures import ARCHITECTURES
from harness.plan.models import load_model
from harness.plan.step_time import EAGER_ONLY, attention_kernel, eager_attention, predict_speed
from tests.harness.plan.asking import row
from tests.harness.plan.plans import A100


def test_eager_are_the_classes_that_transformers_gives_no_sdpa() -> None:
    classes = {
        entry.class_name: AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(entry.model_type))]
        for entry in ARCHITECTURES.values()
        if entry.causal
    }
    assert {name for name, found in classes.items() if not found._supports_sdpa} == EAGER_ONLY
    assert all(found.__name__ == name for name, found in classes.items())


def test_a_job_that_asks_for_a_kernel_gets_it() -> None:
    assert attention_kernel(load_model("mpt-7b"), ModelSection()) == "eager"
    assert attention_kernel(load_model("llama-3-8b"), ModelSection()) == "sdpa"
    assert attention_kernel(load_model("llama-3-8b"), ModelSection(attention="eager")) == "eager"


@pytest.mark.parametrize(("width", "forward", "backward"), [(2, 8 * 2 + 16, 8 * 2 + 20), (4, 32, 36)])
def test_eager_attention_moves_every_score(width: int, forward: int, backward: int) -> None:
    """With products that cost nothing: heads x layers x s scores a token."""
    found = eager_attention(
        width=64, heads=8, layers=2, flops=1e30, bytes_per_second=1e9, element_bytes=width
    )
    assert found == pytest.approx((8 * 2 * forward / 1e9, 8 * 2 * backward / 1e9))


def test_eager_attention_is_slower_on_long_sequences() -> None:
    asked = {"model": "llama-3.2-1b", "backends": "ddp", "gpu": A100.name, "world_sizes": (1,)}
    long = ("training.precision=bf16-mixed", "data.sequence_length=8192")
    scenario = row(*long, **asked).scenario
    section = scenario.job.model.model_copy(update={"attention": "eager"})
    other = replace(scenario, job=scenario.job.model_copy(update={"model": section}))
    fused, eager = predict_speed(scenario), predict_speed(other)
    assert eager.step_seconds > 1.5 * fused.step_seconds
