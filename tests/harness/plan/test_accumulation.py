"""Which strategies can reduce in every micro-step; answers name one where whole gradients do not fit."""

from typing import Any

import pytest

from harness.plan.answer import estimate
from harness.plan.prediction import MemoryPrediction, Moment, Prediction, Predictors
from harness.plan.scenario import Scenario
from harness.plan.search import reducing_each
from tests.harness.plan.asking import ask, states
from tests.harness.plan.invented import speed, term

SETTINGS = ("training.micro_batch_size=1", "training.accumulation_steps=16", "training.precision=bf16-mixed")


@pytest.mark.parametrize(
    ("label", "each"),
    [
        ("fsdp", "fsdp:sync_each_batch=True"),
        ("fsdp:reshard=2", "fsdp:reshard=2,sync_each_batch=True"),
        ("fsdp1-hybrid:shard_size=4", "fsdp1-hybrid:shard_size=4,sync_each_batch=True"),
        ("fsdp:sync_each_batch=true", None),
        ("fsdp-tp:tensor=2", "fsdp-tp:sync_each_batch=True,tensor=2"),
        ("fsdp1-no-shard", None),
        ("ddp", None),
        ("zero3", None),
    ],
)
def test_fsdp_alone_can_shard_what_adds_up(label: str, each: str | None) -> None:
    assert reducing_each(label) == each


def answers(*settings: str, **asked: Any) -> dict[str, Prediction]:
    """On GPUs that whole gradients do not fit into."""

    def memory(scenario: Scenario) -> MemoryPrediction:
        whole = scenario.accumulation_steps > 1 and not scenario.options.get("sync_each_batch")
        moment = Moment(name="backward", terms=(term("gradients", 90 * 10**9 if whole else 10 * 10**9),))
        return MemoryPrediction(moments=(moment,), host_bytes_per_node=0)

    question = ask(*SETTINGS, *settings, gpu="H100-80", **asked)
    return {row.label: row for row in estimate(question, Predictors(memory=memory, speed=speed()))}


def test_an_estimate_of_every_strategy_has_the_one_that_fits() -> None:
    found = answers(backends="all")
    each = found["fsdp:sync_each_batch=True"]
    assert each.verdict.fits
    assert found["fsdp"].reduced_each_time is None
    assert "fsdp:sync_each_batch=True" not in answers("training.accumulation_steps=1", backends="all")


def test_an_estimate_of_one_strategy_says_what_would_fit() -> None:
    found = answers(backends="fsdp zero3")
    assert list(found) == ["fsdp", "zero3"]
    text = found["fsdp"].reduced_each_time
    assert "fsdp:sync_each_batch=True reduces them in each" in text
    assert "10.0 of 84.9 GB" in text
    assert text.endswith("sent 16 times")
    assert found["zero3"].reduced_each_time is None


@pytest.mark.parametrize(
    "backend", ["fsdp", "fsdp-grad-op", "fsdp-hybrid:shard_size=4", "fsdp1", "fsdp1-grad-op"]
)
def test_gradients_are_sent_in_each_micro_step(backend: str) -> None:
    def sent(label: str, op: str) -> float:
        lines = states(*SETTINGS, backends=label).traffic
        return sum(line.sent_bytes for line in lines if line.collective.op == op)

    each = reducing_each(backend)
    assert each is not None
    assert sent(each, "reduce_scatter") == pytest.approx(16 * sent(backend, "reduce_scatter"))
    gathered = sent(each, "all_gather") / sent(backend, "all_gather")
    # FSDP1 without resharding keeps weights from one micro-step to the next where it reduces nothing.
    assert gathered == pytest.approx(16 if backend == "fsdp1-grad-op" else 1, rel=0.02)
