"""The part of a model that a rank computes, and what plans make of it."""

from dataclasses import replace

import pytest

from harness.errors import HarnessError
from harness.planning.geometry import decoder
from harness.planning.memory import predict_memory
from harness.planning.models import load_model
from harness.planning.part import local_config, part_of
from harness.planning.scenario import Scenario
from harness.planning.speed import SpeedPrediction, predict_speed
from harness.theory.bubble import bubble_share
from tests.harness.planning.plans import scenario


def predicted(given: Scenario) -> SpeedPrediction:
    speed = predict_speed(given)
    assert speed is not None
    return speed


def test_cut_layers_have_a_part_of_every_product_and_whole_hidden_states() -> None:
    given = scenario("tp", 4)
    part = decoder(part_of(given.model, given.workload()))
    whole = decoder(given.model)
    assert part.hidden == whole.hidden
    assert part.attention_width == whole.attention_width // 4
    assert part.head_rows == pytest.approx(whole.head_rows / 4, rel=1e-3)
    products = sum(m.rows * m.columns * m.count for m in part.matrices)
    assert products == sum(m.rows * m.columns * m.count for m in whole.matrices) // 4


def test_the_stages_of_a_pipeline_make_the_model() -> None:
    given = scenario("pp", 4, micro_batch_size=4)
    parts = [part_of(given.model, given.workload(rank)) for rank in given.unlike_ranks]
    assert sum(part.layers for part in parts) == given.model.layers
    assert sum(part.parameters for part in parts) == given.model.parameters
    assert sum(part.multiplying_parameters for part in parts) == given.model.multiplying_parameters


def test_a_configuration_is_cut_by_heads_and_channels() -> None:
    config = local_config(load_model("llama-3.1-8b").config, 8)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 1, 128)
    assert (config["hidden_size"], config["intermediate_size"]) == (4096, 1792)
    with pytest.raises(HarnessError, match="llama, mistral, qwen2, not for gpt2"):
        local_config(load_model("gpt2").config, 2)


def test_peaks_of_cut_layers_fall_with_the_ranks_but_not_as_fast() -> None:
    def peak(ranks: int) -> int:
        of_public = replace(scenario("tp", ranks), model=load_model("llama-3.1-8b"))
        return predict_memory(of_public).peak_bytes

    assert peak(8) < peak(4) < peak(2) < 4 * peak(8)


def test_the_bubble_is_a_share_of_the_passes() -> None:
    speed = predicted(scenario("pp", 4, micro_batch_size=8, options={"micro_batches": 8}))
    bubble = next(term.seconds for term in speed.computing if term.name == "bubble")
    updated = ("optimizer step", "bubble")
    passes = sum(term.seconds for term in speed.computing if term.name not in updated)
    assert bubble / (bubble + passes) == pytest.approx(bubble_share(ranks=4, micro_batches=8), rel=1e-6)


def test_tokens_of_ranks_that_share_samples_count_once() -> None:
    speed = predicted(scenario("tp", 4))
    assert speed.tokens_per_second_per_gpu * speed.step_seconds == pytest.approx(2 * 4096 / 4)


def test_what_layers_hand_on_is_waited_for() -> None:
    speed = predicted(scenario("tp", 4))
    assert speed.exposed_seconds == pytest.approx(speed.communication_seconds)
