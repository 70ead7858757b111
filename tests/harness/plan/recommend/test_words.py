import json
from dataclasses import replace

from harness.backends import registry
from harness.errors import HarnessError
from harness.plan.prediction import MemoryPrediction, Predictors
from harness.plan.recommend.recommendation import Typed, recommend
from harness.plan.recommend.words import recommendation_lines
from harness.plan.scenario import Scenario
from harness.plan.time.speed import SpeedPrediction
from tests.harness.plan.recommend.invented import memory, predictors, question, speed, trace_nothing


def test_the_best_come_first_and_then_why_not_the_others() -> None:
    answer = recommend(question(), Typed(), predictors())
    lines = "\n".join(recommendation_lines(answer)).splitlines()
    assert lines[2] == (
        "invented (0.001e9 parameters) on 8 x G-10 (8 a node), bf16-mixed, 3,200 tokens per step in "
        "samples of 100, libraries set alike (runtime.preset=like-for-like)"
    )
    assert any(line.split()[:3] == ["1", "zero1", "4"] for line in lines)
    assert lines.index("Why not the others") < next(
        i for i, x in enumerate(lines) if x.startswith("- ddp: does not")
    )
    same, single, *_ = lines[lines.index("Not considered") + 1 :]
    assert same.endswith(" backends that shard as others do (--json names them)")
    assert single == "- single: one process"
    assert any(line.startswith("Data parallelism is the right tool here") for line in lines)
    assert "Measure the best ones on one node" in lines
    assert "- speed rests on constants: invented" in lines


def test_what_is_close_or_tight_is_uncertain() -> None:
    answer = recommend(question(), Typed(), predictors(per_token=19_000, communication=0.01, small=1.0))
    assert any("which only a measurement can tell" in line for line in answer.uncertain)
    assert any("less than 10 % of the device free" in line for line in answer.uncertain)


def test_nothing_that_fits_is_said_with_what_would_help() -> None:
    answer = recommend(question(tokens=800), Typed(), predictors(per_token=8_000_000))
    lines = list(recommendation_lines(answer))
    assert "nothing fits" in lines
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


def test_the_answer_comes_first_and_the_runner_up_second() -> None:
    lines = list(recommendation_lines(recommend(question(), Typed(), predictors())))
    # 1 s x 1.025 + 0.2 s / 2 for 400 tokens; 5.5 MB of states and 0.4 MB of activations.
    assert lines[0] == (
        "Use zero1, micro-batch 4, accumulation 1: 0.0059 of 0.01 GB, about 360 tokens/s a GPU, "
        "with libraries set alike"
    )
    assert lines[1].startswith("Runner-up: zero2, micro-batch 4")
    assert not lines[3].startswith("Close to the limit")
    assert any(line.startswith("typical error, full training under zero1/zero2: ") for line in lines)


def test_what_is_tight_names_the_fastest_that_is_not() -> None:
    # 2 MB of states on 8 ranks and 7.6 MB of activations: 4 % of the device is free.
    answer = recommend(question(), Typed(), predictors(per_token=19_000, communication=0.0, small=1.0))
    lines = "\n".join(recommendation_lines(answer)).splitlines()
    assert answer.best[0].is_tight
    assert answer.variants.with_room is not None
    assert not answer.variants.with_room.is_tight
    assert lines[3].startswith(
        f"Close to the limit: less than 10 % is free. Safe alternative: {answer.variants.with_room.label}"
    )
    assert any(line.split()[:2] == ["1", answer.best[0].label] and "close" in line.split() for line in lines)


def test_what_leaves_room_says_how_much_faster_the_fuller_one_is() -> None:
    answer = recommend(question(), Typed(), predictors(per_token=19_000, communication=0.0))
    best, fastest = answer.best[0], answer.variants.fastest
    assert fastest is not None
    lines = list(recommendation_lines(answer))
    assert lines[0].startswith(f"Use {best.label}, micro-batch 2, ")
    assert lines[3].startswith(
        f"{best.label} leaves more room: {fastest.label} with micro-batch 4 is predicted"
    )
    alike = replace(best, scenario=replace(best.scenario, micro_batch_size=4))
    of_one = replace(answer, variants=replace(answer.variants, fastest=alike))
    assert list(recommendation_lines(of_one))[3].startswith(
        f"{best.label} with micro-batch 2 leaves more room: {best.label} with micro-batch 4 is predicted"
    )


def test_one_gpu_on_which_only_offload_has_a_prediction_is_answered() -> None:
    def refuses_single(scenario: Scenario) -> MemoryPrediction:
        if scenario.label == "single":
            raise HarnessError("no form")
        found: MemoryPrediction = memory()(scenario)
        return found

    given = Predictors(memory=refuses_single, speed=speed(), ahead=trace_nothing)
    answer = recommend(question(gpus=1, tokens=400), Typed(), given)
    assert answer.best
    assert all(c.offload != "none" for c in answer.best)
    assert answer.advice is not None
    assert answer.advice.case == "only offload fits"


def test_what_barely_fits_is_not_among_the_best() -> None:
    # 2 MB of states on 8 ranks and 7.92 MB of activations without checkpointing: 0.8 % is free.
    answer = recommend(question(), Typed(), predictors(per_token=19_800, communication=0.0))
    assert answer.best
    assert not any(c.verdict.barely_fits for c in answer.best)


def test_the_first_line_names_the_preset_and_the_other_presets_winner_is_named_if_it_differs() -> None:
    def fast_alike(scenario: Scenario) -> SpeedPrediction:
        found = speed()(scenario)
        alike = scenario.preset == "like-for-like" and scenario.label == "fsdp"
        return replace(found, tokens_per_second_per_gpu=1000.0) if alike else found

    given = Predictors(memory=memory(), speed=fast_alike, ahead=trace_nothing)
    by_default = recommend(question("runtime.preset=library-defaults"), Typed(), given)
    lines = list(recommendation_lines(by_default))
    assert lines[0].startswith("Use zero1, ")
    assert lines[0].endswith(", with the libraries' own defaults")
    assert lines[2].endswith("each library's own defaults (runtime.preset=library-defaults)")
    assert lines[3].startswith("With runtime.preset=like-for-like instead: fsdp, ")
    assert by_default.as_json()["other_preset"]["best"]["backend"] == "fsdp"
    assert all("--set runtime.preset=library-defaults" in line for line in by_default.commands.compare[:-1])
    alike = list(recommendation_lines(recommend(question(), Typed(), given)))
    assert alike[0].startswith("Use fsdp, ")
    assert alike[3].startswith("With runtime.preset=library-defaults instead: zero1, ")


def test_a_faster_one_with_more_moving_parts_is_named_beside_the_recommended_one() -> None:
    answer = recommend(question(), Typed(), predictors(states=1, communication=0.01))
    lines = list(recommendation_lines(answer))
    assert lines[0].startswith("Use ddp, ")
    fastest = answer.variants.fastest
    assert (fastest is None) == ("the fewest moving parts" not in lines[3])


def test_no_sentence_calls_data_parallelism_right_where_the_recommended_one_divides_samples() -> None:
    for per_token in (1_000, 19_800):
        for communication in (0.01, 2.0):
            given = predictors(per_token=per_token, communication=communication)
            answer = recommend(question(), Typed(), given)
            shared = registry.mesh_of(answer.best[0].label, 8).shares_samples
            assert not (shared and answer.advice is None), (per_token, communication)
