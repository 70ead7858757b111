import pytest

from harness.plan.fit import Trial, fastest, tied_with, trial_of
from harness.record import Record
from tests.records import make_ranks, make_record


def trial(size: int, rate: float | None = 100.0, spread: float = 0.0, **changes) -> Trial:
    values = {
        "micro_batch_size": size, "accumulation_steps": 1, "global_batch_size": 2 * size,
        "sequence_length": 128, "predicted_bytes": 110, "status": "ok", "peak_bytes": 100,
        "tokens_per_second": rate, "slowest_tokens_per_second": rate and rate - spread,
        "fastest_tokens_per_second": rate and rate + spread, "num_alloc_retries": None,
        "run_id": f"run-{size}",
    }  # fmt: skip
    return Trial(**(values | changes))


def test_a_trial_reads_its_record() -> None:
    ranks = [part.model_copy(update={"num_alloc_retries": n}) for n, part in enumerate(make_ranks(2))]
    found = trial_of(make_record(label="zero2", ranks=ranks), 2_100_000)
    assert (found.micro_batch_size, found.accumulation_steps, found.global_batch_size) == (4, 1, 8)
    assert found.peak_bytes == 2_001_000
    assert found.tokens_per_second == 1024 / 0.5
    assert found.num_alloc_retries == 1
    assert found.prediction_error == pytest.approx(2_100_000 / 2_001_000 - 1)
    assert found.fits


def test_a_run_out_of_memory_does_not_fit_and_has_no_error() -> None:
    record: Record = make_record(label="ddp", status="oom", ranks=[], steps=[])
    found = trial_of(record, 100)
    assert not found.fits
    assert (found.peak_bytes, found.tokens_per_second, found.prediction_error) == (None, None, None)


def test_a_loss_that_became_nan_took_no_more_memory() -> None:
    assert trial_of(make_record(label="ddp", status="diverged"), None).fits


def test_of_equally_fast_trials_the_smaller_is_named() -> None:
    trials = [
        trial(8, 100.0),
        trial(4, 120.0),
        trial(2, 120.0),
        trial(16, 900.0, status="oom"),
        trial(1, None),
    ]
    best = fastest(trials)
    assert best is trials[2]
    assert fastest([trial(1, None)]) is None


def test_trials_whose_steps_overlap_are_not_ranked() -> None:
    trials = [trial(1, 120.0, 10.0), trial(2, 105.0, 6.0), trial(4, 105.0, 4.0)]
    assert [t.micro_batch_size for t in tied_with(trials[0], trials)] == [2]
