"""The workload of a scenario is that of the run which it plans."""

from dataclasses import replace

import pytest

from harness.backends.base import World
from harness.backends.strategy import StrategyKind
from harness.forms.families import model_states
from harness.job.job import Job
from harness.job.pairs import why_refused
from harness.plan.models import from_config, load_model
from harness.plan.scenario import Scenario, why_not_planned


def scenario(**job: object) -> Scenario:
    return Scenario(
        model=load_model("opt-125m"), job=Job.model_validate(job), label="ddp",
        strategy=StrategyKind(family="ddp"), world_size=2, ranks_per_node=1, micro_batch_size=1,
        accumulation_steps=1,
    )  # fmt: skip


def test_pure_bf16_builds_parameters_in_bf16() -> None:
    layout = scenario(training={"precision": "bf16"}).workload().layout
    assert {tensor.dtype for tensor in layout.parameters} == {"bfloat16"}
    mixed = scenario(training={"precision": "bf16-mixed"}).workload().layout
    assert {tensor.dtype for tensor in mixed.parameters} == {"float32"}


def test_which_parameters_decay_follows_the_job() -> None:
    assert len(scenario().workload().layout.groups()) == 2
    assert len(scenario(optimizer={"decay": "all"}).workload().layout.groups()) == 1


def test_recomputation_is_known_by_the_architecture() -> None:
    planned = scenario(training={"activation_checkpointing": True})
    assert planned.workload().recomputed_until is None
    llama = replace(planned, model=load_model("llama-3.2-1b"))
    assert llama.workload().recomputed_until == "mlp.down_proj"


def test_the_workload_is_that_of_the_fullest_rank() -> None:
    """Half of OPT-125M's first partition is its embedding, whose gradient its neighbours keep whole too."""
    zero2 = replace(scenario(), strategy=StrategyKind(family="zero12", zero_stage=2), world_size=16)
    fullest = model_states(zero2.workload()).model_state_bytes
    every = [model_states(zero2.workload(rank)).model_state_bytes for rank in range(16)]
    assert fullest == max(every)
    assert zero2.workload().rank == every.index(max(every)) != 15


WORLD = World.planned(8, 8, "cuda")


@pytest.mark.parametrize("kind", ["adam", "sgd", "adamw-8bit", "adamw-8bit-bnb"])
@pytest.mark.parametrize(
    "label", ["zero1:adam=deepspeed,offload=optimizer", "zero3:adam=deepspeed,offload=cpu"]
)
def test_deepspeed_s_adam_beside_another_optimizer_is_refused_as_a_run_is(label: str, kind: str) -> None:
    """A run asks `why_refused` before it starts ranks."""
    job = Job.model_validate({"optimizer": {"kind": kind}})
    reason = why_refused(label, 8, job)
    assert reason == (
        f"adam=deepspeed replaces AdamW, not optimizer.kind={kind}; leave adam out, or use adamw"
    )
    assert why_not_planned(label, job, WORLD, 1, load_model("opt-125m")) == reason
    assert why_not_planned(label, Job(), WORLD, 1, load_model("opt-125m")) is None


@pytest.mark.parametrize(
    ("label", "kind", "inner", "layers", "is_refused"),
    [
        ("zero1", "adamw-8bit", 100, 4, True),  # a matrix of 9,600 elements is 37.5 blocks
        ("zero2", "adamw-8bit", 100, 4, True),
        ("zero3", "adamw-8bit", 100, 4, False),
        ("zero1", "adamw-8bit-bnb", 100, 4, False),
        ("zero1", "adamw-8bit", 128, 2, False),
    ],
)
def test_moments_that_deepspeed_cannot_narrow_are_refused(
    label: str, kind: str, inner: int, layers: int, is_refused: bool
) -> None:
    """Runs of the first and the last are in tests/axes/test_optimizers.py."""
    config = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 96, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 2,
    }  # fmt: skip
    model, job = from_config(config, name="small", source="here"), {"optimizer": {"kind": kind}}
    reason = why_not_planned(label, Job.model_validate(job), World.planned(2, 2, "cpu"), 1, model)
    assert ("a parameter ends within one" in (reason or "")) == is_refused
