from __future__ import annotations

from dataclasses import replace

from harness.plan.leading import figures
from harness.plan.prediction import Prediction
from harness.plan.time.speed import predict_speed
from harness.plan.trust import trust_in
from tests.harness.plan.plans import scenario
from tests.harness.plan.recommend.invented import memory


def offloading(accumulation: int) -> Prediction:
    plan = scenario("zero2", 2, options={"offload": "optimizer"})
    plan = replace(plan, accumulation_steps=accumulation)
    return Prediction(scenario=plan, memory=memory()(plan), speed=predict_speed(plan))


def test_a_rate_with_offload_names_the_tokens_over_which_the_host_updates_once() -> None:
    few, many = offloading(1), offloading(100)
    assert few.speed is not None
    assert many.speed is not None
    assert " at 16,384 tokens a step, of which the host's update takes " in figures(few)
    assert " at 1,638,400 tokens a step, of which the host's update takes " in figures(many)
    assert few.speed.host_update_share > 0.5 > many.speed.host_update_share
    assert many.tokens_per_second_per_gpu > 2 * few.tokens_per_second_per_gpu
    plain = scenario("zero2", 2)
    on_device = Prediction(scenario=plain, memory=memory()(plain), speed=predict_speed(plain))
    assert "host" not in figures(on_device)


def test_the_hosts_rate_is_the_largest_assumption_only_where_it_decides() -> None:
    plan = scenario("zero2", 2, options={"offload": "optimizer"})
    assert "host memory" in (trust_in(plan).assumption or "")
    assert "host memory" in (trust_in(plan, update_share=0.5).assumption or "")
    assert "host memory" not in (trust_in(plan, update_share=0.02).assumption or "")
