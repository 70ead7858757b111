"""The text of an estimate: short, and without figures that mislead."""

from dataclasses import replace
from typing import Any

from harness.backends.registry import moving_parts
from harness.judge.wording import CellName
from harness.plan.answer import answers
from harness.plan.document import document
from harness.plan.prediction import Prediction
from harness.plan.search import USUAL
from harness.plan.text import answer_lines, without_equal_estimates
from tests.harness.plan.plans import ask

ONE = "training.micro_batch_size=1"
MIXED = ("training.precision=bf16-mixed", "data.sequence_length=4096")


def text(*assignments: str, whole: bool = True, **asked: Any) -> str:
    return "\n".join(answer_lines(answers(ask(*assignments, **asked)), whole=whole, wraps=False))


def labels(shown: str) -> list[str]:
    """The first column of the table of memory."""
    _, _, *rows = shown[shown.index("per rank") : shown.index("\neach row")].splitlines()
    return [row.split()[0] for row in rows]


def cells(table: str, label: str) -> list[str]:
    return next(line for line in table.splitlines() if line.startswith(f"{label} ")).split()


def test_what_is_absent_at_the_deciding_moment_is_no_zero() -> None:
    shown = text("data.sequence_length=2048", backends="ddp fsdp", gpu="A100-80")
    assert "-" in cells(shown[shown.index("per rank") :], "fsdp")
    assert "0.00" not in shown


def test_kinds_and_what_lies_outside_add_up_to_the_total_of_the_first_line() -> None:
    shown = text(*MIXED, backends="ddp", gpu="A100-80")
    *kinds, total, _, left, word = cells(shown[shown.index("per rank") :], "ddp")
    outside = float(shown.split("total: with ")[1].split(" GB")[0])
    held = sum(float(kind) for kind in kinds[1:] if kind != "-")
    assert abs(held + outside - float(total)) < 0.05
    assert abs(float(total) + float(left) - 85.1) < 0.1
    assert f"ddp fits, {total} of 85.1 GB" in shown
    assert word == "fits"
    assert "fits: 10 % of the memory or more is left; close: 2 % or more; barely: less" in shown


def test_what_does_not_fit_has_no_speed_and_what_has_none_says_why() -> None:
    shown = text(*MIXED, "training.micro_batch_size=64", backends="ddp", gpu="A100-80")
    assert cells(shown[shown.index("per step") :], "ddp")[3:] == ["-"] * 8
    assert "-: it does not fit" in shown
    emulated = text("training.precision=fp8", ONE, backends="all", gpu="H100-80", whole=False)
    assert "; no speed: fp8 products are emulated" in emulated.split("\n\n")[0]


def test_rows_through_accelerate_fold_where_all_figures_agree() -> None:
    shown = text(backends="ddp accelerate-ddp zero1 accelerate-zero1", gpu="A100-80")
    assert "accelerate-ddp as ddp, accelerate-zero1 as zero1: the same in all figures" in shown
    assert not any(line.startswith("accelerate-ddp  ") for line in shown.splitlines())


def test_rows_through_accelerate_stay_where_a_figure_differs() -> None:
    native, through = (Prediction(named=CellName(label, 8)) for label in ("ddp", "accelerate-ddp"))
    other = replace(through, memory_unknown="not traced")
    assert without_equal_estimates([native, through]) == ([native], {"accelerate-ddp": "ddp"})
    assert without_equal_estimates([native, other]) == ([native, other], {})
    assert without_equal_estimates([through]) == ([through], {})


def test_the_answer_names_the_few() -> None:
    asked = {"model": "bloom-7b1", "world_sizes": (8,), "gpu": "A100-80"}
    shown = text("training.precision=bf16-mixed", backends="ddp fsdp zero2 zero3", **asked)
    assert "\nall but ddp fit; fastest" in shown


def test_the_first_line_is_what_to_use_and_the_second_the_runner_up() -> None:
    asked = {"model": "llama-3.1-8b", "gpu": "A100-80", "fabric": "HDR200"}
    shown = text(*MIXED, ONE, backends="all", whole=False, world_sizes=(8, 64), **asked)
    rest = shown.splitlines()
    one, other, *_ = labels(shown)
    said = shown.partition("\n\n")[0]
    assert said.startswith(f"8 ranks, micro-batch 1, accumulation 1: use {one}, ")
    assert f" tokens/s a GPU\nRunner-up: {other}, " in said
    assert "\nWith the batch open: " in said
    assert "\n64 ranks, micro-batch 1, accumulation 1: use " in said
    assumed = next(n for n, line in enumerate(rest) if line.startswith("Llama-3.1-8B: 8,030,261,248 param"))
    assert assumed > max(n for n, line in enumerate(rest) if line.startswith("per step"))
    bare = text(*MIXED, backends="all", whole=False).splitlines()[0]
    assert bare.endswith("name a GPU with --gpu to learn what fits and how fast it is")


def test_six_rows_and_what_cannot_run_are_shown_where_no_strategy_is_named() -> None:
    asked = {"model": "llama-3.1-8b", "world_sizes": (8,), "gpu": "A100-80"}
    (answer,) = answers(ask(*MIXED, ONE, backends="all", **asked))
    shown, every = ("\n".join(answer_lines([answer], whole=all_of, wraps=False)) for all_of in (False, True))
    reasons = {row.unsupported for row in answer.rows if row.unsupported}
    assert reasons
    assert all(f"unsupported: {reason}" in shown for reason in reasons)
    six = labels(shown)
    assert len(six) == 6 < len(labels(every))
    more = sum(row.unsupported is None for row in answer.rows) - 6
    assert shown.count(f"{more} more strategies with --all") == 1
    assert "--all" not in every
    rates = [float(cells(shown[shown.index("per step") :], label)[7].replace(",", "")) for label in six]
    equal = shown.split("; fastest ")[1].split(" (equal within 5 %), about ")
    tied = [label for label, rate in zip(six, rates, strict=True) if rate >= 0.95 * max(rates)]
    assert len(tied) > 1
    assert equal[0].replace(" and ", ", ").split(", ") == sorted(tied, key=moving_parts)
    assert six[0] == min(tied, key=moving_parts)
    named = text(*MIXED, backends="ddp zero1 zero2 zero3 fsdp fsdp1 tp", whole=False, **asked)
    assert len(labels(named)) == 7


def test_without_a_gpu_the_usual_six_are_shown() -> None:
    assert labels(text(backends="all", whole=False)) == list(USUAL)


def test_slow_steps_keep_three_digits() -> None:
    shown = text(model="bloom-176b", backends="zero3", world_sizes=(256,), gpu="A100-80", fabric="HDR200")
    least, most = map(float, cells(shown[shown.index("kWh") :], "zero3")[7].split("-"))
    assert 0 < least < most < 100
    assert least != round(least)


def test_logits_that_do_not_fit_come_with_a_chunked_loss() -> None:
    long = (
        "data.sequence_length=131072", "training.activation_checkpointing=true",
        "training.precision=bf16-mixed",
    )  # fmt: skip
    shown = text(*long, model="llama-3.1-8b", backends="zero3", gpu="H100-80")
    assert "a chunked loss" in shown
    assert "a chunked loss" not in text(backends="zero3", gpu="A100-80")


def test_each_number_of_ranks_at_which_nothing_fits_has_its_ways_out() -> None:
    question = ask("data.sequence_length=8192", backends="ddp", world_sizes=(1, 2), per_node=2, gpu="T4")
    found = answers(question)
    assert all(answer.instead for answer in found)
    lines = answer_lines(found, wraps=False)
    for size in ("1 rank", "2 ranks"):
        (answer,) = (line for line in lines if line.startswith(f"{size},"))
        assert f" on {size}, micro-batch 1: " in answer.rpartition("; ")[2]
    assert {one["instead_of_ranks"] for one in document(found)["alternatives"]} == {1, 2}


def test_ranks_that_cut_layers_are_told_from_those_that_cut_the_sequence_too() -> None:
    asked = "fsdp fsdp-tp:tensor=2 tp:tensor=8"
    shown = text(*MIXED, ONE, model="llama-3.1-8b", backends=asked, gpu="A100-80")
    (line,) = (line for line in shown.splitlines() if "whole sequences" in line)
    assert line.startswith("fsdp-tp:tensor=2, tp:tensor=8: each rank keeps")
