from __future__ import annotations

from dataclasses import dataclass, replace

from harness.plan.limits import MemoryVerdict
from harness.plan.prediction import Prediction
from harness.plan.search import figures, in_order
from harness.plan.step_time import predict_speed
from harness.plan.trust import trust_in
from tests.harness.plan.invented import memory
from tests.harness.plan.plans import scenario


def offloading(accumulation: int) -> Prediction:
    plan = scenario("zero2", 2, options={"offload": "optimizer"})
    plan = replace(plan, accumulation_steps=accumulation)
    return Prediction(scenario=plan, memory=memory()(plan), speed=predict_speed(plan))


def test_a_rate_with_offload_names_the_tokens_over_which_the_host_updates_once() -> None:
    few, many = offloading(1), offloading(100)
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


@dataclass(frozen=True)
class Row:
    label: str
    tokens_per_second_per_gpu: float
    used: float
    """Of the device, in percent."""

    @property
    def verdict(self) -> MemoryVerdict:
        return MemoryVerdict(needed_bytes=round(self.used * 10), device_bytes=1000)

    @property
    def barely_fits(self) -> bool:
        return self.verdict.barely_fits


def order(*rows: Row) -> list[str]:
    return [row.label for row in in_order(rows)]


def test_of_equal_speed_room_leads_before_fewer_moving_parts() -> None:
    fuller, roomier = Row("fsdp-grad-op", 1000, 95), Row("fsdp", 960, 80)
    assert order(fuller, roomier) == ["fsdp", "fsdp-grad-op"]
    assert order(fuller, replace(roomier, used=91)) == ["fsdp-grad-op", "fsdp"]
    assert order(replace(fuller, used=89), roomier) == ["fsdp-grad-op", "fsdp"]
    assert order(fuller, replace(roomier, tokens_per_second_per_gpu=940)) == ["fsdp-grad-op", "fsdp"]


def test_room_alone_calls_neither_for_offload_nor_for_ranks_that_share_samples() -> None:
    tight = Row("fsdp", 1000, 95)
    for label in ("zero2:offload=optimizer", "tp:tensor=2"):
        assert order(Row(label, 1000, 50), tight) == ["fsdp", label]


def test_offload_does_not_lead_where_anything_else_fits() -> None:
    label = "zero2:offload=optimizer"
    fast, slow = Row(label, 2000, 50), Row("fsdp", 1000, 95)
    assert order(fast, slow) == ["fsdp", label]
    assert order(fast, replace(slow, used=99)) == [label, "fsdp"]  # which barely fits


def test_ranks_that_share_samples_lead_what_is_close_to_its_limit_if_faster_and_with_room() -> None:
    fast, full = Row("tp:tensor=2", 2000, 50), Row("fsdp", 1000, 95)
    assert order(fast, full) == ["tp:tensor=2", "fsdp"]
    assert order(replace(fast, tokens_per_second_per_gpu=1040), full) == ["fsdp", "tp:tensor=2"]
    assert order(replace(fast, used=95), full) == ["fsdp", "tp:tensor=2"]
    assert order(fast, replace(full, used=80)) == ["fsdp", "tp:tensor=2"]
    assert order(fast, replace(full, used=99)) == ["tp:tensor=2", "fsdp"]  # which barely fits


def test_where_a_rank_with_samples_of_its_own_leaves_room_none_are_shared() -> None:
    fast, full, roomy = Row("tp:tensor=2", 2000, 50), Row("fsdp-grad-op", 1000, 95), Row("fsdp", 900, 80)
    assert order(fast, full, roomy)[0] == "fsdp-grad-op"
    offload = Row("zero2:offload=optimizer", 3000, 50)
    assert order(fast, full, offload)[0] == "tp:tensor=2"
    assert order(fast, offload)[0] == "zero2:offload=optimizer"  # of those that share or offload the fastest
