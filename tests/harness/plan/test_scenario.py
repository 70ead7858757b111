"""The workload of a scenario is that of the run which it plans."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.backends import registry
from harness.backends.base import World
from harness.backends.refusals import Unsupported
from harness.backends.strategy import StrategyKind
from harness.backends.zero import backend as of_zero
from harness.errors import HarnessError
from harness.forms.families import model_states
from harness.job.batch import batch_layout, with_global_batch
from harness.job.config import load_experiment
from harness.job.experiment import Experiment
from harness.job.job import Job
from harness.job.pairs import why_refused
from harness.launch.cells import make_cell
from harness.plan.alternatives import MORE_GPUS, OFFLOAD
from harness.plan.answer import Answer, answers
from harness.plan.hardware import MemoryLimits, load_hardware
from harness.plan.models import from_config, load_model, why_uneven
from harness.plan.prediction import Prediction, loading_bytes, predict_memory
from harness.plan.preflight import at_least
from harness.plan.question import ask as question
from harness.plan.scenario import (
    Scenario,
    job_model,
    planned_model,
    scenario_of,
    why_not_planned,
    why_states_alone,
    with_settings,
)
from harness.plan.step_time import predict_speed
from harness.plan.text import answer_lines
from harness.rank.data import load_samples
from harness.rank.job_check import check_job
from harness.rank.models.description import describe_layout
from harness.rank.models.model import build_model, model_config
from harness.rank.models.optimizer import update_groups
from harness.shipped import resolve
from tests.harness.plan.plans import scenario as planned


def scenario(**job: object) -> Scenario:
    return Scenario(
        model=load_model("opt-125m"), job=Job.model_validate(job), label="ddp",
        strategy=StrategyKind(family="ddp"), world_size=2, ranks_per_node=1, micro_batch_size=1,
        accumulation_steps=1,
    )  # fmt: skip


def test_the_job_decides_the_dtype_and_the_decay_of_parameters() -> None:
    for precision, dtype in (("bf16", "bfloat16"), ("bf16-mixed", "float32")):
        layout = scenario(training={"precision": precision}).workload().layout
        assert {tensor.dtype for tensor in layout.parameters} == {dtype}
    assert len(scenario().workload().layout.update_groups()) == 2
    assert len(scenario(optimizer={"decay": "all"}).workload().layout.update_groups()) == 1


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
    assert (model.config["intermediate_size"], model.attention_width) == (352, 128)


def test_a_cell_becomes_a_scenario_with_its_batch(facts: dict[str, Any]) -> None:
    found = of_cell(facts, "zero2:offload=optimizer")
    assert (found.world_size, found.ranks_per_node, found.micro_batch_size) == (4, 4, 1)
    assert (found.accumulation_steps, found.transport) == (2, "gloo")
    assert (found.options["offload"], found.strategy.zero_stage) == ("optimizer", 2)
    # Without sharding a rank holds weights, gradients and two moments in fp32.
    states = model_states(of_cell(facts, "ddp").workload())  # type: ignore[union-attr]
    assert states.model_state_bytes >= 16 * found.model.parameters


@pytest.mark.parametrize(
    ("label", "nodes", "shards"),
    [("ddp", 1, None), ("fsdp", 1, None), ("fsdp-hybrid", 1, 2), ("fsdp-hybrid", 2, 2),
     ("fsdp-hybrid:shard_size=4", 2, 4)],
)  # fmt: skip
def test_only_a_hybrid_strategy_has_shard_groups_and_an_unknown_one_no_scenario(
    facts: dict[str, Any], label: str, nodes: int, shards: int | None
) -> None:
    found = of_cell(facts, label, nodes)
    assert found.shard_size == shards
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


JOBS = ("vit", "resnet", "t5", "own-model")


def experiment(name: str, *settings: str) -> Experiment:
    return load_experiment(resolve(Path(f"@{name}"), "configs"), settings)


def of_job(asked: Experiment, backend: str, *, torch_device: str = "cpu") -> Scenario:
    layout = batch_layout(asked.training, 2)
    return Scenario.of(
        backend, job_model(asked.job()), with_global_batch(asked.job(), layout), world_size=2,
        ranks_per_node=2, preset="like-for-like", micro_batch_size=layout.micro_batch_size,
        accumulation_steps=layout.accumulation_steps, torch_device=torch_device,
    )  # fmt: skip


def answered(
    asked: Experiment, *labels: str, model: str | None = None, gpus: int = 2, gpu: str = "H100-80"
) -> Answer:
    """What is answered of a model by name, or of the job's, on nodes of 8."""
    planned = load_model(model) if model else job_model(asked.job())
    (found,) = answers(
        question(
            planned, asked, backends=list(labels), world_sizes=[gpus], ranks_per_node=min(8, gpus),
            device=load_hardware().device(gpu),
        )
    )  # fmt: skip
    return found


@pytest.mark.parametrize("name", JOBS)
def test_the_planned_tensors_are_those_that_a_run_builds(name: str) -> None:
    job = experiment(name).job()
    planned, model = job_model(job), build_model(job, model_config(job, load_samples(job).facts))
    built = describe_layout(model, update_groups(model, job.optimizer))
    assert replace(planned.layout, uses=built.uses) == built
    assert bool(planned.layout.uses) == (name == "t5")  # whose embedding three modules share
    assert planned.layout.blocks


@pytest.mark.parametrize("name", JOBS)
def test_states_and_traffic_are_estimated_and_the_rest_is_not_by_name(name: str) -> None:
    asked = experiment(name)
    answer = answered(asked, "ddp", "zero3", "fsdp")
    for row in answer.rows:
        assert row.states is not None
        assert row.sent_bytes > 0
        assert row.memory is row.speed is row.verdict is None
        assert row.memory_unknown == row.speed_unknown
        assert f"of task {asked.task} are not predicted" in str(row.memory_unknown)
    text = " ".join("\n".join(answer_lines([answer])).split())
    assert "memory is not predicted; model states of all fit" in text


def test_states_that_are_too_large_do_not_fit_whatever_the_activations_are() -> None:
    asked = experiment("own-model", "model.arguments={width: 40000}")
    answer = answered(asked, "ddp", "fsdp", gpu="A100-40")
    verdicts = {row.label: row.verdict for row in answer.rows}
    assert verdicts["fsdp"] is None
    assert not verdicts["ddp"].fits
    assert "model states of all but ddp fit" in " ".join(answer_lines([answer]))


@pytest.mark.parametrize(
    ("setting", "said"),
    [("loss.factory=mine:loss", "with loss.factory"), ("model.compile=block", "under model.compile=block"),
     ("optimizer.kind=muon", "under optimizer.kind=muon")],
)  # fmt: skip
def test_a_job_whose_step_no_profile_covers_has_states_alone(setting: str, said: str) -> None:
    model = load_model("gpt2")
    why = str(why_states_alone(model, experiment("default", setting).job()))
    assert why.startswith(f"activations and speed {said} are not predicted")
    assert why.endswith("; model states and traffic are")
    assert why_states_alone(model, experiment("default").job()) is None


@pytest.mark.parametrize("predict", [predict_memory, predict_speed])
def test_an_encoder_has_neither_peak_nor_speed(predict) -> None:
    (row,) = answered(Experiment(), "ddp", model="t5-3b").rows
    with pytest.raises(HarnessError, match="T5ForConditionalGeneration, which is not a causal language mo"):
        predict(row.planned)


def test_a_mixture_of_experts_has_states_and_traffic() -> None:
    answer = answered(Experiment(), "ddp", "zero3", "fsdp", model="qwen3-30b-a3b", gpus=16)
    for row in answer.rows:
        assert row.states is not None
        assert row.sent_bytes > 0
        assert row.memory is row.speed is None
        assert "Qwen3MoeForCausalLM, a mixture of experts, follow from" in str(row.memory_unknown)
    verdicts = {row.label: row.verdict for row in answer.rows}
    assert not verdicts["ddp"].fits
    assert verdicts["fsdp"] is verdicts["zero3"] is None
    shown = " ".join(answer_lines([answer]))
    assert "30,532,122,624 parameters, 3,353,032,704 of them active" in shown


@pytest.mark.parametrize(("name", "backend"), [("own-model", "fsdp"), ("vit", "zero3"), ("t5", "ddp")])
def test_states_bound_what_ranks_on_the_cpu_need(name: str, backend: str) -> None:
    plan = of_job(experiment(name), backend)
    need = at_least(Prediction(scenario=plan), MemoryLimits(host_bytes=10**12)).host_bytes
    assert need >= 2 * sum(term.bytes for term in plan.states.terms)
    assert at_least(Prediction(scenario=plan), MemoryLimits(host_bytes=need)).verdict == "close"
    assert at_least(Prediction(scenario=plan), MemoryLimits(host_bytes=need - 2)).verdict == "does not fit"


def test_the_host_must_hold_a_model_of_a_factory_whole_once_or_on_every_rank() -> None:
    plan = of_job(experiment("own-model"), "fsdp", torch_device="cuda")
    whole = replace(plan, model=replace(plan.model, whole_because="it reads its weights"))
    for asked in (plan, whole):
        part = at_least(Prediction(scenario=asked), MemoryLimits(device_bytes=10**12, host_bytes=10**12))
        assert part.host_bytes == loading_bytes(asked)
        assert part.verdict == "fits"
    assert 4 * plan.model.parameters == loading_bytes(plan)
    assert loading_bytes(whole) == 2 * 4 * plan.model.parameters


@pytest.mark.parametrize("label", ["zero1", "zero3"])
def test_muon_on_flat_partitions_is_refused_in_words(label: str) -> None:
    with pytest.raises(HarnessError, match="Muon needs whole matrices"):
        _ = with_settings(planned(label, 2), {"optimizer.kind": "muon"}).states  # type: ignore[union-attr]


PARAMETERS = 46_702_792_704
LIBRARIES = Experiment.model_validate(
    {"runtime": {"preset": "library-defaults"}, "training": {"precision": "bf16-mixed"}}
)


def test_what_leaves_room_is_offered_where_states_do_not_fit() -> None:
    answer = answered(LIBRARIES, "zero3", "fsdp", "fsdp-grad-op", model="mixtral-8x7b", gpus=8)
    by_name = {one.name: one for one in answer.instead}
    more, offload = by_name[MORE_GPUS], by_name[OFFLOAD]
    # 16 bytes a parameter over 16 ranks: 46.7 of 84.9 GB; over 8 they are 93.4. Under fsdp 8 ranks hold them.
    assert (more.label, more.world_size) == ("zero3", 16)
    assert abs(more.needed_bytes / PARAMETERS - 1) < 1e-3
    assert offload.host_bytes_per_node > 16 * PARAMETERS * 0.999
    # Whole weights in bf16 are 93.4 GB, which fsdp-grad-op keeps after the forward pass.
    assert all("grad-op" not in one.label for one in answer.instead if one.is_roomy)
    lines = answer_lines([answer])
    assert "nothing fits; more GPUs: zero3 on 16 ranks" in " ".join(lines[:3])
    assert any(line.startswith("GB per rank") for line in lines)


def test_states_that_leave_room_call_for_nothing_else_and_even_ones_are_not_explained() -> None:
    labels = ("zero3", "fsdp", "fsdp-grad-op", "zero2")
    answer = answered(LIBRARIES, *labels, model="mixtral-8x7b", gpus=16)
    assert answer.instead == ()
    text = " ".join(answer_lines([answer]))
    assert "fsdp holds 91.8 GB of states and zero3 46.7: FSDP2 cuts the experts" in text
    assert why_uneven({"fsdp": 10, "zero3": 10}, {"num_local_experts": 8}) is None
    assert why_uneven({"fsdp": 10}, {"num_local_experts": 8}) is None
    assert "no more than 8 ranks" in (why_uneven({"fsdp": 20, "zero3": 10}, {"num_local_experts": 8}) or "")
