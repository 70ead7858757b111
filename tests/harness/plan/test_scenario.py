"""The workload of a scenario is that of the run which it plans."""

from dataclasses import replace

from harness.backends.strategy import StrategyKind
from harness.forms.families import model_states
from harness.job.job import Job
from harness.plan.models import load_model
from harness.plan.scenario import Scenario


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
