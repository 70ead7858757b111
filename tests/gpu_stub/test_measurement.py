"""What measuring costs on CUDA, what it must not claim to have seen, and memory that runs out."""

import json
import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.diagnose.rerun import rerun
from tests.gpu_stub.launcher import FORKS, launcher
from tests.gpu_stub.machine import Machine
from tests.gpu_stub.programs import KEPT_BYTES
from tests.representatives import first

KERNELS_DO_NOTHING = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Torch's own code for CUDA allocates, as it does on a GPU, and launches kernels without effect."""
LARGEST_SHARE = 0.01
MATRICES_BYTES = 3 * 4 * 1024**2
TRACED = ["training.steps=10", "measure.traced_steps=1"]


@cache
def results(*programs: str, device_computes: bool = True) -> dict[str, Any]:
    """Of programs that share a process, in this order."""
    environment = {} if device_computes else KERNELS_DO_NOTHING
    variables = os.environ | {"CUDA_STUB_DEVICES": "1"} | environment
    variables.pop(FORKS, None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_stub.programs", *programs], env=variables, capture_output=True,
        text=True, check=False, timeout=300, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def result_of(program: str) -> Any:
    return results("left_by_matmul_peak", "norm_error", "batch_copies", "kept_of_collectives")[program]


def test_the_gradient_norm_copies_no_gradient() -> None:
    assert 0 < results("norm_peak", device_computes=False)["norm_peak"] < LARGEST_SHARE


def test_the_gradient_norm_is_exact() -> None:
    assert result_of("norm_error") < 1e-12


def test_the_peak_of_matrix_products_leaves_next_to_nothing_reserved() -> None:
    now, largest = result_of("left_by_matmul_peak")
    assert now == largest < MATRICES_BYTES


def test_batches_are_copied_without_waiting_for_the_device() -> None:
    assert result_of("batch_copies") == [True, True]


def test_buffers_of_finished_collectives_are_released_before_memory_is_read() -> None:
    """Else ranks whose watchdog is late would hold what others do not: DDP's buckets before their layout."""
    assert result_of("kept_of_collectives") == [KEPT_BYTES, 0]


def test_a_trace_without_events_of_the_gpu_is_not_idle(machine: Machine) -> None:
    record = machine.run("ddp", settings=TRACED)
    assert record.windows.traced == 2
    assert [rank.overlap for rank in record.ranks] == [[], []]
    assert {(rank.overlap_missing or "").split(":")[0] for rank in record.ranks} == {
        "the profiler saw no kernel on the GPU"
    }


STRATEGIES = {
    "fsdp": "FSDP2 full shard", "ddp": "DDP", "fsdp1": "FSDP1 full shard",
    "zero1": "ZeRO-1 or ZeRO-2 as DeepSpeed does them", "zero2": "ZeRO-1 or ZeRO-2 as DeepSpeed does them",
    "zero3": "ZeRO-3 or FSDP full shard",
}  # fmt: skip


@pytest.mark.parametrize("label", first(["fsdp"], STRATEGIES))
def test_a_trace_says_which_strategy_its_collectives_suggest(label: str, machine: Machine) -> None:
    record = machine.run(label, settings=[*TRACED, "measure.trace=true"])
    traces = sorted((machine.store.root / record.run_id).glob("trace-*.json.gz"))
    assert len(traces) == 2
    done = machine.harness("trace", *map(str, traces))
    (line,) = (line for line in done.stdout.splitlines() if "looks like" in line)
    assert f"looks like {STRATEGIES[label]} " in line.replace(":", " ")


def test_gradients_and_updates_of_an_offloading_run_can_be_examined(machine: Machine) -> None:
    record = machine.run("fsdp:offload=cpu")
    assert record.status == "ok", record.error
    with launcher().environment({"CUDA_STUB_DEVICES": "2"}):
        examined = rerun(record, [0], launcher(), lambda _: None).examined[0]
    assert examined.gradients.keys() == examined.updates.keys()


ALLOCATION_BYTES = 512
"""The caching allocator rounds up to these; its history lists what was asked for."""


@pytest.mark.parametrize("label", first(["fsdp"], ["zero3", "fsdp"]))
def test_allocator_peaks_are_those_of_its_own_history(label: str, machine: Machine) -> None:
    """Peaks of the record against the sum over every allocation that torch's snapshot lists."""
    record = machine.run(label, 2, ["measure.memory_snapshot=true"])
    assert record.status == "ok", record.error
    for part in record.ranks:
        peaks = [row.peak_bytes for row in part.memory if row.peak_bytes is not None]
        (file,) = machine.run_directory(record).glob(f"*snapshot*{part.rank:05}*")
        snapshot = pickle.loads(file.read_bytes())
        assert max(peaks) == largest_allocated_bytes(snapshot, part.rank)


def largest_allocated_bytes(snapshot: dict[str, Any], device: int) -> int:
    """From what is allocated at the end, back through the history."""
    held = sum(
        block["size"]
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    most = held
    for event in reversed(snapshot["device_traces"][device]):
        size = -(-event["size"] // ALLOCATION_BYTES) * ALLOCATION_BYTES
        held += {"alloc": -size, "free_completed": size}.get(event["action"], 0)
        most = max(most, held)
    return int(most)


CASES = [
    ("ddp", "CUDA_STUB_MEMORY_BYTES", str(2**20), "CUDA out of memory"),
    ("ddp", "CUDA_STUB_NCCL_OUT_OF_MEMORY", "20", "unhandled cuda error"),
    ("fsdp", "CUDA_STUB_CUBLAS_OUT_OF_MEMORY", "1", "CUBLAS_STATUS_ALLOC_FAILED"),
    ("zero2:offload=cpu", "CUDA_STUB_PINNED_BYTES", "1024", "out of memory"),
]
STRUCK = {"CUDA_STUB_FAULT_RANK": "1"}


@pytest.mark.parametrize(
    ("backend", "variable", "value", "said"),
    first(CASES[1:3], CASES),
)
def test_a_rank_out_of_memory(backend: str, variable: str, value: str, said: str, machine: Machine) -> None:
    record = machine.run(backend, environment={variable: value, **STRUCK})
    assert (record.status, record.error.rank) == ("oom", 1), record.error
    assert said in record.error.message


def test_memory_beyond_the_limit_of_a_job_is_not_served(machine: Machine) -> None:
    """`runtime.memory_limit` ends a rank on CUDA as a full device does."""
    record = machine.run("ddp", settings=["runtime.memory_limit=1MB"])
    assert (record.status, record.world.memory_limit_bytes) == ("oom", 10**6), record.error
    assert "CUDA out of memory" in record.error.message
