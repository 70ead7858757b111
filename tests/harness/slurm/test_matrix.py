"""From a matrix of cells to scripts and their runs."""

import itertools
import sys
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.job.experiment import CompareSection, Experiment
from harness.slurm.matrix import Matrix, Site, plan_nodes, read_matrix, render_matrix, write_matrix
from tests.harness.cli.command_line import harness

SITE = Site(name="test")
EXPERIMENT = Experiment(compare=CompareSection(noise_runs=False))


def rendered(folder: Path, *, arrays: bool, repeats: int = 1) -> tuple[Matrix, dict[str, str]]:
    cells = plan_nodes(EXPERIMENT, SITE, ["ddp", "fsdp-hybrid"], [1, 2], 2, repeats)
    return render_matrix(
        cells, EXPERIMENT, SITE, folder=folder, runs_folder=folder / "runs", job_name="h", arrays=arrays,
        command=["harness", "slurm", "render"],
    )  # fmt: skip


def test_cells_are_backends_times_nodes_and_one_reference(tmp_path: Path) -> None:
    matrix, scripts = rendered(tmp_path, arrays=False)
    requests = [(run.nodes, run.request) for run in matrix.runs]
    assert [(r.backend, nodes, r.world_size, r.ranks_per_node) for nodes, r in requests] == [
        ("single", 1, 1, 1), ("ddp", 1, 2, 2), ("fsdp-hybrid", 1, 2, 2), ("ddp", 2, 4, 2),
        ("fsdp-hybrid", 2, 4, 2),
    ]  # fmt: skip
    assert len(scripts) == 5


def test_equal_ranks_on_other_nodes_are_another_cell() -> None:
    (one,) = {c.key for c in plan_nodes(EXPERIMENT, SITE, ["ddp"], [1], 4, 1) if c.backend == "ddp"}
    (two,) = {c.key for c in plan_nodes(EXPERIMENT, SITE, ["ddp"], [2], 2, 1) if c.backend == "ddp"}
    other = Site(name="other")
    (three,) = {c.key for c in plan_nodes(EXPERIMENT, other, ["ddp"], [2], 2, 1) if c.backend == "ddp"}
    assert len({one, two, three}) == 3


def test_an_array_holds_the_cells_of_equal_worlds(tmp_path: Path) -> None:
    matrix, scripts = rendered(tmp_path, arrays=True)
    assert set(scripts) == {"array-1x1.sbatch", "array-1x2.sbatch", "array-2x2.sbatch"}
    assert "--array=0-1" in scripts["array-2x2.sbatch"]
    indices = [(r.script, r.array_index) for r in matrix.runs if r.nodes == 2]
    assert indices == [("array-2x2.sbatch", 0), ("array-2x2.sbatch", 1)]
    listed = [line.strip() for line in scripts["array-2x2.sbatch"].splitlines() if line.startswith("  /")]
    assert listed == [str(matrix.run_directory(r)) for r in matrix.runs if r.nodes == 2]


def test_an_array_is_no_longer_than_slurm_takes(tmp_path: Path) -> None:
    matrix, scripts = rendered(tmp_path, arrays=True, repeats=600)
    lengths = {name: text.count(f"{tmp_path}/runs/") for name, text in scripts.items()}
    assert lengths == {
        "array-1x1.sbatch": 600, "array-1x2.sbatch": 1000, "array-1x2-1.sbatch": 200,
        "array-2x2.sbatch": 1000, "array-2x2-1.sbatch": 200,
    }  # fmt: skip
    assert max(run.array_index or 0 for run in matrix.runs) == 999


@pytest.mark.parametrize(
    ("folder", "said"), [("a\nb", "control character"), ("a\\b", "backslash"), ("a\udc80", "not UTF-8")]
)
def test_a_folder_that_no_job_could_use_is_refused(tmp_path: Path, folder: str, said: str) -> None:
    with pytest.raises(HarnessError, match=said):
        rendered(tmp_path / folder, arrays=False)


def test_a_matrix_is_read_back_as_written(tmp_path: Path) -> None:
    matrix, scripts = rendered(tmp_path, arrays=True)
    write_matrix(tmp_path / "jobs", matrix, scripts)
    assert read_matrix(tmp_path / "jobs") == matrix
    with pytest.raises(HarnessError, match="holds a matrix already"):
        write_matrix(tmp_path / "jobs", matrix, scripts)


def test_a_folder_without_a_matrix_is_said(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="harness slurm render"):
        read_matrix(tmp_path)


def test_more_ranks_than_gpus_are_refused() -> None:
    site = Site(name="x", gpus_per_node=4)
    with pytest.raises(HarnessError, match="gpus_per_node 4; lower --nproc"):
        plan_nodes(EXPERIMENT, site, ["ddp"], [1], 8, 1)


def test_turns_are_refused_since_a_job_runs_one_cell(tmp_path: Path) -> None:
    words = ["slurm", "render", "--site", "@generic", "--backends", "ddp", "-o", tmp_path / "jobs"]
    done = harness(*words, "--set", "compare.turns=3", cwd=tmp_path)
    assert done.returncode == 1
    assert "compare.turns is 3, but each job of Slurm runs one cell alone" in done.stderr
    assert not (tmp_path / "jobs").exists()
    done = harness(*words, "--set", "compare.turns=3", "--set", "compare.turns=null", cwd=tmp_path)
    assert done.returncode == 0


def calls_of_rendering(folder: Path, repeats: int) -> int:
    """Of Python's functions."""
    counted = itertools.count()
    sys.setprofile(lambda frame, event, argument: event == "call" and next(counted))
    try:
        matrix, scripts = rendered(folder, arrays=False, repeats=repeats)
        write_matrix(folder / "jobs", matrix, scripts)
    finally:
        sys.setprofile(None)
    assert len(scripts) == 5 * repeats
    return next(counted)


def test_ten_times_as_many_cells_take_ten_times_as_much_work(tmp_path: Path) -> None:
    rendered(tmp_path, arrays=False)  # what is read once
    assert calls_of_rendering(tmp_path / "many", 20) <= 10 * calls_of_rendering(tmp_path / "few", 2)


def test_names_of_jobs_hold_no_colon_and_no_equals_sign(tmp_path: Path) -> None:
    site = SITE.model_copy(update={"reservation": "course"})
    _, scripts = render_matrix(
        plan_nodes(EXPERIMENT, site, ["zero3:offload=cpu"], [1], 2, 1), EXPERIMENT, site, folder=tmp_path,
        runs_folder=tmp_path / "runs", job_name="h", arrays=False, command=["harness", "slurm", "render"],
    )  # fmt: skip
    lines = [text.splitlines() for text in scripts.values()]
    assert "#SBATCH --job-name=h-zero3_offload_cpu-1x2" in lines[-1]
    assert all("#SBATCH --reservation=course" in script for script in lines)


def test_a_model_that_only_the_cluster_has_is_rendered_and_a_relative_path_is_not(tmp_path: Path) -> None:
    done = harness(
        "slurm", "render", "--site", "@generic", "--backends", "ddp", "--nodes", "1", "-o", tmp_path / "jobs",
        "--set", "model.name=/scratch/models/mine", "--set", "data.tokenizer=bytes", cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, "model.name /scratch/models/mine is not on this machine" in done.stderr) == (
        0,
        True,
    )
    with pytest.raises(HarnessError, match="does not exist"):
        plan_nodes(
            load_experiment(None, ["data.source=text", "data.path=mine.txt"]), SITE, ["ddp"], [1], 2, 1
        )
