"""`accelerate launch` and `deepspeed` start exported programs, which train what the harness measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_stub.machine import SET, Machine
from tests.harness.rank.observing.test_scripts import ARGUMENTS, EXAMPLES, make_job
from tests.representatives import first

MORE = ("training.steps=4", "training.accumulation_steps=2", "training.gradient_clipping=0.5")
ROUNDING = 2e-6
"""Relative: programs add the gradient norm, by which they clip, in fp32; the harness in fp64."""
FSDP1 = """distributed_type: FSDP
mixed_precision: 'no'
num_processes: 2
fsdp_config:
  fsdp_version: 1
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_offload_params: false
  fsdp_use_orig_params: true
"""
CASES = [
    ("accelerate", "fsdp", None), ("accelerate", "fsdp1", FSDP1), ("deepspeed", "zero3", None),
    ("accelerate", "zero2", None),
]  # fmt: skip
MODULES = {
    "accelerate": ["accelerate.commands.accelerate_cli"],
    "deepspeed": ["deepspeed.launcher.runner"],
}


def exported(machine: Machine, folder: Path, tool: str, *words: str) -> list[str]:
    """The command that the export prints, its program as a module of this interpreter."""
    words = ["--to", tool, *words]
    more = [word for setting in MORE for word in ("--set", setting)]
    done = machine.harness("export", "program", *words, "--nproc", "2", *SET, *more, "-o", str(folder))
    assert done.returncode == 0, done.stderr
    program, *rest = done.stdout.splitlines()[-1].rpartition("&& ")[2].split()
    return [sys.executable, "-m", *MODULES[program], *rest]


@pytest.mark.parametrize(
    ("tool", "backend", "given"),
    first(CASES[:1], CASES),
)
def test_losses_are_those_of_the_harness(
    tool: str, backend: str, given: str | None, machine: Machine, tmp_path: Path
) -> None:
    record = machine.run(backend, settings=MORE)
    assert record.error is None
    words = ["--backend", backend]
    if given is not None:
        (tmp_path / "given.yaml").write_text(given)
        words = ["--from-accelerate", str(tmp_path / "given.yaml")]
    command = exported(machine, tmp_path / "mine", tool, *words)
    done = subprocess.run(
        command, cwd=tmp_path / "mine",
        env=machine.variables(OMP_NUM_THREADS="1", CUDA_STUB_DEVICES="2"), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    assert [line["step"] for line in printed] == [step.step for step in record.steps]
    losses = [step.loss for step in record.steps]
    assert [line["loss"] for line in printed] == pytest.approx(losses, rel=ROUNDING)


def test_a_script_as_it_is_trains_alike_under_fsdp(machine: Machine, tmp_path: Path) -> None:
    make_job(tmp_path)
    words = ("--backends", "ddp,fsdp,fsdp1", "--nproc", "2", "--runs", str(tmp_path / "runs"), "--json")
    words = (*words, "--set", "compare.noise_runs=false", "--set", "measure.cooldown_steps=1")
    # The script's own words are relative to where the command runs.
    arguments = [str(tmp_path / word) if word in ("model", "text.txt") else word for word in ARGUMENTS]
    done = machine.harness("compare", *words, "--", str(EXAMPLES / "accelerate_loop.py"), *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    rows = {row["backend"]: row for row in document["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "ok")
    assert {name: row["parity"] for name, row in rows.items()} == {
        "ddp": "exact", "fsdp": "tight", "fsdp1": "tight",
    }  # fmt: skip
    # Accelerate leaves the tail of FSDP2 gathered, which no closed form knows.
    assert (rows["fsdp"]["not_judged"] != [], rows["fsdp1"]["not_judged"]) == (True, [])
    found = {finding["id"] for finding in document["findings"]}
    assert not found & {"communication-differs", "memory-differs", "strategy-differs", "diverged"}
