from dataclasses import replace
from typing import Any

import pytest

from harness.plan.answer import Advice, advise, fewer_tokens, guide_line, next_power_of_two
from harness.plan.prediction import MemoryPrediction, Moment, Predictors
from harness.plan.question import Question
from harness.plan.scenario import Scenario
from harness.plan.search import Found, search
from tests.harness.plan.invented import predictors, question, speed, term


def advice(asked: Question, **changes: Any) -> Advice | None:
    given = predictors(**changes)
    found = search(asked, given)
    alone = (
        tuple(one for one in some if not one.planned.mesh.shares_samples)
        for some in (found.fitting, found.too_large)
    )
    return advise(asked, Found(**dict(zip(("fitting", "too_large"), alone, strict=True))), given)


def remedies(found: Advice | None) -> dict[str, int | None]:
    return {remedy.tool: remedy.degree for remedy in found.remedies}


def test_data_parallelism_is_right_where_the_model_fits_and_little_is_exposed() -> None:
    assert advice(question()) is None


def test_states_that_are_too_large_need_more_gpus() -> None:
    # 800 MB of states and 4 samples a rank: 12.5 MB on 64 GPUs are too much, 6.25 on 128 are not.
    asked = question(gpus=16, tokens=512 * 100, checkpointing=(True,))
    found = advice(asked, states=800, per_token=1)
    assert found.case == "only offload fits"
    assert remedies(found)["more GPUs"] == 128
    assert "states 50.0" not in found.figures
    assert "; each holds less of the states" in found.remedies[0].reason


def test_a_sample_that_is_too_long_needs_context_parallelism() -> None:
    # 100 tokens of 0.5 MB, a tenth of it with recomputation: 5 MB; 1 MB a token: 10 MB and states of 2.
    found = advice(question(tokens=800), per_token=1_000_000)
    assert found.case == "only offload fits"
    assert remedies(found)["context"] == 2
    longer = advice(question(tokens=800), per_token=4_000_000)
    assert longer.case == "does not fit"
    assert "more GPUs" not in remedies(longer)
    assert remedies(longer)["context"] == 8
    # 40 MB and 2 of states, of 10.
    assert remedies(longer)["tensor"] == 8


@pytest.mark.costly
def test_gradients_that_accumulate_need_fewer_tokens() -> None:
    def accumulating(scenario: Scenario) -> MemoryPrediction:
        kept = 20_000_000 if scenario.accumulation_steps > 1 else 3_000_000 * scenario.micro_batch_size
        terms = (term("gradients", kept),)
        return MemoryPrediction(moments=(Moment(name="forward/backward", terms=terms),))

    given = Predictors(memory=accumulating, speed=speed())
    asked = question()
    found = search(asked, given)
    helped = advise(asked, found, given)
    assert remedies(helped)["smaller batch"] is None
    assert "fits at 800 tokens: one sample a GPU" in helped.remedies[0].reason  # type: ignore[union-attr]
    assert "a smaller micro-batch needs more" in found.rejected(())[0][1]


def test_what_a_node_cannot_divide_needs_pipeline_stages() -> None:
    found = advice(question(tokens=800), per_token=40_000_000)
    assert found.case == "does not fit"
    assert (remedies(found)["tensor"], remedies(found)["pipeline"]) == (8, 8)


def test_fewer_samples_than_gpus_divide_each_sample() -> None:
    found = advice(question(gpus=16, tokens=500))
    assert found.case == "too few samples"
    assert remedies(found) == {"fewer GPUs": 5, "larger batch": None}
    assert found.figures.startswith("500 tokens per step are 5 samples of 100 tokens, fewer than 16 GPUs")


def test_remedies_that_divide_samples_are_those_that_are_predicted_to_fit() -> None:
    asked = question(gpus=16, tokens=800)
    found = search(asked, predictors())
    assert {c.backend for c in (*found.fitting, *found.too_large)} >= {"cp", "fsdp-cp", "ulysses-zero3"}
    helped = advise(asked, found, predictors())
    assert helped.case == "too few samples"
    best = next(c for c in found.fitting if c.planned.strategy.sequence)
    (context,) = (r for r in helped.remedies if r.tool == "context")
    assert context.degree == best.planned.options["sequence"]
    assert context.reason.startswith(f"{best.label} fits at micro-batch {best.planned.micro_batch_size}")
    none = advise(asked, Found(too_large=found.too_large), predictors())
    assert remedies(none) == {"fewer GPUs": 8, "larger batch": None}


def test_data_parallelism_that_ranks_which_share_samples_outrun_is_named_slower() -> None:
    asked = question()
    found = search(asked, predictors())
    plain, (shared, *_) = found.fitting[0], [c for c in found.fitting if c.planned.strategy.sequence]
    assert plain.speed is not None
    fast = replace(shared, speed=replace(plain.speed, tokens_per_second_per_gpu=1e6))
    helped = advise(asked, Found(fitting=(plain, fast)), predictors())
    assert (helped.case, remedies(helped)) == ("slower", {"context": fast.planned.options["sequence"]})
    assert advise(asked, Found(fitting=(plain, replace(fast, speed=plain.speed))), predictors()) is None


def test_exposed_communication_needs_more_tokens_or_fewer_data_parallel_ranks() -> None:
    # ZeRO-1 communicates 2 x 2 s and computes 1.025 s; half of it is exposed.
    found = advice(question(gpus=64, tokens=64 * 400), communication=2.0)
    assert found.case == "communication-bound"
    assert remedies(found) == {"larger batch": None, "tensor": 4}
    assert "1,561 tokens a GPU and step, not 400" in found.remedies[0].reason
    assert found.remedies[1].reason.startswith("16 data-parallel ranks with 4 x the tokens each")


def test_communication_beyond_what_a_node_divides_needs_pipeline_stages() -> None:
    found = advice(question(gpus=64, tokens=64 * 400), communication=20.0)
    assert remedies(found) == {"larger batch": None, "tensor": 8, "pipeline": 8}


def test_a_little_exposed_communication_is_no_reason() -> None:
    # Of ZeRO-1: 0.2 x 2 / 2 = 0.2 s of 1.225 s.
    assert advice(question(), communication=0.2) is None
    assert advice(question(), communication=0.3) is not None


def test_the_guides_ratio_stands_beside_the_exposed_share() -> None:
    found = search(question(gpus=1024, tokens=1024 * 100), predictors())
    line = guide_line(question(gpus=1024, tokens=1024 * 100), found.fitting)
    assert "1,024 GPUs (beyond the guide's 512)" in line
    assert "at peak rates 0.25" in line
    assert line.endswith("the guide's own ratio 0.5")
    assert guide_line(question(), []) is None


def test_powers_of_two() -> None:
    assert [next_power_of_two(value) for value in (0.1, 1, 1.01, 2, 3, 4.5)] == [1, 1, 2, 2, 4, 8]


def test_fewer_tokens_are_fewer_than_those_of_shared_samples() -> None:
    plenty, shared = (
        list(fewer_tokens(question(gpus=16, tokens=tokens), predictors())) for tokens in (6400, 700)
    )
    assert any(line.startswith("--tokens-per-step 1600: one sample a GPU") for line in plenty)
    assert not any("--tokens-per-step 1600" in line for line in shared)  # 600 are compared
