"""Runs that would not have the memory are not submitted."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from harness.cli import harness
from harness.errors import HarnessError
from harness.job.experiment import Experiment
from harness.record.store import read_record
from harness.slurm.matrix import MATRIX_NAME, Matrix, Site, load_site, plan_nodes, render_matrix, write_matrix
from harness.slurm.submission import memory_bytes, site_limits, unfit_software, unsubmitted
from tests.harness.slurm.fakes import FakeSlurm
from tests.harness.slurm.test_site import SITES

GPUS = Site(name="test", gpus_per_node=4, gpu="A100-40")
JOB = {
    "model": {"name": "bloom-7b1", "weights": "random"},
    "data": {"sequence_length": 512, "tokenizer": "bytes"},
    "training": {"precision": "bf16-mixed", "global_batch_size": 16},
    "compare": {"noise_runs": False, "question": "memory"},
    "runtime": {"device": "cuda"},
}


def a_matrix(tmp_path: Path, site: Site = GPUS) -> tuple[Path, Matrix]:
    """DDP of 7 billion parameters, which no A100 holds, and ZeRO-3 over 16 ranks, which does."""
    experiment = Experiment.model_validate(JOB)
    cells = [
        cell for cell in plan_nodes(experiment, site, ["ddp", "zero3"], [4], 4, 1) if cell.world_size > 1
    ]
    matrix, scripts = render_matrix(
        cells, experiment, site, folder=tmp_path / "jobs", runs_folder=tmp_path / "runs", job_name="h",
        arrays=False, command=["harness"],
    )  # fmt: skip
    write_matrix(tmp_path / "jobs", matrix, scripts)
    return tmp_path / "jobs", matrix


def submit(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(harness, ["slurm", "submit", str(folder), *arguments])


def test_what_cannot_fit_is_recorded_and_the_rest_submitted(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, matrix = a_matrix(tmp_path)
    done = submit(folder)
    assert done.exit_code == 0, done.output
    assert "predicted memory: ddp on 16 ranks: cannot fit: " in done.output
    assert "predicted memory: zero3 on 16 ranks: fits: " in done.output
    assert len(slurm.calls("sbatch")) == 1
    refused, submitted = matrix.runs
    record = read_record(matrix.run_directory(refused) / "record.json")
    assert record.status == "unsupported"
    assert record.reasons[0].endswith("of 42.4 GB per rank; --force starts it anyway")
    assert record.prediction is not None
    assert record.prediction.peak_bytes > 16 * 7_069_016_064
    assert "prediction" in (matrix.run_directory(submitted) / "request.json").read_text()


def test_force_submits_what_was_refused(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, matrix = a_matrix(tmp_path)
    submit(folder)
    assert unsubmitted(folder, matrix) == []
    done = submit(folder, "--force")
    assert done.exit_code == 0, done.output
    assert len(slurm.calls("sbatch")) == 2


def test_a_gpu_that_is_typed_goes_before_the_sites(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, _ = a_matrix(tmp_path)
    done = submit(folder, "--gpu", "B200")
    assert "ddp and zero3 on 16 ranks: fits" in done.output, done.output
    assert len(slurm.calls("sbatch")) == 2


def test_an_unknown_gpu_is_one_line(tmp_path: Path, slurm: FakeSlurm) -> None:
    folder, _ = a_matrix(tmp_path)
    done = submit(folder, "--gpu", "A1000-40")
    assert done.exit_code == 1
    assert "GPU 'A1000-40' is unknown. Did you mean" in done.output


def test_a_site_says_what_it_has() -> None:
    limits = site_limits(GPUS.model_copy(update={"memory_per_node": "120G"}))
    assert limits.device is not None
    assert (limits.device_bytes, limits.host_bytes) == (limits.device.memory_bytes, 120 * 2**30)
    assert site_limits(Site(name="cpu")).device_bytes is None


@pytest.mark.parametrize(
    ("text", "count"),
    [(None, None), ("0", None), ("512", 512 * 2**20), ("2T", 2 * 2**40), ("64k", 64 * 2**10)],
)
def test_memory_is_read_as_sbatch_reads_it(text: str | None, count: int | None) -> None:
    assert memory_bytes(text) == count


def test_a_gpu_needs_gpus() -> None:
    with pytest.raises((HarnessError, ValueError), match="gpu needs gpus_per_node"):
        Site(name="cpu", gpu="A100-40")


def torch_in(folder: Path, cuda: str) -> str:
    """A virtual environment with torch's wheel for that CUDA."""
    package = folder / "lib" / "python3.11" / "site-packages" / "torch"
    package.mkdir(parents=True)
    package.joinpath("version.py").write_text(f"__version__ = '2.13.0'\ncuda = '{cuda}'\nhip = None\n")
    return str(folder)


def test_a_wheel_without_kernels_for_the_sites_gpus_is_refused(tmp_path: Path) -> None:
    site = Site(name="old", gpus_per_node=4, gpu="V100-32", virtual_environment=torch_in(tmp_path, "13.0"))
    assert unfit_software(site) == (
        "site 'old' has V100-32: torch 2.13.0 (CUDA 13.0) has no kernels for sm_70; install torch's wheel "
        "for CUDA 12.6 (https://download.pytorch.org/whl/cu126)"
    )
    assert unfit_software(site, "A100-40") is None
    assert unfit_software(site.model_copy(update={"virtual_environment": None})) is None


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_wheel_that_pip_installs_has_kernels_for_the_gpus_of_example_sites(
    path: Path, tmp_path: Path
) -> None:
    """PyPI's wheels of the pinned torch are built for CUDA 13."""
    site = load_site(path).model_copy(update={"virtual_environment": torch_in(tmp_path, "13.0")})
    assert unfit_software(site) is None


def test_submit_refuses_a_wheel_without_kernels(tmp_path: Path, slurm: FakeSlurm) -> None:
    environment = torch_in(tmp_path / "venv", "13.0")
    folder, matrix = a_matrix(tmp_path)
    site = matrix.site.model_copy(update={"virtual_environment": environment})
    (folder / MATRIX_NAME).write_text(matrix.model_copy(update={"site": site}).model_dump_json())
    done = submit(folder, "--gpu", "V100-32")
    assert done.exit_code == 1
    assert "has no kernels for sm_70" in done.output
    assert len(slurm.calls("sbatch")) == 0
