"""Signs of GPUs: a machine without any pays nothing, one with any is asked."""

from pathlib import Path

import pytest

from harness.gpus.found import signs_of_gpus


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs, their tools and their libraries."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_a_machine_without_gpus_shows_none(bare: Path) -> None:
    assert signs_of_gpus(bare) == []


@pytest.mark.parametrize(
    ("name", "vendor"),
    [
        ("dev/nvidiactl", "NVIDIA"),
        ("dev/dxg", "NVIDIA"),
        ("dev/kfd", "AMD"),
        ("usr/lib64/libcuda.so.1", "NVIDIA"),
    ],
)
def test_a_device_or_driver_is_a_sign(bare: Path, name: str, vendor: str) -> None:
    file = bare / name
    file.parent.mkdir(parents=True)
    file.touch()
    assert [sign.vendor for sign in signs_of_gpus(bare)] == [vendor]


def test_a_driver_that_the_loader_knows_is_a_sign(bare: Path) -> None:
    (bare / "etc").mkdir()
    (bare / "etc/ld.so.cache").write_bytes(b"\0libc.so.6\0libcuda.so.1\0/opt/driver/libcuda.so.1\0")
    assert [sign.what for sign in signs_of_gpus(bare)] == ["libcuda.so.1"]


@pytest.mark.parametrize("tool", ["nvidia-smi", "rocm-smi"])
def test_a_tool_is_a_sign(bare: Path, tool: str) -> None:
    (bare / "bin").mkdir()
    (bare / "bin" / tool).touch(mode=0o755)
    assert [sign.what for sign in signs_of_gpus(bare)] == [tool]


@pytest.mark.parametrize(("text", "signs"), [("0", 2), ("MIG-1", 2), ("", 0), ("-1", 0)])
def test_named_devices_are_a_sign(bare: Path, monkeypatch: pytest.MonkeyPatch, text: str, signs: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert len(signs_of_gpus(bare)) == signs
