from dataclasses import replace
from typing import Any

import pytest

from harness.backends import registry
from harness.plan.advice import memory_groups
from harness.plan.prediction import MemoryPrediction, Moment, Prediction, Predictors
from harness.plan.scenario import Scenario
from harness.plan.search import best_split, variants
from tests.harness.plan.invented import (
    DEVICE,
    JOB,
    THREE_BLOCKS,
    memory,
    predictors,
    question,
    speed,
    term,
)


def first(name: str, gpus: int = 8):
    return next(iter(variants(registry.BUILT_IN[name], gpus, 8, JOB)))


def test_the_largest_micro_batch_that_fits_is_the_fastest_here() -> None:
    # 16 MB of states on 8 ranks leave 8 MB; 100 tokens of 20 kB are 2 MB a sample.
    found = best_split(question(), first("zero3"), predictors(per_token=20_000), checkpointing=False)
    assert (found.planned.micro_batch_size, found.planned.accumulation_steps) == (4, 1)
    assert (found.needed_bytes, found.margin_bytes, found.fits) == (10_000_000, 0, True)
    assert found.speed is not None


def test_micro_batches_divide_the_samples_of_a_rank() -> None:
    found = best_split(
        question(tokens=8 * 12 * 100), first("zero3"), predictors(per_token=15_000), checkpointing=False
    )
    # 5 samples fit; 4 is the largest of them that divides 12.
    assert (found.planned.micro_batch_size, found.planned.accumulation_steps) == (4, 3)


def test_a_smaller_micro_batch_wins_where_it_is_faster() -> None:
    def slow_when_large(scenario: Scenario):
        predicted = speed()(scenario)
        large = scenario.micro_batch_size > 2
        return replace(predicted, tokens_per_second_per_gpu=1.0) if large else predicted

    slow = Predictors(memory=memory(), speed=slow_when_large)
    found = best_split(question(), first("fsdp"), slow, checkpointing=False)
    assert (found.planned.micro_batch_size, found.planned.accumulation_steps) == (2, 2)


def test_what_does_not_fit_shows_what_needs_least() -> None:
    found = best_split(question(), first("ddp"), predictors(), checkpointing=True)
    assert not found.fits
    assert found.speed is None
    assert (found.planned.micro_batch_size, found.needed_bytes) == (1, 16_000_000 + 100 * 100)


def test_a_batch_without_accumulation_fits_where_smaller_ones_do_not() -> None:
    def accumulating(scenario: Scenario) -> MemoryPrediction:
        kept = 20_000_000 if scenario.accumulation_steps > 1 else 0
        return MemoryPrediction(
            moments=(Moment(name="forward/backward", terms=(term("gradients", kept), term("data", 1))),)
        )

    found = best_split(
        question(), first("fsdp"), Predictors(memory=accumulating, speed=speed()), checkpointing=False
    )
    assert (found.planned.micro_batch_size, found.planned.accumulation_steps, found.fits) == (4, 1, True)


@pytest.mark.parametrize("per_token", [1000, 20_000, 200_000])
def test_micro_batches_that_cannot_fit_are_not_predicted(per_token: int) -> None:
    invented, asked = memory(per_token), list[Scenario]()

    def counted(scenario: Scenario) -> MemoryPrediction:
        asked.append(scenario)
        return invented(scenario)

    def best(**known: Any) -> Prediction:
        by = Predictors(memory=counted, speed=speed(), **known)
        return best_split(question(tokens=8 * 64 * 100), first("zero3"), by, checkpointing=False)

    without = best()
    asked.clear()
    assert best(least=lambda scenario: invented(scenario).device_bytes) == without
    too_large = [s for s in asked if invented(s).device_bytes > DEVICE.memory_bytes]
    assert len(too_large) == (0 if without.fits else 1)


def test_memory_is_grouped_by_what_divides_it() -> None:
    found = best_split(question(), first("zero3"), predictors(), checkpointing=False)
    assert memory_groups(found) == {"states": 2_000_000, "gathered": 0, "activations": 400_000}
    assert found.there_bytes == DEVICE.memory_bytes


def test_where_bounds_alone_are_known_the_most_must_fit() -> None:
    asked = question("model.compile=block", model=THREE_BLOCKS)
    found = best_split(asked, first("zero3"), predictors(per_token=25_000), checkpointing=False)
    # 2 MB of states and 2.5 MB a sample, a tenth if all is computed again: 2 samples fit for sure, 4 perhaps.
    assert (found.planned.micro_batch_size, found.needed_bytes) == (2, 7_000_000)
    assert found.peak_bytes_between == (2_500_000, 7_000_000)
