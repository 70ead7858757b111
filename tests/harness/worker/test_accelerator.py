"""What is recorded of driver, libraries and TF32."""

from pathlib import Path

import pytest
import torch

from harness.provenance import environment
from harness.worker.accelerator import _cudnn_version, describe_accelerator, driver_release, uses_tf32


def test_ranks_on_the_cpu_have_no_accelerator() -> None:
    assert describe_accelerator("cpu") is None


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:12:40 UTC 2025\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
    ],
)
def test_the_release_of_the_driver_is_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "version").write_text(text)
    assert driver_release(tmp_path / "version", tmp_path / "none") == "580.65.06"
    assert driver_release(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(("number", "version"), [(92000, "9.20.0"), (8907, "8.9.7"), (None, None)])
def test_versions_of_cudnn_are_written_out(number: int | None, version: str | None) -> None:
    assert _cudnn_version(number) == version


def test_nvidias_override_goes_before_what_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert uses_tf32()
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        assert not uses_tf32()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_all_variables_of_nccl_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    found = environment().variables
    assert {"NCCL_NVLS_ENABLE", "TORCH_NCCL_HIGH_PRIORITY", "NVIDIA_TF32_OVERRIDE"} <= found.keys()
