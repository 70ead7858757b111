"""Jobs whose activations are not predicted: their tensors, what an estimate says, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.job.batch import batch_layout, with_global_batch
from harness.job.config import load_experiment
from harness.job.experiment import Experiment
from harness.plan.alternatives import MORE_GPUS, OFFLOAD
from harness.plan.answer import Answer, answers
from harness.plan.hardware import load_hardware
from harness.plan.limits import MemoryLimits
from harness.plan.models import load_model, why_uneven
from harness.plan.prediction import Prediction, loading_bytes, predict_memory
from harness.plan.preflight import at_least
from harness.plan.question import ask as question
from harness.plan.scenario import Scenario, job_model, why_states_alone, with_settings
from harness.plan.step_time import predict_speed
from harness.plan.text import answer_lines
from harness.rank.data import load_samples
from harness.rank.models.description import describe_layout
from harness.rank.models.model import build_model, model_config
from harness.rank.models.optimizer import update_groups
from harness.record.workload import closed_form_layout
from harness.shipped import resolve
from tests.harness.plan import plans

JOBS = ("vit", "resnet", "t5", "own-model")


def experiment(name: str, *settings: str) -> Experiment:
    return load_experiment(resolve(Path(f"@{name}"), "configs"), settings)


def scenario(asked: Experiment, backend: str, *, torch_device: str = "cpu") -> Scenario:
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
    built = closed_form_layout(describe_layout(model, update_groups(model, job.optimizer)))
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
    plan = scenario(experiment(name), backend)
    need = at_least(Prediction(scenario=plan), MemoryLimits(host_bytes=10**12)).host_bytes
    assert need >= 2 * sum(term.bytes for term in plan.states.terms)
    assert at_least(Prediction(scenario=plan), MemoryLimits(host_bytes=need)).verdict == "close"
    assert at_least(Prediction(scenario=plan), MemoryLimits(host_bytes=need - 2)).verdict == "does not fit"


def test_the_host_must_hold_a_model_of_a_factory_whole_once_or_on_every_rank() -> None:
    plan = scenario(experiment("own-model"), "fsdp", torch_device="cuda")
    whole = replace(plan, model=replace(plan.model, whole_because="it reads its weights"))
    for asked in (plan, whole):
        part = at_least(Prediction(scenario=asked), MemoryLimits(device_bytes=10**12, host_bytes=10**12))
        assert part.host_bytes == loading_bytes(asked)
        assert part.verdict == "fits"
    assert 4 * plan.model.parameters <= loading_bytes(plan) < loading_bytes(whole)
    assert loading_bytes(whole) == 2 * 4 * plan.model.parameters


@pytest.mark.parametrize("label", ["zero1", "zero3"])
def test_muon_on_flat_partitions_is_refused_in_words(label: str) -> None:
    with pytest.raises(HarnessError, match="Muon needs whole matrices"):
        _ = with_settings(plans.scenario(label, 2), {"optimizer.kind": "muon"}).states  # type: ignore[union-attr]


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


def test_states_that_leave_room_call_for_nothing_else() -> None:
    labels = ("zero3", "fsdp", "fsdp-grad-op", "zero2")
    answer = answered(LIBRARIES, *labels, model="mixtral-8x7b", gpus=16)
    assert answer.instead == ()
    text = " ".join(answer_lines([answer]))
    assert "fsdp holds 91.8 GB of states and zero3 46.7: FSDP2 cuts the experts" in text


def test_even_states_are_not_explained() -> None:
    assert why_uneven({"fsdp": 10, "zero3": 10}, {"num_local_experts": 8}) is None
    assert why_uneven({"fsdp": 10}, {"num_local_experts": 8}) is None
    assert "no more than 8 ranks" in (why_uneven({"fsdp": 20, "zero3": 10}, {"num_local_experts": 8}) or "")
