"""A DeepSpeed and an Accelerate file: compared, exported as programs, observed; losses are equal."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from harness.record import Record
from tests.harness.cli.command_line import SMALL
from tests.journeys.journey import Journey

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=120)]
STEPS = 4
PEAK = 1e-3
DEEPSPEED = {
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": PEAK}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": PEAK, "warmup_num_steps": 10}},
}
ACCELERATE = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""
JOB = [
    *SMALL, "--nproc", "2", "--set", f"training.steps={STEPS}", "--set", "measure.warmup_steps=1", "--set",
    "measure.probed_steps=0", "--set", "measure.traced_steps=0",
]  # fmt: skip
FILES = {"ds": ["--from-deepspeed", "ds.json"], "fsdp": ["--from-accelerate", "fsdp.yaml"]}
ROUNDING = 2e-6
"""Relative: programs add the gradient norm, by which they clip, in fp32; the harness in fp64."""


@pytest.fixture(scope="module")
def compared(shared_journey: Journey) -> Journey:
    """A folder with the two files, compared, and the report."""
    (shared_journey.folder / "ds.json").write_text(json.dumps(DEEPSPEED))
    (shared_journey.folder / "fsdp.yaml").write_text(ACCELERATE)
    words = [*JOB, *FILES["ds"], *FILES["fsdp"], "--backends", "ddp", "--set", "compare.noise_runs=false"]
    planned = shared_journey.harness("compare", "--dry-run", "--json", *words)
    cells = json.loads(planned.stdout)["cells"]
    shared_journey.harness("compare", *words)
    assert len(shared_journey.records()) == len(cells) == 5
    shared_journey.harness("report", "runs", "-o", "report.md")
    return shared_journey


def row(journey: Journey, name: str) -> Record:
    (found,) = [one for one in journey.records() if f"row={name}" in one.backend.label]
    return found


def test_the_rates_are_those_of_deepspeed_s_own_default(compared: Journey) -> None:
    record = row(compared, "ds")
    rates = [step.learning_rate for step in record.steps]
    assert rates == pytest.approx([0, 3.0103e-4, 4.77121e-4, 6.0206e-4], rel=1e-5)
    optimizer = record.job.optimizer
    assert (optimizer.beta2, optimizer.weight_decay) == (0.999, 0)
    absent = {setting.key: setting.used for setting in record.backend.given.settings if setting.given is None}
    assert absent["scheduler.params.warmup_type"] == "log"
    assert "Configuration files of other tools" in compared.read("report.details.md")


@pytest.mark.parametrize(("name", "tool"), [("ds", "deepspeed"), ("fsdp", "torchrun")])
def test_the_program_of_a_file_trains_what_was_compared(compared: Journey, name: str, tool: str) -> None:
    if tool == "deepspeed":
        done = compared.harness("export", "program", *FILES[name], *JOB, "-o", name)
    else:
        done = compared.harness("export", "program", *FILES[name], *JOB, "-o", name)
    launch = shlex.split(done.stdout.splitlines()[-1].rpartition("&& ")[2])
    launch[-1] = f"{name}/{launch[-1]}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # torchrun, as in an active environment
    observed = compared.harness(
        "observe", "--runs", f"observed-{name}", "--", *launch, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
        PATH=path,
    )  # fmt: skip
    losses = [step.loss for step in row(compared, name).steps]
    printed = [json.loads(line) for line in observed.stdout.splitlines() if line.startswith('{"step"')]
    assert [line["loss"] for line in printed] == pytest.approx(losses, rel=ROUNDING)
    seen = compared.record(f"observed-{name}")
    assert [step.loss for step in seen.steps] == pytest.approx(losses, rel=ROUNDING)
