"""What is recorded of driver, libraries and TF32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.rank import accelerator
from harness.record.provenance import environment

PRECISIONS = {
    "": (False, "highest", True),
    "matmul.allow_tf32 = True": (True, "high", True),
    "matmul.fp32_precision = 'tf32'": (True, "high", True),
    "backends.fp32_precision = 'tf32'": (True, "high", True),
    "backends.fp32_precision = 'ieee'": (False, "highest", False),
    "matmul.allow_tf32 = True; matmul.fp32_precision = 'ieee'": (False, "highest", True),
    "matmul.fp32_precision = 'tf32'; matmul.allow_tf32 = False": (False, "highest", True),
    "matmul.fp32_precision = 'ieee'; matmul.allow_tf32 = True": (True, "high", True),
    "matmul.fp32_precision = 'ieee'; torch.set_float32_matmul_precision('medium')": (True, "medium", True),
    "torch.set_float32_matmul_precision('high'); backends.fp32_precision = 'ieee'": (True, "high", False),
    "backends.fp32_precision = 'tf32'; matmul.fp32_precision = 'ieee'": (False, "highest", True),
    "backends.mkldnn.matmul.fp32_precision = 'bf16'": (False, "highest", True),
    "backends.cudnn.fp32_precision = 'ieee'": (False, "highest", False),
    "backends.cudnn.conv.fp32_precision = 'ieee'": (False, "highest", True),
    "backends.fp32_precision = 'tf32'; backends.cudnn.allow_tf32 = False": (True, "high", True),
    "backends.cudnn.allow_tf32 = False": (False, "highest", False),
}
"""What a program sets, in its order: TF32 in products, its name by the older interface, TF32 in cuDNN."""
ASK = """
import json, os, sys
import torch
from torch import backends
from torch.backends.cuda import matmul
from harness.rank.accelerator import describe_accelerator, uses_tf32

for statements in json.load(sys.stdin):
    if os.fork() == 0:
        exec(statements)
        software = describe_accelerator("cuda")
        found = [uses_tf32(), software.float32_matmul, software.cudnn_tf32]
        print(json.dumps([statements, found]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_ranks_on_the_cpu_have_no_accelerator() -> None:
    assert accelerator.describe_accelerator("cpu") is None


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:12:40 UTC 2025\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
    ],
)
def test_the_release_of_the_driver_is_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "version").write_text(text)
    assert accelerator.driver_release(tmp_path / "version", tmp_path / "none") == "580.65.06"
    assert accelerator.driver_release(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(("number", "version"), [(92000, "9.20.0"), (8907, "8.9.7"), (None, None)])
def test_versions_of_cudnn_are_written_out(number: int | None, version: str | None) -> None:
    assert accelerator._cudnn_version(number) == version


def test_nvidias_override_goes_before_what_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert accelerator.uses_tf32()
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        assert not accelerator.uses_tf32()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.costly
def test_tf32_is_read_whichever_interface_a_program_set_last() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK], input=json.dumps(list(PRECISIONS)), capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {statements: tuple(seen) for statements, seen in map(json.loads, done.stdout.splitlines())}
    assert found == PRECISIONS


def test_all_variables_of_nccl_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    found = environment().variables
    assert {"NCCL_NVLS_ENABLE", "TORCH_NCCL_HIGH_PRIORITY", "NVIDIA_TF32_OVERRIDE"} <= found.keys()


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0,2,4-5", {0, 2, 4, 5})]
)
def test_sets_of_processors_are_read_as_the_kernel_writes_them(text: str, numbers: set[int]) -> None:
    assert accelerator.read_list(text) == numbers


def machine(folder: Path, gpu_node: str) -> tuple[Path, Path]:
    """Two nodes of four processors each, and a GPU."""
    nodes, devices = folder / "node", folder / "devices"
    for node, processors in enumerate(("0-1,4-5", "2-3,6-7")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(f"{processors}\n")
    (devices / "0000:3b:00.0").mkdir(parents=True)
    (devices / "0000:3b:00.0" / "numa_node").write_text(f"{gpu_node}\n")
    return nodes, devices


@pytest.mark.parametrize(("processors", "numa_nodes"), [("0,4", [0]), ("0-2", [0, 1]), ("0-7", [0, 1])])
def test_a_rank_is_where_its_processors_are(tmp_path: Path, processors: str, numa_nodes: list[int]) -> None:
    place = accelerator.placed(processors, None, *machine(tmp_path, "1"))
    assert (place.numa_nodes, place.device_numa_node) == (numa_nodes, None)
    assert (place.processors, place.processor_count) == (processors, len(accelerator.read_list(processors)))


@pytest.mark.parametrize(("told", "node"), [("1", 1), ("0", 0), ("-1", None)])
def test_a_gpu_is_where_the_firmware_says(tmp_path: Path, told: str, node: int | None) -> None:
    assert accelerator.placed("0", "0000:3b:00.0", *machine(tmp_path, told)).device_numa_node == node
    assert (
        accelerator.placed("0", "0000:ff:00.0", tmp_path / "node", tmp_path / "devices").device_numa_node
        is None
    )


def test_this_process_is_somewhere() -> None:
    place = accelerator.placement("cpu")
    assert accelerator.read_list(place.processors) == os.sched_getaffinity(0)
    assert place.processor_count == len(accelerator.read_list(place.processors)) > 0
