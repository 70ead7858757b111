"""Commands as a user gives them on a CUDA machine; ranks are new processes but those of the self-check."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from harness.cli.doctor import doctor
from harness.doctor import self_check
from harness.fabric.result import OPERATIONS, read_fabric
from harness.record.store import read_runs
from tests.gpu_stub.launcher import launcher
from tests.gpu_stub.machine import SETTINGS, Machine
from tests.representatives import EXHAUSTIVE

TRIED = ("single", "ddp", "zero2", "fsdp")
TWO = {"CUDA_STUB_DEVICES": "2"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def settings() -> list[str]:
    return [word for setting in SETTINGS for word in ("--set", setting)]


@pytest.mark.parametrize(
    "launched_by",
    [pytest.param((), id="own launcher"), pytest.param(TORCHRUN, id="torchrun", marks=EXHAUSTIVE)],
)
def test_run(launched_by: tuple[str, ...], machine: Machine) -> None:
    runs = f"runs-{len(launched_by)}"
    words = [] if launched_by else ["--nproc", "2"]
    done = machine.harness(
        "run",
        "--backend",
        "fsdp",
        *words,
        *settings(),
        "--runs",
        runs,
        environment=TWO,
        launched_by=launched_by,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tokens/s" not in done.stderr
    assert launched_by or "step 6/6, loss" in done.stderr
    predicted = [line for line in done.stderr.splitlines() if line.startswith("predicted memory: ")]
    assert launched_by or [line.rpartition(" of ")[2] for line in predicted] == ["85.9 GB per rank"]
    ((_, record),), problems = read_runs([machine.folder / runs])
    assert problems == []
    assert record.status == "ok"
    assert record.world.collectives == "nccl"
    assert {rank.device_name for rank in record.ranks} == {"CUDA stub"}
    forked = machine.run("fsdp")
    assert record.final_weights is not None
    assert forked.final_weights is not None
    assert record.final_weights.digest == forked.final_weights.digest


def test_fabric(machine: Machine) -> None:
    done = machine.harness(
        "fabric", "--device", "cuda", "--max-size", "1MB", "--repeats", "2", "--output", "fabric.json",
        environment=TWO, launched_by=TORCHRUN,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = read_fabric(machine.folder / "fabric.json")
    assert (result.world_size, result.device_name) == (2, "CUDA stub")
    assert {row.op for row in result.rows} == set(OPERATIONS)
    assert [row.seconds for row in result.rows] == [[]] * len(result.rows)
    assert "n/a" in done.stdout


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "LocalLauncher", lambda *_: launcher())
    with launcher().environment(TWO):
        monkeypatch.setenv("CUDA_STUB_DEVICES", "2")
        done = CliRunner().invoke(doctor, ["--backends", "ddp,zero2,fsdp", "--json"])
    assert done.exit_code == 0, done.output[-3000:]
    document = json.loads(done.stdout)
    assert (document["trusted"], document["device"], document["ranks"]) == (True, "cuda", 2)
    assert "CUDA stub" in document["device_reason"]
    assert {row["name"]: row["status"] for row in document["backends"]} == dict.fromkeys(TRIED, "ok")
