import pytest

from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.short.title import QUESTIONS, STRONG, WEAK, title
from tests.harness.tell.short.records import growing, repeats
from tests.records import make_model, make_record

JOB = "model with 0.001 M parameters on 2 CPU ranks: "


def of(question: ReportFocus, *records: Record) -> str:
    return title(Comparison(records), question)


@pytest.mark.parametrize("question", ["all", "speed", "memory", "parity"])
def test_job_and_question_are_named(question: ReportFocus) -> None:
    records = [make_record(), make_record(label="ddp"), make_record(label="fsdp")]
    assert of(question, *records) == JOB + QUESTIONS[question]


def test_the_architecture_is_that_of_the_runs() -> None:
    run = make_record(label="ddp").model_copy(update={"model": make_model()})
    assert of("all", run).startswith("LlamaForCausalLM with 0.001 M parameters on 2 CPU ranks: ")


def test_an_option_that_is_varied_is_named() -> None:
    labels = ("ddp", "zero1", "zero1:default_clipping=True")
    records = [make_record(), *(make_record(label=label) for label in labels)]
    assert of("parity", *records) == f"{JOB}does default_clipping change the loss?"
    assert of("memory", *records) == f"{JOB}does default_clipping change memory?"
    more = [make_record(label=f"zero3:{option}=1") for option in ("a", "b", "c")]
    assert of("speed", *records[:2], *more) == f"{JOB}which of 3 options change speed?"
    many = [*records, *(make_record(label=label) for label in ("zero0", "zero2", "zero3", "fsdp", "fsdp1"))]
    assert of("parity", *many) == JOB + QUESTIONS["parity"]


def test_an_option_that_cannot_run_here_is_not_what_is_compared() -> None:
    refused = [make_record(label=f"zero3:{o}", status="unsupported") for o in ("buffer_count=1", "hpz=8")]
    records = [make_record(), make_record(label="ddp"), make_record(label="zero3"), *refused]
    assert of("all", *records) == JOB + QUESTIONS["all"]


def test_deliberate_faults_are_named_where_nothing_else_is_compared() -> None:
    planted = make_record(label="planted-wrong-beta2")
    assert (
        of("all", make_record(), make_record(label="ddp"), planted) == f"{JOB}is planted-wrong-beta2 found?"
    )
    assert of("all", make_record(), make_record(label="fsdp"), planted) == JOB + QUESTIONS["all"]


def test_the_kind_of_scaling_is_named() -> None:
    strong = [r for size in (1, 2) for r in repeats("ddp", 0.5, world_size=size)]
    assert of("scaling", *strong).endswith(f" on 1 and 2 CPU ranks: {STRONG}")
    assert of("scaling", growing("ddp", 1, 0.5), growing("ddp", 2, 0.5)).endswith(f": {WEAK}")
    assert of("scaling", make_record(label="ddp")) == JOB + QUESTIONS["scaling"]


def test_nodes_and_devices_are_named() -> None:
    run = make_record(label="ddp", world_size=4)
    world = run.world.model_copy(update={"device": "cuda", "nodes": 2, "ranks_per_node": 2})
    text = of("all", run.model_copy(update={"world": world}))
    assert " on 4 GPU ranks of 2 nodes: " in text
