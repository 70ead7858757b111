from pathlib import Path

import pytest

from harness.errors import JobError
from harness.job import batch
from harness.job.config import load_experiment
from harness.job.job import Job, TrainingSection
from harness.launch.cells import make_cell


def layout(total: int, micro: int, accumulation: int) -> batch.BatchLayout:
    return batch.BatchLayout(
        global_batch_size=total, micro_batch_size=micro, accumulation_steps=accumulation
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "world_size", "expected"),
    [
        ({"global_batch_size": 16, "micro_batch_size": 2}, 4, (16, 2, 2)),
        ({"global_batch_size": 16, "accumulation_steps": 4}, 2, (16, 2, 4)),
        ({"micro_batch_size": 3, "accumulation_steps": 5}, 2, (30, 3, 5)),
        ({"global_batch_size": 16, "micro_batch_size": 2, "accumulation_steps": 4}, 2, (16, 2, 4)),
        ({"global_batch_size": 16}, 4, (16, 4, 1)),
        ({"micro_batch_size": 4}, 3, (12, 4, 1)),
        ({"accumulation_steps": 2}, 2, (8, 2, 2)),
        ({}, 2, (8, 4, 1)),
    ],
)
def test_what_is_not_given_is_derived(
    given: dict[str, int], world_size: int, expected: tuple[int, int, int]
) -> None:
    assert batch.batch_layout(TrainingSection(**given), world_size) == layout(*expected)


@pytest.mark.parametrize(
    ("given", "world_size", "named"),
    [
        ({"global_batch_size": 16, "micro_batch_size": 2, "accumulation_steps": 4}, 4,
         "ranks 4, global_batch_size 16, micro_batch_size 2, accumulation_steps 4"),
        ({"global_batch_size": 10}, 4, "ranks 4, global_batch_size 10"),
        ({"global_batch_size": 2}, 4, "ranks 4, global_batch_size 2"),
        ({"global_batch_size": 10, "micro_batch_size": 4}, 2,
         "ranks 2, global_batch_size 10, micro_batch_size 4"),
        ({"global_batch_size": 4, "micro_batch_size": 4}, 2,
         "ranks 2, global_batch_size 4, micro_batch_size 4"),
        ({}, 3, "ranks 3, global_batch_size 8"),
        ({"accumulation_steps": 3}, 2, "ranks 2, global_batch_size 8, accumulation_steps 3"),
    ],
)  # fmt: skip
def test_batch_that_does_not_divide_is_refused(given: dict[str, int], world_size: int, named: str) -> None:
    with pytest.raises(JobError) as caught:
        batch.batch_layout(TrainingSection(**given), world_size)
    assert str(caught.value).startswith(
        f"{named} do not fit: training.global_batch_size (default 8) must equal ranks"
    )


def test_fewer_samples_than_ranks_go_to_groups_that_share_them() -> None:
    training = TrainingSection(global_batch_size=4)
    labels = ["fsdp", "tp:tensor=4", "ulysses-zero3:sequence=2"]
    found = batch.job_layout(labels, 8, training)
    assert found == layout(4, 1, 1)
    assert batch.cell_layout("ulysses-zero3:sequence=2", 8, found, training) == layout(4, 1, 1)
    assert batch.cell_layout("tp:tensor=4", 8, found, training) == layout(4, 2, 1)
    with pytest.raises(JobError, match="ranks 8, global_batch_size 4 do not fit"):
        batch.cell_layout("fsdp", 8, found, training)
    with pytest.raises(JobError, match="ranks 8, global_batch_size 4 do not fit"):
        batch.job_layout(["fsdp"], 8, training)


def test_a_micro_batch_of_a_pipeline_need_not_divide_the_samples_of_a_rank() -> None:
    training = TrainingSection(global_batch_size=64, micro_batch_size=8)
    assert batch.job_layout(["pp:stages=8"], 64, training) == layout(64, 8, 1)


def test_micro_batch_and_accumulation_scale_the_global_batch_with_the_world() -> None:
    training = TrainingSection(micro_batch_size=2, accumulation_steps=3)
    assert [batch.batch_layout(training, n).global_batch_size for n in (1, 2, 4)] == [6, 12, 24]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"global_batch_size": 16, "micro_batch_size": 2}, (16, 2, 8)),
        ({"global_batch_size": 16, "accumulation_steps": 2}, (16, 8, 2)),
        ({"micro_batch_size": 2, "accumulation_steps": 3}, (24, 2, 12)),  # weak scaling
    ],
)
def test_reference_keeps_a_given_micro_batch(given: dict[str, int], expected: tuple[int, int, int]) -> None:
    training = TrainingSection(**given)
    assert batch.reference_layout(batch.batch_layout(training, 4), training) == layout(*expected)


def job_id(world_size: int, **given: int) -> str:
    job = Job(training=TrainingSection(**given))
    return batch.with_global_batch(job, batch.batch_layout(job.training, world_size)).job_id()


def test_job_id_ignores_how_the_global_batch_is_cut() -> None:
    ids = {
        job_id(1, global_batch_size=16),
        job_id(4, global_batch_size=16),
        job_id(2, global_batch_size=16, micro_batch_size=2),
        job_id(2, global_batch_size=16, accumulation_steps=4),
        job_id(4, micro_batch_size=2, accumulation_steps=2),
    }
    assert len(ids) == 1
    assert job_id(2) == job_id(2, global_batch_size=8) not in ids


@pytest.mark.parametrize(
    ("assignment", "is_another"),
    [
        ("training.seed=1", True), ("training.steps=21", True), ("optimizer.learning_rate=2e-3", True),
        ("data.sequence_length=64", True), ("model.config={num_hidden_layers: 2}", True),
        ("evaluation.every_steps=5", True), ("measure.warmup_steps=1", False),
        ("runtime.threads_per_rank=1", False), ("compare.repeats=2", False),
        ("training.deterministic=false", False),
    ],
)  # fmt: skip
def test_job_id_knows_what_changes_the_training_and_nothing_else(assignment: str, is_another: bool) -> None:
    changed, default = (load_experiment(None, given).job().job_id() for given in ([assignment], []))
    assert (changed != default) == is_another


def cell_of(path: Path) -> tuple[str, str]:
    experiment = load_experiment(None, ["data.source=text", f"data.path={path}"])
    cell = make_cell(experiment, "ddp", 2, batch.batch_layout(experiment.training, 2), 0, "cpu")
    return cell.job_id, cell.key


def test_a_job_reads_the_content_of_its_file_wherever_it_lies(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("the same words")
    second.write_text("the same words")
    before = cell_of(first)
    assert before == cell_of(second)
    first.write_text("other words")
    assert [now != then for now, then in zip(cell_of(first), before, strict=True)] == [True, True]
