"""Exported programs, started as a person starts them, train what the harness measured: equal losses."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.record import Record
from tests.harness.cli.command_line import SMALL, environment, harness, records
from tests.observed import run_script
from tests.patience import SECONDS

pytestmark = pytest.mark.long(seconds=10)
JOB = [
    *SMALL, "--nproc", "2", "--set", "training.steps=3", "--set", "training.accumulation_steps=2",
    "--set", "training.gradient_clipping=0.5",
]  # fmt: skip
NO_PROBES = ["--set", "measure.probed_steps=0", "--set", "measure.traced_steps=0"]
ROUNDING = 2e-6
"""Relative: programs add the gradient norm, by which they clip, in fp32; the harness in fp64."""
STARTED = (("torchrun", "fsdp1-grad-op"), ("accelerate", "zero2"))
LOW_PRECISION = ["--set", "training.precision=bf16-mixed"]


def measured(folder: Path, backend: str, *words: str) -> Record:
    done = harness("run", "--backend", backend, *JOB, *NO_PROBES, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    (record,) = records(folder / "runs")
    return record


def trained(folder: Path, tool: str, backend: str, *words: str) -> list[dict[str, Any]]:
    """The lines that the exported program prints; the printed command starts those of `STARTED`."""
    done = harness(
        "export", "program", "--to", tool, "--backend", backend, *JOB, *words, "-o", "mine", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[-1].rpartition("&& ")[2]
    program, *rest = shlex.split(command)
    if (tool, backend) not in STARTED:  # in ranks that have their imports behind them
        assert [program, *rest] == ["torchrun", "--nproc-per-node", "2", "train.py"]
        ran = run_script(folder / "mine", folder / "mine" / "train.py", observe=False)
        assert ran.codes == [0, 0], ran.printed
        return [json.loads(line) for line in ran.lines('{"step"')]
    modules = {"torchrun": ["torch.distributed.run"], "accelerate": ["accelerate.commands.accelerate_cli"]}
    started = subprocess.run(
        [sys.executable, "-m", *modules[program], *rest], cwd=folder / "mine",
        env=environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PATH=os.environ["PATH"]),
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr[-3000:]
    return [json.loads(line) for line in started.stdout.splitlines() if line.startswith('{"step"')]


@pytest.mark.parametrize(
    ("tool", "backend", "words"),
    [
        pytest.param("torchrun", "fsdp", LOW_PRECISION, marks=pytest.mark.costly),
        pytest.param("torchrun", "fsdp1-grad-op", [], marks=pytest.mark.exhaustive),
        pytest.param("torchrun", "fsdp:sync_each_batch=true", [], marks=pytest.mark.exhaustive),
        pytest.param("deepspeed", "zero3", LOW_PRECISION, marks=pytest.mark.costly),
        pytest.param("accelerate", "zero2", [], marks=pytest.mark.exhaustive),
    ],
)
def test_losses_are_those_of_the_harness(tool: str, backend: str, words: list[str], tmp_path: Path) -> None:
    record = measured(tmp_path, backend, *words)
    printed = trained(tmp_path, tool, backend, *words)
    assert [line["step"] for line in printed] == [0, 1, 2]
    losses = [step.loss for step in record.steps]
    assert [line["loss"] for line in printed] == pytest.approx(losses, rel=ROUNDING)
    config = tmp_path / "mine" / "ds_config.json"
    if config.exists():
        assert json.loads(config.read_text()) == record.backend.native_config


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("own work")
    done = harness("export", "program", "--backend", "ddp", *JOB, "-o", "mine", cwd=tmp_path)
    assert done.returncode == 1
    assert "is not empty" in done.stderr
    assert (tmp_path / "mine" / "train.py").read_text() == "own work"
