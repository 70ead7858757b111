"""The workload of a scenario is that of the run which it plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.backends import registry
from harness.backends.base import World
from harness.backends.refusals import Unsupported
from harness.backends.strategy import StrategyKind
from harness.backends.zero import backend as of_zero
from harness.forms.families import model_states
from harness.job.batch import batch_layout
from harness.job.config import load_experiment
from harness.job.job import Job
from harness.job.pairs import why_refused
from harness.launch.cells import make_cell
from harness.plan.models import from_config, load_model
from harness.plan.scenario import Scenario, planned_model, scenario_of, why_not_planned
from harness.rank.job_check import check_job


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


def test_deepspeed_s_adam_beside_another_optimizer_is_refused() -> None:
    label, model = "zero1:adam=deepspeed,offload=optimizer", load_model("opt-125m")
    job = Job.model_validate({"optimizer": {"kind": "sgd"}})
    assert why_not_planned(label, job, WORLD, 1, model) == (
        "adam=deepspeed replaces AdamW, not optimizer.kind=sgd; leave adam out, or use adamw"
    )
    assert why_not_planned(label, Job(), WORLD, 1, model) is None


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


EXPERIMENT = load_experiment(None, ["training.global_batch_size=8", "training.micro_batch_size=1"])


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return check_job(make_cell(EXPERIMENT, "ddp", 4, batch_layout(EXPERIMENT.training, 4), 0, "cpu").job)


def of_cell(facts: dict[str, Any], label: str, nodes: int = 1) -> Scenario | None:
    cell = make_cell(EXPERIMENT, label, 4, batch_layout(EXPERIMENT.training, 4), 0, "cpu", nodes=nodes)
    return scenario_of(cell, planned_model(facts, cell.job))


def test_the_model_is_that_of_the_job(facts: dict[str, Any]) -> None:
    model = planned_model(facts, EXPERIMENT.job())
    assert (model.name, model.architecture, model.layers) == ("llama", "LlamaForCausalLM", 4)
    assert model.parameters == facts["parameters"]
    # The embedding is only looked up: 128 numbers for each token of the vocabulary.
    assert model.multiplying_parameters == model.parameters - 128 * model.config["vocab_size"]
    assert model.config["intermediate_size"] == 352
    assert model.attention_width == 128


def test_a_cell_becomes_a_scenario_with_its_batch(facts: dict[str, Any]) -> None:
    found = of_cell(facts, "zero2:offload=optimizer")
    assert (found.world_size, found.ranks_per_node, found.micro_batch_size) == (4, 4, 1)
    assert (found.accumulation_steps, found.transport) == (2, "gloo")
    assert found.options["offload"] == "optimizer"
    assert found.strategy.zero_stage == 2
    # Without sharding a rank holds weights, gradients and two moments in fp32.
    states = model_states(of_cell(facts, "ddp").workload())  # type: ignore[union-attr]
    assert states.model_state_bytes >= 16 * found.model.parameters


@pytest.mark.parametrize(
    ("label", "nodes", "shards"),
    [("ddp", 1, None), ("fsdp", 1, None), ("fsdp-hybrid", 1, 2), ("fsdp-hybrid", 2, 2),
     ("fsdp-hybrid:shard_size=4", 2, 4)],
)  # fmt: skip
def test_only_a_hybrid_strategy_has_shard_groups(
    facts: dict[str, Any], label: str, nodes: int, shards: int | None
) -> None:
    found = of_cell(facts, label, nodes)
    assert found.shard_size == shards


def test_nothing_is_predicted_for_a_backend_of_unknown_strategy(facts: dict[str, Any]) -> None:
    assert of_cell(facts, "planted-out-of-memory") is None


RANKS = 4
OPTIONS = (
    "zero0:offload=optimizer", "zero1:offload=optimizer", "zero1:adam=deepspeed", "zero1:offload=cpu",
    "zero2:adam=deepspeed,offload=optimizer", "zero3:adam=deepspeed,offload=cpu",
    "zero3:hpz=2", "zero3:hpz=3", "ulysses-zero3:hpz=2", "autotp-zero3:hpz=2",
    "fsdp:reshard=2", "fsdp:reshard=3", "fsdp1:offload=cpu", "fsdp:offload=cpu", "fsdp-hybrid:shard_size=3",
    "fsdp1:offload=cpu,sync_each_batch=true", "fsdp-tp:tensor=3", "cp:sequence=3", "pp:stages=3",
)  # fmt: skip
SETTINGS = (
    "training.precision=fp32", "training.precision=fp8", "optimizer.kind=adam", "optimizer.kind=sgd",
    "optimizer.kind=adamw-8bit", "optimizer.kind=adamw-8bit-bnb", "optimizer.kind=muon",
    "data.document_attention=within", "model.compile=block", "model.compile=model", "loss.chunk_tokens=16",
    "training.activation_checkpointing=selective", "evaluation.answer_tokens=8", "adapter.kind=lora",
    "optimizer.groups=[{parameters: '*norm*', learning_rate: 0.1}]",
)  # fmt: skip
ASKED_WITH = {
    "evaluation.answer_tokens=8": ("evaluation.every_steps=2", "data.source=squad", "data.path=squad.json")
}
"""Settings that a job must have beside one of these."""


@pytest.fixture
def _with_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which extensions of DeepSpeed this machine can build is no matter of the options."""
    monkeypatch.setattr(of_zero, "unmet_build", lambda name: [])


@pytest.mark.usefixtures("_with_compilers")
@pytest.mark.parametrize("label", [*registry.BUILT_IN, *OPTIONS])
def test_a_plan_refuses_what_a_run_refuses(label: str) -> None:
    model, world = load_model("llama-3.2-1b"), World.planned(RANKS, RANKS, "cpu")
    try:
        backend = registry.create(label)
    except Unsupported as missing:  # its library is not installed, or another version
        pytest.skip(str(missing))
    unmet = registry.unmet_requirements(backend, world)
    unlike = {}
    for setting in SETTINGS:
        job = load_experiment(None, (*ASKED_WITH.get(setting, ()), setting)).job()
        refused, planned = why_refused(label, RANKS, job), why_not_planned(label, job, world, 4, model)
        if (unmet or refused) and not planned:
            unlike[setting] = unmet or refused
        if refused and not unmet and planned != refused:
            unlike[setting] = [refused, planned]
    assert not unlike
