"""What a search answers, in words and as a document; predictions are invented."""

import json
from dataclasses import replace

import pytest

from harness.backends import registry
from harness.errors import HarnessError
from harness.plan.answer import Answer, answers
from harness.plan.document import recommendation
from harness.plan.prediction import MemoryPrediction, Predictors
from harness.plan.question import Question
from harness.plan.scenario import Scenario
from harness.plan.search import Found
from harness.plan.text import answer_lines
from harness.plan.time.speed import SpeedPrediction
from tests.harness.plan.invented import memory, predictors, question, speed, trace_nothing


def recommend(asked: Question, by: Predictors) -> Answer:
    (answer,) = answers(asked, by=by)
    return answer


def found_in(answer: Answer) -> Found:
    assert answer.found is not None
    return answer.found


def text_of(answer: Answer) -> list[str]:
    return answer_lines([answer], wraps=False)


def cells(lines: list[str]) -> str:
    """All of it, with cells of tables on one line."""
    return " ".join(" ".join(lines).split())


def test_the_answer_comes_first_and_the_runner_up_second() -> None:
    lines = text_of(recommend(question(), predictors()))
    # 1 s x 1.025 + 0.2 s / 2 for 400 tokens; 5.5 MB of states and 0.4 MB of activations.
    assert lines[0] == "Use zero1, micro-batch 4, accumulation 1: 0.0059 of 0.01 GB, about 360 tokens/s a GPU"
    assert lines[1].startswith("Runner-up: zero2, micro-batch 4")
    assert not lines[2].startswith("Close to the limit")
    assert any(line.startswith("typical error, full training under zero1/zero2: ") for line in lines)
    assert any(line.split()[:4] == ["zero1", "4", "1", "no"] for line in lines)


def test_after_the_tables_come_the_others_what_was_not_tried_and_what_to_do_next() -> None:
    text = cells(text_of(recommend(question(), predictors())))
    parts = (
        "Why not the others reason", "ddp does not fit: 0.016 GB", "Not considered reason",
        "backends shard as others do (--json names them)", "single one process", "Other parallelism why",
        "data parallelism alone is right", "speed rests on constants: invented",
        "Measure the best ones on one node", "harness compare", "Measure the best ones under Slurm",
        "invented: 1,000,000 parameters (a test)", "100, bf16-mixed, clipping 1, 3,200 tokens per step",
    )  # fmt: skip
    places = [text.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


def test_what_is_close_or_tight_is_uncertain() -> None:
    answer = recommend(question(), predictors(per_token=19_000, communication=0.01, small=1.0))
    said = [f"{what}: {why}" for what, why in answer.uncertain]
    assert any("less than 10 % of the device free" in line for line in said)
    alike = recommend(question(), predictors(communication=0.01))
    assert any("which only a measurement can tell" in why for _, why in alike.uncertain)


def test_nothing_that_fits_is_said_with_what_would_help() -> None:
    lines = text_of(recommend(question(tokens=800), predictors(per_token=8_000_000)))
    assert lines[0] == "nothing fits"
    assert "data parallelism alone is the wrong tool: does not fit" in cells(lines)
    assert any(line.startswith("context parallelism over 16 ") for line in lines)
    assert not any(line.startswith("Measure") for line in lines)


def test_without_samples_for_all_gpus_nothing_is_ranked() -> None:
    lines = text_of(recommend(question(gpus=64, tokens=300), predictors()))
    assert lines[0] == "no configuration can be ranked"
    assert "data parallelism alone is the wrong tool: too few samples" in cells(lines)


def test_the_document_has_all_that_is_said() -> None:
    answer = recommend(question(), predictors())
    document = json.loads(json.dumps(recommendation(answer)))
    assert document["data_parallel_is_right"] is True
    assert [row["backend"] for row in document["best"]] == [c.label for c in answer.best]
    best = document["best"][0]
    assert best["device_bytes"] + best["margin_bytes"] == 10_000_000
    # 400 tokens of each GPU in a step; 1e9 tokens at that rate; 100 W.
    hours = 1e9 / (400 / best["step_seconds"]) / 3600
    assert best["gpu_hours_per_billion_tokens"] == pytest.approx(hours)
    assert best["kilowatt_hours_per_billion_tokens"] == pytest.approx(hours * 0.1)
    assert {row["backend"] for row in document["not_chosen"]} >= {"ddp", "fsdp"}


def test_what_is_tight_names_the_fastest_that_is_not() -> None:
    # 2 MB of states on 8 ranks and 7.6 MB of activations: 4 % of the device is free.
    answer = recommend(question(), predictors(per_token=19_000, communication=0.0, small=1.0))
    safe = found_in(answer).with_room
    assert answer.best[0].is_tight
    assert safe is not None
    assert not safe.is_tight
    lines = text_of(answer)
    assert lines[2].startswith(f"Close to the limit: less than 10 % is free. Safe: {safe.label}, ")
    assert any(line.split()[:1] == [answer.best[0].label] and "close" in line.split() for line in lines)


def test_a_faster_one_that_is_not_taken_is_named() -> None:
    roomy = recommend(question(), predictors(per_token=19_000, communication=0.0))
    best, fastest = roomy.best[0], found_in(roomy).fastest
    assert fastest is not None
    first, _, faster, *_ = text_of(roomy)
    assert first.startswith(f"Use {best.label}, micro-batch 2, ")
    assert faster.startswith("Faster by ")
    assert f": {fastest.label}, micro-batch 4, " in faster
    simple = recommend(question(), predictors(states=1, communication=0.01))
    lines = text_of(simple)
    assert lines[0].startswith("Use ddp, ")
    assert (found_in(simple).fastest is None) == (not lines[2].startswith("Faster by "))


def test_one_gpu_on_which_only_offload_has_a_prediction_is_answered() -> None:
    def refuses_single(scenario: Scenario) -> MemoryPrediction:
        if scenario.label == "single":
            raise HarnessError("no form")
        found: MemoryPrediction = memory()(scenario)
        return found

    given = Predictors(memory=refuses_single, speed=speed(), ahead=trace_nothing)
    answer = recommend(question(gpus=1, tokens=400), given)
    assert answer.best
    assert all(c.offload != "none" for c in answer.best)
    assert answer.advice is not None
    assert answer.advice.case == "only offload fits"


def test_what_barely_fits_is_not_among_the_best() -> None:
    # 2 MB of states on 8 ranks and 7.92 MB of activations without checkpointing: 0.8 % is free.
    answer = recommend(question(), predictors(per_token=19_800, communication=0.0))
    assert answer.best
    assert not any(c.barely_fits for c in answer.best)


def test_the_other_presets_winner_is_named_if_it_differs() -> None:
    def fast_alike(scenario: Scenario) -> SpeedPrediction:
        found: SpeedPrediction = speed()(scenario)
        alike = scenario.preset == "like-for-like" and scenario.label == "fsdp"
        return replace(found, tokens_per_second_per_gpu=1000.0) if alike else found

    given = Predictors(memory=memory(), speed=fast_alike, ahead=trace_nothing)
    for preset, own, other in (
        ("library-defaults", "zero1", "like-for-like: fsdp"),
        ("like-for-like", "fsdp", "library-defaults: zero1"),
    ):
        answer = recommend(question(f"runtime.preset={preset}"), given)
        lines = text_of(answer)
        assert lines[0].startswith(f"Use {own}, ")
        assert any(line.startswith(f"With runtime.preset={other}, ") for line in lines)
        assert recommendation(answer)["other_preset"]["best"]["backend"] == other.rpartition(" ")[2]
        assert all(f"--set runtime.preset={preset}" in line for line in answer.commands.compare[:-1])


@pytest.mark.parametrize("per_token", [1_000, 19_800])
@pytest.mark.parametrize("communication", [0.01, 2.0])
def test_data_parallelism_is_not_called_right_where_the_best_divides_samples(
    per_token: int, communication: float
) -> None:
    answer = recommend(question(), predictors(per_token=per_token, communication=communication))
    shared = registry.mesh_of(answer.best[0].label, 8).shares_samples
    assert not (shared and answer.advice is None)
