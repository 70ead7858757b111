import json

from harness.planning.recommend.commands import Typed
from harness.planning.recommend.recommendation import recommend
from harness.planning.recommend.words import recommendation_lines

from .invented import predictors, question


def test_the_best_come_first_and_then_why_not_the_others() -> None:
    answer = recommend(question(), Typed(), predictors())
    lines = "\n".join(recommendation_lines(answer)).splitlines()
    assert lines[0] == (
        "invented (0.001e9 parameters) on 8 x G-10 (8 a node), bf16-mixed, 3,200 tokens per step in "
        "samples of 100"
    )
    assert any(line.split()[:3] == ["1", "zero1", "4"] for line in lines)
    assert lines.index("Why not the others") < next(
        i for i, x in enumerate(lines) if x.startswith("- ddp: does not")
    )
    assert any(line.startswith("- not looked at: single (one process); ") for line in lines)
    assert any(line.startswith("Data parallelism is the right tool here") for line in lines)
    assert "Measure the best ones on one node" in lines
    assert "- speed rests on constants: invented" in lines


def test_what_is_close_or_tight_is_uncertain() -> None:
    answer = recommend(question(), Typed(), predictors(per_token=19_000, communication=0.01))
    assert any("only a measurement ranks them" in line for line in answer.uncertain)
    assert any("less than 10 % of the device free" in line for line in answer.uncertain)


def test_nothing_that_fits_is_said_with_what_would_help() -> None:
    answer = recommend(question(tokens=800), Typed(), predictors(per_token=8_000_000))
    lines = list(recommendation_lines(answer))
    assert "no configuration fits" in lines
    assert "Data parallelism alone is the wrong tool: does not fit" in lines
    assert any(line.startswith("- context parallelism over 16: ") for line in lines)
    assert not any(line.startswith("Measure") for line in lines)


def test_without_samples_for_all_gpus_nothing_is_ranked() -> None:
    lines = list(recommendation_lines(recommend(question(gpus=64, tokens=300), Typed(), predictors())))
    assert "no configuration can be ranked" in lines
    assert "Data parallelism alone is the wrong tool: too few samples" in lines


def test_the_document_has_all_that_is_said() -> None:
    answer = recommend(question(), Typed(), predictors())
    document = json.loads(json.dumps(answer.as_json()))
    assert document["data_parallel_is_right"] is True
    assert [row["backend"] for row in document["best"]] == [c.label for c in answer.best]
    best = document["best"][0]
    assert best["device_bytes"] + best["margin_bytes"] == 10_000_000
    # 400 tokens of each GPU in a step; 1e9 tokens at that rate; 100 W.
    hours = 1e9 / (400 / best["step_seconds"]) / 3600
    assert abs(best["gpu_hours_per_billion_tokens"] / hours - 1) < 1e-9
    assert abs(best["kilowatt_hours_per_billion_tokens"] / (hours * 0.1) - 1) < 1e-9
    assert {row["backend"] for row in document["not_chosen"]} >= {"ddp", "fsdp"}


def test_the_answer_is_one_sentence_after_the_title() -> None:
    lines = list(recommendation_lines(recommend(question(), Typed(), predictors())))
    # 1 s x 1.025 + 0.2 s / 2 for 400 tokens; 5.5 MB of states and 0.4 MB of activations.
    assert lines[1] == "Use zero1, micro-batch 4, accumulation 1: 356 tokens/s per GPU, 0.0059 of 0.01 GB"
    assert not lines[2].startswith("Tight")


def test_what_is_tight_names_the_fastest_that_is_not() -> None:
    # 2 MB of states on 8 ranks and 7.6 MB of activations: 4 % of the device is free.
    answer = recommend(question(), Typed(), predictors(per_token=19_000, communication=0.0))
    lines = "\n".join(recommendation_lines(answer)).splitlines()
    assert answer.best[0].is_tight
    assert answer.ranking.with_room is not None
    assert not answer.ranking.with_room.is_tight
    assert lines[2].startswith(
        f"Tight: less than 10 % is free. Safe alternative: {answer.ranking.with_room.label}"
    )
    assert any(line.split()[:2] == ["1", answer.best[0].label] and "tight" in line.split() for line in lines)


def test_what_barely_fits_is_not_among_the_best() -> None:
    # 2 MB of states on 8 ranks and 7.92 MB of activations without checkpointing: 0.8 % is free.
    answer = recommend(question(), Typed(), predictors(per_token=19_800, communication=0.0))
    assert answer.best
    assert not any(c.verdict.barely_fits for c in answer.best)
