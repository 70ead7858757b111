"""One search: which strategies are tried, how they are ranked and why the others lose."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from harness.backends import registry
from harness.backends.registry import moving_parts
from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.plan.answer import estimate
from harness.plan.hardware import MemoryVerdict, default_constants
from harness.plan.prediction import MemoryPrediction, Prediction, Predictors
from harness.plan.question import Question
from harness.plan.scenario import Scenario
from harness.plan.search import (
    CLOSE_SHARE,
    Found,
    distinct_backends,
    fewest_gpus,
    figures,
    in_order,
    near_largest,
    reducing_each,
    search,
    simplest_close,
    variants,
    why_slower,
)
from harness.plan.step_time import SpeedPrediction, Work, predict_speed, seconds_of_step
from harness.plan.trust import trust_in
from tests.harness.plan.plans import (
    DEVICE,
    JOB,
    THREE_BLOCKS,
    ask,
    memory,
    needing,
    predictors,
    question,
    scenario,
    speed,
)


def found_variants(**changes) -> Found:
    return search(question(), predictors(**changes))


def reasons(found: Found) -> dict[str, str]:
    return {one.backend: why for one, why in found.rejected(found.best_by_backend()[:3])}


def test_what_fits_is_ranked_by_speed() -> None:
    found = found_variants()
    rates = [c.tokens_per_second_per_gpu for c in found.fitting]
    assert rates == sorted(rates, reverse=True)
    # Less communication at a lower stage; DDP's 16 MB do not fit into 10.
    assert found.fitting[0].label == "zero1"
    assert {c.backend for c in found.too_large} == {"ddp", "cp"}
    names = [c.backend for c in found.best_by_backend()]
    assert len(names) == len(set(names))
    assert "zero3" in names


def test_a_backend_that_is_not_taken_says_why() -> None:
    why = reasons(found_variants())
    assert why["ddp"] == (
        "does not fit: 0.016 GB of 0.01 (0.00601 GB too much) at micro-batch 1, checkpointing, "
        "forward/backward; largest part optimizer 0.016 GB"
    )
    slower = "slower by 8.2 %: 16 % of the step is exposed communication, most of it gradients"
    assert why["zero3"].startswith(slower)
    # 7 MB of activations a sample: hybrid groups of 4 hold 4 MB of states, full sharding 2 MB.
    # 1.1 s with micro-batch 1 against 1.3 x 1.025 s with recomputation and micro-batch 4.
    for per_token, small, said in (
        (70_000, 0.1, "slower by 17 %: recomputes activations to fit"),
        (60_000, 0.1, "slower by 17 %: recomputes activations to leave room"),
        (30_000, 1.0, "slower by 7.7 %: recomputes activations for micro-batch 4 (without: 1)"),
    ):
        found = found_variants(per_token=per_token, communication=0.0, small=small)
        assert reasons(found)["fsdp-hybrid"] == said


def test_a_variant_that_cannot_be_predicted_costs_no_other() -> None:
    def refuses_zero3(scenario: Scenario) -> MemoryPrediction:
        if scenario.strategy.family == "zero3":
            raise HarnessError("no form")
        return memory()(scenario)

    found = search(question(), Predictors(memory=refuses_zero3, speed=speed()))
    assert found.left_out["zero3"] == "no prediction: no form"
    assert "fsdp" in {c.backend for c in found.fitting}


def test_with_fewer_samples_than_gpus_only_ranks_that_share_them_are_ranked_if_there_is_one_a_group() -> None:
    found = search(question(tokens=400), predictors())
    assert {c.backend for c in found.fitting} >= {"fsdp-cp", "ulysses-zero3"}
    for configuration in (*found.fitting, *found.too_large):
        groups = registry.mesh_of(configuration.label, 8).data_size
        assert groups * configuration.planned.micro_batch_size * configuration.planned.accumulation_steps == 4
    assert found.left_out["fsdp"] == "4 samples do not divide over its 8 data ranks"
    none = search(question(gpus=64, tokens=300), predictors())
    assert (none.fitting, none.too_large) == ((), ())


def test_of_what_predictions_cannot_tell_apart_the_fewest_moving_parts_lead() -> None:
    # 1 % of communication for each stage: zero1 is slower than hybrids of stage 2 would be, yet simpler.
    found = found_variants(communication=0.01)
    rates = {c.label: c.tokens_per_second_per_gpu for c in found.fitting}
    close = [c for c in found.fitting if rates[c.label] >= (1 - CLOSE_SHARE) * max(rates.values())]
    assert len(close) > 3
    assert found.fitting[0].label == "zero1"
    assert moving_parts(found.fitting[0].label) == min(moving_parts(c.label) for c in close)
    others = [c.tokens_per_second_per_gpu for c in found.fitting[1:]]
    assert others == sorted(others, reverse=True)


def test_the_runner_up_is_the_simplest_of_those_close_to_the_fastest_that_is_left() -> None:
    found = found_variants(communication=0.01)
    first, *left = found.best_by_backend()
    runner_up, rates = left[0], [c.tokens_per_second_per_gpu for c in left]
    close = [c for c in left if c.tokens_per_second_per_gpu >= (1 - CLOSE_SHARE) * max(rates)]
    assert runner_up.tokens_per_second_per_gpu < max(rates)  # a faster one has more moving parts
    assert moving_parts(runner_up.label) == min(moving_parts(c.label) for c in close)
    assert first.label == "zero1"


def test_of_what_predictions_cannot_tell_apart_what_leaves_room_leads() -> None:
    # 2 MB of states on 8 ranks, 7.6 MB of activations in 4 samples, 3.8 in 2: 96 % or 58 % of the device, and
    # 1.025 s or 1.05 s. ZeRO-2, simpler and as fast, has 3.75 MB of states: its 4 samples do not fit.
    close = found_variants(per_token=19_000, communication=0.0)
    assert close.fitting[0].planned.micro_batch_size == 2
    assert not close.fitting[0].is_tight
    assert close.fastest.is_tight
    assert close.fastest.planned.micro_batch_size == 4
    # 1.25 s or 1.5 s: room is worth less than that.
    far = found_variants(per_token=19_000, communication=0.0, small=1.0)
    assert far.fitting[0].is_tight
    assert (far.fitting[0].planned.micro_batch_size, far.with_room.planned.micro_batch_size) == (4, 2)


def test_what_leaves_room_is_tried_below_the_two_largest_micro_batches() -> None:
    # 70 MB of states on 8 ranks, and 90 kB a sample: 9.83, 9.29, 9.11, 9.02 and 8.93 of 10 MB.
    asked, given = question(tokens=8 * 12 * 100), predictors(states=70, per_token=900)
    near = near_largest(asked, "fsdp", given, checkpointing=False)
    assert [(c.planned.micro_batch_size, c.is_tight) for c in near] == [(12, True), (6, True), (2, False)]


def test_what_is_simpler_but_clearly_slower_does_not_lead() -> None:
    found = found_variants(communication=0.0)
    simple, rival = (next(c for c in found.fitting if c.backend == name) for name in ("zero1", "fsdp"))
    for share, leads in ((0.96, simple), (0.94, rival)):
        rate = rival.tokens_per_second_per_gpu * share
        slower = replace(simple, speed=replace(simple.speed, tokens_per_second_per_gpu=rate))
        first = simplest_close([rival, slower])
        assert first.label == leads.label


def test_every_strategy_that_is_tried_has_its_place() -> None:
    every = [label for entry in distinct_backends()[0] for label in variants(entry, 8, 8, JOB)]
    found = {label: moving_parts(label) for label in every}
    order = ["ddp", "zero1", "zero2", "fsdp-grad-op", "fsdp", "zero3", "fsdp-hybrid:shard_size=4"]
    order += ["tp:tensor=2", "fsdp-cp:sequence=2", "pp:micro_batches=2,stages=2"]
    order += ["zero1:adam=deepspeed,offload=optimizer"]
    assert [label for label in order if label not in found] == []
    places = [found[label] for label in order]
    assert places == sorted(places)
    assert len(set(places)) == len(places)


def test_a_faster_one_that_is_close_is_no_loser() -> None:
    found = found_variants(communication=0.01)
    first = found.fitting[0]
    for factor, said in ((1.02, "2.0 %, too little to trust"), (1.2, "20 %")):
        rate = first.tokens_per_second_per_gpu * factor
        faster = replace(found.fitting[1], speed=replace(first.speed, tokens_per_second_per_gpu=rate))
        assert why_slower(faster, first) == f"faster by {said}, with more moving parts"


def test_a_choice_without_a_prediction_costs_no_other_one() -> None:
    """Compiled blocks have bounds, compiled ones that recompute have none."""
    found = search(question("model.compile=block", model=THREE_BLOCKS), predictors(per_token=25_000))
    labels = {c.label for c in found.fitting}
    assert {"zero3", "fsdp"} <= labels
    assert not any(c.checkpointing for c in found.fitting)
    assert all(c.memory_bounds for c in found.fitting)


def accumulating(scenario: Scenario) -> MemoryPrediction:
    """Whole gradients of several micro-steps do not fit, nor does a step in one."""
    whole = scenario.accumulation_steps > 1 and not scenario.options.get("sync_each_batch")
    kept = 20_000_000 if whole or scenario.strategy.family != "fsdp2" else 3_000_000
    return needing(gradients=kept * scenario.micro_batch_size)


def test_where_whole_gradients_do_not_fit_they_are_reduced_in_every_micro_step() -> None:
    by = Predictors(memory=accumulating, speed=speed())
    found = search(question(), by)
    assert all(c.planned.options["sync_each_batch"] for c in found.fitting)
    assert found.fitting[0].label == "fsdp-grad-op:sync_each_batch=True"
    assert not any("sync_each_batch" in c.label for c in found_variants().fitting)  # which leave room
    single = search(question(tokens=8 * 100), by)  # one micro-step
    assert single.fitting
    labels = {c.label for c in (*single.fitting, *single.too_large)}
    assert "fsdp" in labels
    assert "fsdp:sync_each_batch=True" not in labels


def labels(name: str, gpus: int, gpus_per_node: int = 8) -> list[str]:
    return list(variants(registry.BUILT_IN[name], gpus, gpus_per_node, JOB))


def test_every_built_in_backend_is_looked_at_or_named_with_the_reason() -> None:
    chosen, left_out = distinct_backends()
    names = {entry.name for entry in chosen}
    assert names | left_out.keys() == registry.BUILT_IN.keys()
    assert names.isdisjoint(left_out)
    assert left_out["zero0"] == left_out["fsdp1-no-shard"] == "shards like ddp"
    assert left_out["fsdp1"] == "shards like fsdp"
    assert left_out["accelerate-zero3"] == "the same strategy through Accelerate"
    assert {"ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "fsdp-hybrid"} <= names


OFFLOAD = "zero3:adam=deepspeed,offload"


@pytest.mark.parametrize(
    ("name", "gpus", "gpus_per_node", "tried"),
    [
        # Offload where it differs,
        ("ddp", 8, 8, ["ddp"]), ("zero2", 8, 8, ["zero2", "zero2:adam=deepspeed,offload=optimizer"]),
        ("zero3", 8, 8, ["zero3", f"{OFFLOAD}=optimizer", f"{OFFLOAD}=cpu"]),
        ("fsdp", 8, 8, ["fsdp", "fsdp:offload=cpu"]), ("fsdp", 12, 8, ["fsdp", "fsdp:offload=cpu"]),
        # a second copy within a node on several nodes,
        ("zero3", 16, 8, ["zero3", f"{OFFLOAD}=optimizer", f"{OFFLOAD}=cpu", "zero3:hpz=8"]),
        ("fsdp", 16, 8, ["fsdp", "fsdp:offload=cpu", "fsdp:reshard=8"]),
        ("fsdp", 64, 8, ["fsdp", "fsdp:offload=cpu", "fsdp:reshard=8"]),
        # degrees that divide a node,
        ("tp", 64, 8, ["tp:tensor=2", "tp:tensor=4", "tp:tensor=8"]),
        ("tp", 6, 6, ["tp:tensor=2", "tp:tensor=3", "tp:tensor=6"]),
        # and of pipelines few and many micro-batches, and stages in turn.
        ("pp", 2, 8, ["pp:micro_batches=2,stages=2", "pp:micro_batches=8,stages=2",
                      "pp:micro_batches=2,schedule=interleaved,stages=2"]),
    ],
)  # fmt: skip
def test_these_variants_are_tried(name: str, gpus: int, gpus_per_node: int, tried: list[str]) -> None:
    assert labels(name, gpus, gpus_per_node) == tried


def test_variants_follow_the_optimizer_and_ranks_that_share_samples_keep_no_second_copy() -> None:
    sgd = load_experiment(None, ["optimizer.kind=sgd"]).job()
    assert list(variants(registry.BUILT_IN["zero2"], 8, 8, sgd)) == ["zero2", "zero2:offload=optimizer"]
    assert labels("fsdp-cp", 16, 4)[:2] == ["fsdp-cp:sequence=2", "fsdp-cp:sequence=4"]
    for name in ("ulysses-zero3", "fsdp-tp", "fsdp-cp", "autotp-zero3"):
        assert not [label for label in labels(name, 16) if "hpz" in label or "reshard" in label]


@pytest.mark.parametrize(
    ("gpus", "sizes"), [(64, [8, 16, 32]), (16, [8]), (8, [4]), (24, [8]), (4, [2]), (2, []), (1, [])]
)
def test_shard_groups_are_nodes_with_at_least_two_replicas(gpus: int, sizes: list[int]) -> None:
    found = variants(registry.BUILT_IN["fsdp-hybrid"], gpus, min(gpus, 8), JOB)
    options = [registry.parse(label)[1] for label in found]
    without_offload = [o for o in options if getattr(o, "offload", None) == "none"]
    assert [getattr(o, "shard_size", None) for o in without_offload] == sizes


def split(label: str = "zero3", *, samples: int = 4, checkpointing: bool = False, **by: Any) -> Prediction:
    """Of so many samples of each of 8 ranks."""
    given = Predictors(**by) if "memory" in by else predictors(**by)
    return fastest(question(tokens=8 * samples * 100), label, given, checkpointing=checkpointing)


def fastest(asked: Question, label: str, by: Predictors, *, checkpointing: bool) -> Prediction:
    found = near_largest(asked, label, by, checkpointing=checkpointing)
    return max(found, key=lambda one: one.tokens_per_second_per_gpu)


def slow_when_large(scenario: Scenario) -> SpeedPrediction:
    predicted = speed()(scenario)
    large = scenario.micro_batch_size > 2
    return replace(predicted, tokens_per_second_per_gpu=1.0) if large else predicted


def small_in_one_step(scenario: Scenario) -> MemoryPrediction:
    return needing(gradients=20_000_000 if scenario.accumulation_steps > 1 else 0, data=1)


@pytest.mark.parametrize(
    ("label", "given", "cut"),
    [
        # 16 MB of states on 8 ranks leave 8 MB; 100 tokens of 20 kB are 2 MB a sample.
        ("zero3", {"per_token": 20_000}, (4, 1)),
        # 5 samples fit; 4 is the largest of them that divides 12.
        ("zero3", {"per_token": 15_000, "samples": 12}, (4, 3)),
        ("fsdp", {"memory": memory(), "speed": slow_when_large}, (2, 2)),
        # Without accumulation it fits where smaller ones do not.
        ("fsdp", {"memory": small_in_one_step, "speed": speed()}, (4, 1)),
    ],
)
def test_the_micro_batch_is_the_fastest_of_those_that_fit_and_divide(
    label: str, given: dict[str, Any], cut: tuple[int, int]
) -> None:
    found = split(label, **given)
    assert (found.planned.micro_batch_size, found.planned.accumulation_steps) == cut
    assert (found.fits, found.speed is not None) == (True, True)
    if given.get("per_token") == 20_000:
        assert (found.needed_bytes, found.margin_bytes) == (10_000_000, 0)


def test_what_does_not_fit_shows_what_needs_least() -> None:
    found = split("ddp", checkpointing=True)
    assert not found.fits
    assert found.speed is None
    assert (found.planned.micro_batch_size, found.needed_bytes) == (1, 16_000_000 + 100 * 100)


@pytest.mark.parametrize("per_token", [1000, 20_000, 200_000])
def test_micro_batches_that_cannot_fit_are_not_predicted(per_token: int) -> None:
    invented, asked = memory(per_token), list[Scenario]()

    def counted(scenario: Scenario) -> MemoryPrediction:
        asked.append(scenario)
        return invented(scenario)

    without = split(samples=64, memory=counted, speed=speed())
    asked.clear()
    known = {"least": lambda scenario: invented(scenario).device_bytes}
    assert split(samples=64, memory=counted, speed=speed(), **known) == without
    too_large = [s for s in asked if invented(s).device_bytes > DEVICE.memory_bytes]
    assert len(too_large) == (0 if without.fits else 1)


def test_where_bounds_alone_are_known_the_most_must_fit() -> None:
    asked = question("model.compile=block", model=THREE_BLOCKS)
    found = fastest(asked, "zero3", predictors(per_token=25_000), checkpointing=False)
    # 2 MB of states and 2.5 MB a sample, a tenth if all is computed again: 2 samples fit for sure, 4 perhaps.
    assert (found.planned.micro_batch_size, found.needed_bytes) == (2, 7_000_000)
    assert found.peak_bytes_between == (2_500_000, 7_000_000)


def timed(**changes: Any) -> Prediction:
    plan = scenario("zero2", 2, **changes)
    return Prediction(scenario=plan, memory=memory()(plan), speed=predict_speed(plan))


def test_a_rate_with_offload_names_the_tokens_over_which_the_host_updates_once() -> None:
    options = {"offload": "optimizer"}
    few, many = (timed(options=options, accumulation_steps=count) for count in (1, 100))
    assert " at 16,384 tokens a step, of which the host's update takes " in figures(few)
    assert " at 1,638,400 tokens a step, of which the host's update takes " in figures(many)
    assert few.speed.host_update_share > 0.5 > many.speed.host_update_share
    assert many.tokens_per_second_per_gpu > 2 * few.tokens_per_second_per_gpu
    assert "host" not in figures(timed())


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
    speed: SpeedPrediction | None = None

    @property
    def verdict(self) -> MemoryVerdict:
        return MemoryVerdict(needed_bytes=round(self.used * 10), device_bytes=1000)

    @property
    def barely_fits(self) -> bool:
        return self.verdict.barely_fits

    @property
    def is_tight(self) -> bool:
        return self.verdict.answer == "close"


def order(*rows: Row) -> list[str]:
    return [row.label for row in in_order(rows)]


def test_what_may_lose_with_scale_comes_behind_a_hybrid_within_its_range() -> None:
    ranged = predict_speed(scenario("fsdp", 64))
    least = ranged.tokens_per_second_between[0] / ranged.tokens_per_second_per_gpu * 1000
    full = Row("fsdp", 1000, 50, replace(ranged, tokens_per_second_per_gpu=1000.0))
    assert order(full, Row("fsdp-hybrid", least + 1, 50)) == ["fsdp-hybrid", "fsdp"]
    assert order(full, Row("fsdp-hybrid", least - 1, 50)) == ["fsdp", "fsdp-hybrid"]
    assert order(full, Row("zero2", 940, 50)) == ["fsdp", "zero2"]
    assert order(Row("fsdp", 1000, 50), Row("fsdp-hybrid", 960, 50)) == ["fsdp", "fsdp-hybrid"]
    # Where too few sources ran on a GPU the range is of its rates too, so hybrids lead in ties alone.
    plain = scenario("fsdp", 64)
    new = replace(plain.device, name="MI355X")
    asked, slow = replace(plain, device=new), replace(default_constants(new), sustained_share=0.3)
    ends = [seconds_of_step(Work(asked), new, replace(slow, contention=of)) for of in (slow.contention, 1)]
    assert ends[0] < ends[1] == predict_speed(asked).step_seconds_between[1]
    full = Row("fsdp", 1000, 50, replace(predict_speed(asked), tokens_per_second_per_gpu=1000.0))
    assert order(full, Row("fsdp-hybrid", 960, 50)) == ["fsdp-hybrid", "fsdp"]
    assert order(full, Row("fsdp-hybrid", 940, 50)) == ["fsdp", "fsdp-hybrid"]


def test_the_fewest_gpus_are_those_on_which_full_sharding_leaves_room() -> None:
    # 16 MB of states and 0.1 MB of activations: on 2 of 10 MB with room, on one not.
    assert fewest_gpus(question(), predictors()).world_size == 2
    assert fewest_gpus(question(), predictors(states=800)) is None
    for labels, gpus in (("fsdp", "ddp"), 2), (("ddp",), None):  # of named strategies those alone
        found = fewest_gpus(replace(question(), names_all=False, labels=labels), predictors())
        assert (found and found.world_size) == gpus
    # Whole gradients that add up have no room on any number of ranks, reduced ones do.
    by = Predictors(memory=accumulating, speed=speed())
    for label in ("fsdp", "accelerate-fsdp"):
        found = fewest_gpus(replace(question(), names_all=False, labels=(label,)), by)
        assert found is not None
        assert found.planned.options["sync_each_batch"]
    # The largest micro-batch that fits is close to the limit there, a smaller one is not.
    found = fewest_gpus(question(), predictors(per_token=9_000))
    assert (found.world_size, found.leaves_room) == (2, True)


def test_a_search_of_named_strategies_tries_those_alone() -> None:
    asked = replace(question(), names_all=False, labels=("fsdp1", "zero3:offload=cpu"))
    found = search(asked, predictors())
    assert {one.label for one in (*found.fitting, *found.too_large)} == {
        "fsdp1", "fsdp1:offload=cpu", "zero3:offload=cpu",
    }  # fmt: skip


OFFLOADED, SHARING = "zero2:offload=optimizer", "tp:tensor=2"


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        # Of equal speed room leads before fewer moving parts.
        ([("fsdp-grad-op", 1000, 95), ("fsdp", 960, 80)], "fsdp"),
        ([("fsdp-grad-op", 1000, 95), ("fsdp", 960, 91)], "fsdp-grad-op"),
        ([("fsdp-grad-op", 1000, 89), ("fsdp", 960, 80)], "fsdp-grad-op"),
        ([("fsdp-grad-op", 1000, 95), ("fsdp", 940, 80)], "fsdp-grad-op"),
        # Room alone calls neither for offload nor for ranks that share samples.
        ([(OFFLOADED, 1000, 50), ("fsdp", 1000, 95)], "fsdp"),
        ([(SHARING, 1000, 50), ("fsdp", 1000, 95)], "fsdp"),
        # Offload leads where all else barely fits.
        ([(OFFLOADED, 2000, 50), ("fsdp", 1000, 95)], "fsdp"),
        ([(OFFLOADED, 2000, 50), ("fsdp", 1000, 99)], OFFLOADED),
        # Ranks that share samples lead what is close to its limit, if faster and with room,
        ([(SHARING, 2000, 50), ("fsdp", 1000, 95)], SHARING),
        ([(SHARING, 1040, 50), ("fsdp", 1000, 95)], "fsdp"),
        ([(SHARING, 2000, 95), ("fsdp", 1000, 95)], "fsdp"),
        ([(SHARING, 2000, 50), ("fsdp", 1000, 80)], "fsdp"),
        ([(SHARING, 2000, 50), ("fsdp", 1000, 99)], SHARING),
        # and where no rank with samples of its own leaves room.
        ([(SHARING, 2000, 50), ("fsdp-grad-op", 1000, 95), ("fsdp", 900, 80)], "fsdp-grad-op"),
        ([(SHARING, 2000, 50), ("fsdp-grad-op", 1000, 95), (OFFLOADED, 3000, 50)], SHARING),
        ([(SHARING, 2000, 50), (OFFLOADED, 3000, 50)], OFFLOADED),
    ],
)
def test_room_and_sharing_decide_the_order(rows: list[tuple[str, float, float]], first: str) -> None:
    assert order(*(Row(*row) for row in rows))[0] == first


SETTINGS = ("training.micro_batch_size=1", "training.accumulation_steps=16", "training.precision=bf16-mixed")


@pytest.mark.parametrize(
    ("label", "each"),
    [
        ("fsdp", "fsdp:sync_each_batch=True"), ("fsdp:reshard=2", "fsdp:reshard=2,sync_each_batch=True"),
        ("fsdp1-hybrid:shard_size=4", "fsdp1-hybrid:shard_size=4,sync_each_batch=True"),
        ("fsdp-tp:tensor=2", "fsdp-tp:sync_each_batch=True,tensor=2"),
        *((label, None) for label in ("fsdp:sync_each_batch=true", "fsdp1-no-shard", "ddp", "zero3")),
    ],
)  # fmt: skip
def test_fsdp_alone_can_shard_what_adds_up(label: str, each: str | None) -> None:
    assert reducing_each(label) == each


def answers(*settings: str, **asked: Any) -> dict[str, Prediction]:
    """On GPUs that whole gradients do not fit into."""

    def memory(scenario: Scenario) -> MemoryPrediction:
        whole = scenario.accumulation_steps > 1 and not scenario.options.get("sync_each_batch")
        return needing(gradients=90 * 10**9 if whole else 10 * 10**9)

    question = ask(*SETTINGS, *settings, gpu="H100-80", **asked)
    return {row.label: row for row in estimate(question, Predictors(memory=memory, speed=speed()))}


def test_an_estimate_of_every_strategy_has_the_one_that_fits() -> None:
    found = answers(backends="all")
    assert found["fsdp:sync_each_batch=True"].verdict.fits
    assert "fsdp:sync_each_batch=True" not in answers("training.accumulation_steps=1", backends="all")
