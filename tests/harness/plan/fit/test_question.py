import pytest

from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.plan.fit import micro_batches, sequences, trial_experiment


def test_a_global_batch_leaves_its_divisors() -> None:
    found = micro_batches(load_experiment(None, ["training.global_batch_size=24"]), 2)
    assert list(found.sizes) == [1, 2, 3, 4, 6, 12]
    assert found.bound == "the global batch of 24 has 12 samples for each of 2 ranks"
    assert found.remark is None


def test_without_a_global_batch_every_size_is_tried_and_that_is_said() -> None:
    found = micro_batches(load_experiment(None, ["training.accumulation_steps=3"]), 2)
    assert list(found.sizes[:3]) == [1, 2, 3]
    assert found.remark is not None
    assert "the global batch grows with the micro-batch (2 ranks x micro-batch x 3)" in found.remark


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["training.global_batch_size=8", "training.accumulation_steps=2"], "leave no choice"),
        (["training.global_batch_size=9"], "does not divide among 2 ranks"),
    ],
)
def test_a_job_that_leaves_no_choice_is_refused(settings: list[str], problem: str) -> None:
    with pytest.raises(HarnessError, match=problem):
        micro_batches(load_experiment(None, settings), 2)


def test_sequences_reach_the_models_context_in_steps() -> None:
    found = sequences(1024, 100)
    assert (found.sizes[0], found.sizes[-1], found.sizes[1]) == (16, 1024, 32)
    assert 100 in found.sizes
    assert sequences(20, 20).sizes == [8, 16, 20]
    assert sequences(None, 128).sizes[-1] == 128 * 64


def test_a_trial_is_short_and_measures_memory_only() -> None:
    given = load_experiment(
        None, ["training.epochs=3", "training.global_batch_size=16", "measure.matmul_peak=true",
               "evaluation.every_steps=5", "model.config={hidden_size: 64}"],
    )  # fmt: skip
    trial = trial_experiment(given, micro_batch_size=4, sequence_length=64, limit_bytes=10**9)
    assert (trial.training.steps, trial.training.epochs) == (8, None)
    assert (trial.training.micro_batch_size, trial.training.global_batch_size) == (4, 16)
    assert (trial.data.sequence_length, trial.runtime.memory_limit) == (64, 10**9)
    assert [trial.measure.window(step, 8) for step in range(8)] == ["warmup"] * 2 + ["probed"] + ["timed"] * 5
    assert not trial.measure.matmul_peak
    assert trial.evaluation.every_steps is None
    assert trial.model == given.model


def test_the_parts_of_a_pipeline_divide_every_micro_batch() -> None:
    given = load_experiment(None, ["training.global_batch_size=24"])
    assert list(micro_batches(given, 2, parts=4).sizes) == [4, 12]
    assert micro_batches(load_experiment(None, []), 2, parts=4).sizes[:2] == range(4, 12, 4)
    with pytest.raises(HarnessError, match="not whole micro-batches"):
        micro_batches(given, 2, parts=5)
