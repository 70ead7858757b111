"""Devices are counted as CUDA shows them, each rank has its own, and what cannot be meant is refused."""

import json
import subprocess
import sys

import pytest

from harness.record import Record
from harness.record.store import read_record
from tests.gpu_stub.machine import SET, TORCHRUN, Machine
from tests.representatives import EXHAUSTIVE

RUN = ("run", "--backend", "ddp", *SET)
COUNT = (
    "import json; from harness.gpus.found import find_gpus; found = find_gpus(); "
    "print(json.dumps([found.count, found.why_none]))"
)


def counted(machine: Machine, **variables: str) -> tuple[int, str | None]:
    """GPUs that a new process finds, without nvidia-smi."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=machine.variables(PATH="/nowhere", **variables),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    count, why = json.loads(done.stdout)
    return count, why


@pytest.mark.parametrize(
    ("variables", "count", "why"),
    [
        pytest.param({}, 8, None, marks=EXHAUSTIVE),
        ({"CUDA_VISIBLE_DEVICES": "GPU-0000-3,GPU-0000-1"}, 2, None),
        ({"CUDA_VISIBLE_DEVICES": "MIG-0000-3"}, 1, None),
        pytest.param({"CUDA_VISIBLE_DEVICES": "2,-1,3"}, 1, None, marks=EXHAUSTIVE),
        pytest.param(
            {"CUDA_VISIBLE_DEVICES": "-1"}, 0, "CUDA_VISIBLE_DEVICES='-1' hides all GPUs", marks=EXHAUSTIVE
        ),
        ({"CUDA_STUB_DRIVER_TOO_OLD": "1"}, 0, "the NVIDIA driver takes CUDA 12.2"),
    ],
)
def test_torch_counts(machine: Machine, variables: dict[str, str], count: int, why: str | None) -> None:
    found, reason = counted(machine, **variables)
    assert found == count
    assert reason is None if why is None else why in str(reason)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        pytest.param(
            {"CUDA_VISIBLE_DEVICES": "0,0"}, "CUDA_VISIBLE_DEVICES=0,0 names device 0 more than once",
            marks=EXHAUSTIVE,
        ),
        ({"CUDA_VISIBLE_DEVICES": "0,9"}, "CUDA_VISIBLE_DEVICES=0,9: CUDA finds 1 of the 2 named"),
        pytest.param(
            {"CUDA_VISIBLE_DEVICES": "0"}, "2 ranks were asked for, but torch can use 1 GPUs here",
            marks=EXHAUSTIVE,
        ),
        pytest.param(
            {"CUDA_STUB_DRIVER_TOO_OLD": "1"}, "no GPU can be used: the NVIDIA driver takes CUDA 12.2",
            marks=EXHAUSTIVE,
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_line(
    machine: Machine, variables: dict[str, str], said: str
) -> None:
    done = machine.harness(*RUN, "--nproc", "2", environment=variables)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"harness: {said}")


def through_shell(script: str) -> tuple[str, ...]:
    """Words of torchrun that have each rank run a script of the shell first."""
    return ("--no-python", "bash", "-c", f'{script}; exec {sys.executable} "$@"', "rank")


def under_torchrun(machine: Machine, script: str, folder: str, ranks: int = 2) -> tuple[Record, str]:
    """The record of ranks that torchrun starts through a script of the shell, and what they printed."""
    through = (*TORCHRUN[:-1], f"--nproc-per-node={ranks}", *through_shell(script))
    done = machine.harness(*RUN, "--runs", folder, launched_by=through)
    assert done.returncode != 0
    (path,) = (machine.folder / folder).glob("*/record.json")
    return read_record(path), done.stderr


def test_ranks_on_one_device_are_refused_and_recorded(machine: Machine) -> None:
    script = 'export CUDA_VISIBLE_DEVICES="$((1 - LOCAL_RANK)),$LOCAL_RANK"'
    record, printed = under_torchrun(machine, script, "shared")
    assert "ranks 0, 1 would share GPU" in record.error.message
    assert f"{record.run_id})" in printed


@EXHAUSTIVE
def test_a_rank_that_does_not_see_its_device_is_refused_and_recorded(machine: Machine) -> None:
    script = 'export CUDA_VISIBLE_DEVICES="$((2 * LOCAL_RANK)),$((2 * LOCAL_RANK + 1))"'
    record, _ = under_torchrun(machine, script, "isolated", ranks=4)
    rank = record.error.rank
    assert rank in (2, 3)
    seen = f"{2 * rank},{2 * rank + 1}"
    said = f"rank {rank} takes GPU {rank} of its node, but sees 2 (CUDA_VISIBLE_DEVICES={seen})"
    assert said in record.error.message


@EXHAUSTIVE
@pytest.mark.parametrize("backend", ["ddp", "fsdp1", "fsdp", "zero3", "accelerate-zero2"])
def test_ranks_that_see_their_own_gpu_alone_train_alike(machine: Machine, backend: str) -> None:
    through = (*TORCHRUN, *through_shell("export CUDA_VISIBLE_DEVICES=$LOCAL_RANK"))
    folder = f"own-{backend}"
    done = machine.harness(*RUN, "--backend", backend, "--runs", folder, launched_by=through)
    assert done.returncode == 0, done.stderr
    (path,) = (machine.folder / folder).glob("*/record.json")
    alone = [rank.final_digest for rank in read_record(path).ranks]
    assert alone == [rank.final_digest for rank in machine.run(backend).ranks]
