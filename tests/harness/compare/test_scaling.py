import pytest

from harness.compare.rows import Row, make_rows
from harness.compare.scaling import strong_scaling, weak_scaling
from harness.record import Record, WeightsPart
from tests.records import make_record, make_steps


def run(label: str, ranks: int, seconds: float, **changes: object) -> Record:
    return make_record(
        label=label, world_size=ranks, run_id=f"{label}-{ranks}", steps=make_steps(seconds=seconds), **changes
    )


def growing(ranks: int, seconds: float, parameters: int = 1000, tokens: int | None = None) -> Record:
    """A job whose batch grows with the ranks, as weak scaling wants it."""
    per_step = {step: {"tokens": tokens or 512 * ranks} for step in range(4)}
    return make_record(
        label="fsdp",
        world_size=ranks,
        run_id=f"fsdp-{ranks}",
        job_id=f"{ranks:012d}",
        training={"global_batch_size": 4 * ranks},
        steps=make_steps(seconds=seconds, changes=per_step),
        initial_weights=WeightsPart(digest="a" * 64, l2_norm=1.0, parameter_count=parameters),
    )


def rows(*records: Record) -> list[Row]:
    return make_rows(records)


def test_published_times_give_the_published_speed_up() -> None:
    """CINECA deck, Llama 3.1 on Leonardo: 3670 s on one GPU, 1821 s on two."""
    (curve,) = strong_scaling(rows(run("fsdp", 1, 3670 / 4), run("fsdp", 2, 1821 / 4)))
    first, second = curve
    assert first.training_seconds == pytest.approx(3670)
    assert second.training_seconds == pytest.approx(1821)
    assert second.speed_up == pytest.approx(2.015, abs=5e-4)
    assert second.strong_efficiency == pytest.approx(1.0077, abs=5e-4)


def test_reference_is_the_base_of_a_backend_without_a_run_on_one_rank() -> None:
    (curve,) = strong_scaling(rows(run("single", 1, 1.0), run("ddp", 2, 0.6), run("ddp", 4, 0.4)))
    assert [point.base.label for point in curve] == ["single"] * 3
    assert [point.speed_up for point in curve] == pytest.approx([1.0, 1 / 0.6, 2.5])
    assert curve[-1].strong_efficiency == pytest.approx(2.5 / 4)


def test_own_run_on_one_rank_goes_before_the_reference() -> None:
    (curve,) = strong_scaling(rows(run("single", 1, 1.0), run("ddp", 1, 2.0), run("ddp", 2, 1.0)))
    assert curve[-1].base.label == "ddp"
    assert curve[-1].speed_up == pytest.approx(2.0)


def test_without_a_smaller_run_there_is_no_scaling() -> None:
    assert strong_scaling(rows(run("ddp", 2, 1.0), run("fsdp", 4, 1.0))) == []


def test_failed_runs_are_no_points() -> None:
    failed = run("ddp", 4, 0.1, status="failed")
    assert strong_scaling(rows(run("ddp", 2, 1.0), failed)) == []


def test_twice_the_time_for_twice_the_ranks_is_half_the_weak_efficiency() -> None:
    (curve,) = weak_scaling(rows(growing(2, 1.0), growing(4, 2.0)))
    assert [point.weak_efficiency for point in curve] == [1.0, 0.5]
    assert [point.work_ratio for point in curve] == [1.0, 1.0]


def test_work_that_does_not_double_with_the_ranks_is_seen() -> None:
    """KAUST's weak scaling: the vocabulary dominates, so twice the layers are not twice the model."""
    (curve,) = weak_scaling(rows(growing(2, 1.0, tokens=1024), growing(4, 1.1, 1200, tokens=1024)))
    assert curve[-1].work_ratio == pytest.approx(0.6)


def test_one_job_on_several_ranks_is_no_weak_scaling() -> None:
    assert weak_scaling(rows(run("ddp", 2, 1.0), run("ddp", 4, 1.0))) == []


def test_jobs_that_differ_in_more_than_size_are_no_weak_scaling() -> None:
    other = growing(4, 1.0)
    changed = other.model_copy(update={"job": other.job | {"optimizer": {"learning_rate": 1.0}}})
    assert weak_scaling(rows(growing(2, 1.0), changed)) == []
