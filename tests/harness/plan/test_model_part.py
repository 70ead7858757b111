"""The part of a model that a rank computes, and what plans make of it."""

from dataclasses import replace
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.forms import tensor
from harness.forms.pipeline import bubble_share
from harness.forms.tensor import local_workload
from harness.plan.model import decoder, local_config, part_of
from harness.plan.models import load_model
from harness.plan.prediction import predict_memory
from harness.plan.scenario import Scenario
from harness.plan.time.speed import SpeedPrediction, predict_speed
from tests.harness.plan.plans import scenario


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


def test_a_pipeline_waits_for_its_messages_between_nodes_although_its_first_stages_share_one() -> None:
    given = scenario("pp", 64, micro_batch_size=16, options={"stages": 16, "micro_batches": 16})
    given = replace(given, label="pp:micro_batches=16,stages=16")
    assert [rank // 8 for rank in given.mesh.group("pipeline", 0)][:3] == [0, 0, 1]
    assert given.fabric is not None
    slow = replace(given, fabric=replace(given.fabric, bandwidth_per_gpu=1e9))
    sent = [t for t in predicted(slow).communication if t.name.startswith("activations sent")]
    assert all("between nodes" in term.name for term in sent)
    assert predicted(slow).step_seconds > predicted(given).step_seconds


def test_tokens_of_ranks_that_share_samples_count_once() -> None:
    speed = predicted(scenario("tp", 4))
    assert speed.tokens_per_second_per_gpu * speed.step_seconds == pytest.approx(2 * 4096 / 4)


def test_what_layers_hand_on_is_waited_for() -> None:
    speed = predicted(scenario("tp", 4))
    assert speed.exposed_seconds == pytest.approx(speed.communication_seconds)


def test_autotp_cuts_no_embedding_and_halves_an_output_layer_of_its_own() -> None:
    given = scenario("autotp-zero1", 4)
    part, whole = part_of(given.model, given.workload()), given.model
    sizes = {t.name: t.numel for t in part.layout.parameters}
    before = {t.name: t.numel for t in whole.layout.parameters}
    assert sizes["model.embed_tokens.weight"] == before["model.embed_tokens.weight"]
    assert 2 * sizes["lm_head.weight"] == before["lm_head.weight"]
    assert decoder(part).head_rows == pytest.approx(decoder(whole).head_rows / 2, rel=1e-3)
    assert part.layout.parameter_count - part.multiplying_parameters == sizes["model.embed_tokens.weight"]


def test_autotp_under_stage_3_keeps_what_it_gathers_for_cut_layers_until_the_backward_pass() -> None:
    def kept(**changes: bool) -> int:
        of_public = replace(
            scenario("autotp-zero3", 8, preset="like-for-like", **changes), model=load_model("llama-3.1-8b")
        )
        (forward, *_) = predict_memory(of_public).moments
        return sum(term.bytes for term in forward.terms if term.name.startswith("weights of cut layers"))

    model = load_model("llama-3.1-8b").layout
    cut = model.parameter_count - sum(
        t.numel for t in model.parameters if "norm" in t.name or "embed_tokens" in t.name
    )
    assert kept() == pytest.approx(2 * cut / 2, rel=0.07)
    (head,) = (t for t in model.parameters if t.name == "lm_head.weight")
    assert kept(activation_checkpointing=True) == 2 * head.numel // 2


@pytest.mark.parametrize(("label", "name"), [("autotp-zero2", "autotp_local_shape"), ("tp", "local_shape")])
def test_a_model_is_cut_once_for_all_micro_batches(
    label: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recommendation asks for hundreds of batches of the same parts."""
    shape, cut = getattr(tensor, name), []

    def counted(*given: Any) -> tuple[int, ...]:
        cut.append(given)
        found: tuple[int, ...] = shape(*given)
        return found

    monkeypatch.setattr(tensor, name, counted)
    first = scenario(label, 4)
    model = replace(first.model, layout=replace(first.model.layout))
    parts = [
        local_workload(replace(first, model=model, micro_batch_size=size).workload()).layout
        for size in (1, 2, 4)
    ]
    assert len(cut) == len(model.layout.parameters)
    assert parts[0] is parts[1] is parts[2]
