from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.document import Items, Line
from harness.tell.short.outline import scope_section
from tests.harness.tell.short.records import repeats
from tests.records import make_record, published


def scope(*records: Record) -> str:
    section = scope_section(Comparison(records), "all")
    assert section is not None
    line, trust = section.blocks
    assert isinstance(line, Line)
    assert isinstance(trust, Items)
    return line.text


def test_machine_job_versions_and_runs_are_one_line() -> None:
    text = scope(make_record(), *repeats("ddp", 0.5, 0.6, 0.7))
    assert text.startswith(
        "2 CPU ranks over gloo, 1 thread per rank, model with 0.001 M parameters, fp32, preset like-for-like"
    )
    assert "torch 2.11.0, deepspeed 0.19.8, 1 to 3 runs of each cell" in text


def test_what_cpu_ranks_do_not_show_is_said_of_them_alone() -> None:
    here = make_record(label="ddp")
    assert scope(here).endswith(
        ": states, bytes and parity should be the same on as many GPUs (untested); peaks and speeds will not."
    )
    world = here.world.model_copy(update={"device": "cuda", "collectives": "nccl"})
    assert scope(here.model_copy(update={"world": world})).endswith("one run of each cell.")


def test_bf16_alone_says_that_there_are_no_masters() -> None:
    text = scope(*published("bloom-560m"))
    assert "559 M parameters, bf16 without fp32 master weights, preset like-for-like" in text


def test_without_runs_there_is_no_scope() -> None:
    assert scope_section(Comparison([]), "all") is None
