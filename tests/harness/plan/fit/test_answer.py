"""Searches against a machine whose peak is known: fixed bytes and some for each sample and token."""

from dataclasses import dataclass, field

import pytest

from harness.plan.fit import (
    Limit,
    OutOfTrials,
    Sizes,
    Trial,
    answer_lines,
    error_line,
    find_micro_batch,
    find_sequence,
    trial_table,
)
from tests.harness.plan.fit.test_trial import trial

FIXED, PER_TOKEN = 1000, 1


@dataclass
class Machine:
    """Runs nothing; `error` is how far its predictions are off, `apart` how far bounds lie from the peak."""

    limit: Limit
    error: float | None = 0.0
    apart: float | None = None
    most_runs: int = 50
    best: int = 4
    trials: list[Trial] = field(default_factory=list)

    def predicted_bytes(self, micro_batch_size: int, sequence_length: int | None = None) -> int | None:
        if self.error is None:
            return None
        return round((1 + self.error) * self._peak(micro_batch_size, sequence_length))

    def bytes_between(
        self, micro_batch_size: int, sequence_length: int | None = None
    ) -> tuple[int, int] | None:
        if self.apart is None:
            return None
        peak = self._peak(micro_batch_size, sequence_length)
        return round(peak * (1 - self.apart)), round(peak * (1 + self.apart))

    def why_unpredicted(self) -> str | None:
        return "nothing is known of it" if self.error is None else None

    def run(self, micro_batch_size: int, sequence_length: int | None = None) -> Trial:
        if len(self.trials) == self.most_runs:
            raise OutOfTrials
        peak = self._peak(micro_batch_size, sequence_length)
        predicted = self.predicted_bytes(micro_batch_size, sequence_length)
        shared = {"sequence_length": sequence_length or 128, "predicted_bytes": predicted}
        if peak > self.limit.limit_bytes:
            self.trials.append(trial(micro_batch_size, None, peak_bytes=None, status="oom", **shared))
        else:
            rate = 1000.0 - abs(micro_batch_size - self.best)
            self.trials.append(trial(micro_batch_size, rate, peak_bytes=peak, **shared))
        return self.trials[-1]

    def _peak(self, micro_batch_size: int, sequence_length: int | None) -> int:
        return FIXED + PER_TOKEN * micro_batch_size * (sequence_length or 128)


def machine(limit_bytes: int, **changes) -> Machine:
    return Machine(Limit(limit_bytes=limit_bytes, origin="test", imposed=True), **changes)


EVERY = Sizes(sizes=range(1, 2**16 + 1), bound="no larger one is tried")


@pytest.mark.parametrize("error", [0.0, 0.05, -0.05, 0.5, -0.5, -0.99, None])
def test_the_largest_is_exact_however_wrong_the_prediction(error: float | None) -> None:
    runner = machine(FIXED + 100 * 128 + 5, error=error)
    found = find_micro_batch(runner, EVERY, None)
    assert found.largest is not None
    assert (found.largest.micro_batch_size, found.too_large, found.complete) == (100, 101, True)
    assert len(runner.trials) <= 12


def test_a_right_prediction_takes_two_runs_and_two_for_the_fastest() -> None:
    runner = machine(FIXED + 16 * 128, best=4)
    found = find_micro_batch(runner, EVERY, None)
    assert [t.micro_batch_size for t in runner.trials] == [16, 17, 8, 4]
    assert found.predicted == 16
    assert found.fastest is not None
    assert found.fastest.micro_batch_size == 4
    assert found.tied == ()


def test_bounds_say_between_which_sizes_and_the_search_begins_at_the_less() -> None:
    runner = machine(FIXED + 32 * 128, error=None, apart=0.25)
    found = find_micro_batch(runner, EVERY, 5)
    # 4 / 5 and 4 / 3 of 5,096 bytes, less what is fixed, are 24.0 and 45.2 samples.
    assert (found.predicted, found.predicted_between) == (None, (24, 45))
    assert runner.trials[0].micro_batch_size == 24
    assert found.largest is not None
    assert found.largest.micro_batch_size == 32
    (said,) = (line for line in answer_lines(found, runner.limit) if line.startswith("predicted"))
    assert said == "predicted: between 24 and 45, measured: 32; nothing is known of it"
    assert found.as_json()["predicted_between"] == (24, 45)


def test_only_sizes_that_keep_the_global_batch_are_tried() -> None:
    runner = machine(FIXED + 7 * 128)
    found = find_micro_batch(runner, Sizes(sizes=[1, 2, 3, 4, 6, 12], bound="the global batch"), None)
    assert found.largest is not None
    assert (found.largest.micro_batch_size, found.too_large) == (6, 12)


def test_nothing_fits() -> None:
    found = find_micro_batch(machine(FIXED), EVERY, None)
    assert (found.largest, found.fastest, found.predicted, found.too_large) == (None, None, None, 1)
    (largest, predicted) = answer_lines(found, machine(FIXED).limit)
    assert largest.startswith("largest micro-batch: none. Even 1 runs out of memory with")
    assert predicted == "predicted: nothing fits"


def test_what_is_not_predicted_has_its_reason() -> None:
    runner = machine(FIXED + 7 * 128, error=None)
    found = find_micro_batch(runner, EVERY, None)
    assert "predicted: n/a: nothing is known of it" in answer_lines(found, runner.limit)
    assert found.as_json()["unpredicted"] == "nothing is known of it"
    runner = machine(FIXED + 7 * 128, error=99)
    found = find_micro_batch(runner, EVERY, None)
    assert any(
        line.startswith("predicted: nothing fits, measured: ") for line in answer_lines(found, runner.limit)
    )


def test_the_sequence_is_searched_at_one_micro_batch() -> None:
    runner = machine(FIXED + 700)
    found = find_sequence(runner, Sizes(sizes=range(8, 1025, 8), bound="the model's context"), 2, 128)
    assert found.largest is not None
    assert (found.largest.sequence_length, found.too_large) == (344, 352)
    assert {t.micro_batch_size for t in runner.trials} == {2}


def test_a_search_that_ran_out_of_runs_says_so() -> None:
    runner = machine(FIXED + 100 * 128, error=-0.9, most_runs=3)
    found = find_micro_batch(runner, EVERY, None)
    assert not found.complete
    assert any("raise --most-runs" in line for line in answer_lines(found, runner.limit))


def test_the_answer_comes_in_words() -> None:
    runner = machine(FIXED + 7 * 128, error=0.2)
    found = find_micro_batch(runner, Sizes(sizes=[1, 2, 3, 4, 6, 12], bound="12 samples a rank"), None)
    assert answer_lines(found, runner.limit) == [
        "largest micro-batch: 6: peak 0.00177 MB of 0.0019 MB (93 %); 12 runs out of memory "
        "(12 samples a rank)",
        "highest throughput: micro-batch 4, 1,000 tokens/s (one run of each size, not tested against noise)",
        "predicted: 4, measured: 6",
    ]
    assert error_line(runner.trials) == "error of the predicted peaks: mean 20 %, worst 20 % (4 runs)"
    assert "+20.0 %" in trial_table(runner.trials)
    assert error_line([trial(1, status="oom", peak_bytes=None)]) is None


def test_a_search_that_ran_out_of_runs_says_at_least_and_ranks_nothing() -> None:
    runner = machine(FIXED + 100 * 128, most_runs=1)
    lines = answer_lines(find_micro_batch(runner, EVERY, None), runner.limit)
    assert lines[0].startswith("largest micro-batch: at least 100 (ended after 1 run): peak ")
    assert not any(line.startswith("highest throughput") for line in lines)
