"""The machine itself: what torch finds on it, and the faults that it can be given."""

import re
from pathlib import Path

import pytest

from tests.gpu_stub.machine import Machine
from tests.plugins import register

SLEEPER = """
import time

from harness.backends.ddp import DdpBackend


class Sleeper(DdpBackend):
    '''Rank 1 never comes to its fifth forward pass.'''

    def prepare(self, build_model, build_optimizer, context):
        engine = super().prepare(build_model, build_optimizer, context)
        forward, passes = engine.forward, []

        def forward_or_sleep(batch):
            passes.append(batch)
            if context.world.rank == 1 and len(passes) == 5:
                time.sleep(3600)
            return forward(batch)

        engine.forward = forward_or_sleep
        return engine
"""
LITTLE = {"CUDA_STUB_MEMORY_BYTES": str(2**20)}


def test_a_run_says_that_its_device_is_a_stub(machine: Machine) -> None:
    record = machine.run("ddp")
    assert record.status == "ok", record.error
    assert (record.world.device, record.world.collectives) == ("cuda", "nccl")
    assert {rank.device_name for rank in record.ranks} == {"CUDA stub"}


def test_a_name_that_is_asked_for_still_says_so(machine: Machine) -> None:
    record = machine.run("ddp", environment={"CUDA_STUB_NAME": "NVIDIA A100-SXM4-80GB"})
    assert {rank.device_name for rank in record.ranks} == {"CUDA stub NVIDIA A100-SXM4-80GB"}


def test_memory_beyond_the_device_is_out_of_memory(machine: Machine) -> None:
    record = machine.run("ddp", environment=LITTLE)
    assert (record.status, record.error.kind) == ("oom", "OutOfMemoryError")


def test_an_asynchronous_error_of_nccl_ends_the_run(machine: Machine) -> None:
    """Torch's watchdog sees it, and would dump for a minute; the other faults are in test_measurement."""
    faults = {"CUDA_STUB_NCCL_ERROR": "20", "CUDA_STUB_FAULT_RANK": "1"}
    record = machine.run("ddp", settings=["runtime.stuck_after_seconds=10"], environment=faults)
    assert record.status in {"failed", "timeout"}
    assert record.error is not None
    log = machine.run_directory(record).joinpath("rank-00001.log").read_text()
    assert "failure detected by watchdog" in log


def test_the_collective_that_a_stuck_rank_waits_in_is_named(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's flight recorder has it; gloo's is there too, and empty."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    register(tmp_path, {"sleeper": "sleeper:Sleeper"})
    monkeypatch.syspath_prepend(tmp_path)
    record = machine.run("sleeper", settings=["runtime.stuck_after_seconds=5"])
    error = record.error
    assert (record.status, error.rank) == ("timeout", 1)
    assert "rank 1 is in no collective, while others wait in one" in error.message
    # DDP sends rank 0's buffers before each forward pass: the two of 8 elements of rotary positions.
    named = r"rank 0 waits in nccl broadcast number \d+ of group 0, default_pg \(16 Float\)"
    assert re.search(named, error.message), error.message
    assert "form a process group" not in error.message
    said = machine.harness("hang", str(machine.run_directory(record))).stdout
    assert said.startswith("rank 1 is in no collective, after nccl ")
