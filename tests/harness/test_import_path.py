"""What lies in the current folder runs only where a job names it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.import_path import given_environment, leave_current_folder, put_before_packages, safe_environment
from harness.launch.observed_command import observed_environment

from .cli.command_line import environment, harness_process

pytestmark = pytest.mark.long(seconds=10)
NAMES = (
    "__future__", "json", "random", "runpy", "sitecustomize", "tokenize", "torch", "transformers", "typing",
    "click", "deepspeed", "datasets", "statistics",
)  # fmt: skip
JOB = """\
import random
from torch import nn
from beside import WIDTH


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.first(x).relu()).squeeze(-1)


def model():
    return Net()


def samples():
    import torch
    from later import COUNT

    return [{"x": torch.full((4,), i / COUNT), "y": torch.tensor(i / COUNT)} for i in range(COUNT)]


def loss():
    return lambda model, batch: (model(batch["x"]) - batch["y"]).pow(2).mean()
"""
SETTINGS = """\
task: custom
model: {factory: "job:model"}
data: {factory: "job:samples"}
loss: {factory: "job:loss", reduction: mean, targets: samples}
training: {steps: 12, global_batch_size: 4}
measure: {probed_steps: 0, traced_steps: 0}
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder of modules that leave a file when they are run, and those of a job."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / f'ran-{name}')!r}, 'w')\n")
    (folder / "job.py").write_text(JOB)
    (folder / "beside.py").write_text("WIDTH = 8\n")
    (folder / "later.py").write_text("COUNT = 32\n")
    (folder / "job.yaml").write_text(SETTINGS)
    return folder


def ran(folder: Path) -> list[str]:
    """The hostile modules that were run."""
    return sorted(file.name for file in folder.parent.glob("ran-*"))


@pytest.mark.costly
def test_ranks_import_the_modules_of_the_job_alone(hostile: Path) -> None:
    words = ("run", "--config", "job.yaml", "--backend", "ddp", "--nproc", "2", "--runs", "../runs")
    done = harness_process(*words, cwd=hostile)
    assert done.returncode == 0, done.stderr
    assert ran(hostile) == []


@pytest.mark.parametrize("module", ["harness", "harness.launch", "harness.rank.initial_weights"])
def test_a_module_that_python_starts_imports_nothing_there(hostile: Path, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=hostile, env=environment(), capture_output=True,
        text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (module == "harness")
    assert ran(hostile) == []


def test_an_empty_entry_of_the_path_reaches_no_process_that_is_started(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/nowhere", ""]))
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.path)"], cwd=hostile, env=safe_environment(),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "/nowhere" in done.stdout
    assert str(hostile) not in done.stdout
    assert ran(hostile) == []


def test_an_observed_script_keeps_the_path_that_it_has_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.import_path._given", {})
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/one", "", "/two"]))
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    leave_current_folder()
    assert (os.environ["PYTHONSAFEPATH"], os.environ["PYTHONPATH"]) == ("1", f"/one{os.pathsep}/two")
    assert sys.path[:2] != ["", str(tmp_path)]
    assert str(tmp_path) not in sys.path
    given = given_environment()
    assert (given["PYTHONSAFEPATH"], given["PYTHONPATH"]) == ("", f"/one{os.pathsep}{os.pathsep}/two")
    observed = observed_environment(tmp_path)
    assert observed["PYTHONSAFEPATH"] == ""
    assert observed["PYTHONPATH"].split(os.pathsep)[1:] == ["/one", "/two"]


def test_a_named_folder_comes_after_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/lib/python3.11", "/env/site-packages", "/job"])
    put_before_packages("/job")
    assert sys.path == ["/lib/python3.11", "/job", "/env/site-packages"]
