from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from harness.plan.limits import available_host_bytes, control_group_headroom, limits_here
from tests.gpus import gpus_of


def group(root: Path, name: str, **files: str) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text)


def membership(folder: Path, *lines: str) -> Path:
    file = folder / "cgroup"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_the_tightest_group_above_a_process_limits_it(tmp_path: Path) -> None:
    root = tmp_path / "groups"
    group(root, "job", memory__max="1000", memory__current="400", memory__stat="anon 1\ninactive_file 50\n")
    group(root, "job/step", memory__max="max", memory__current="300")
    group(root, ".", memory__max="9000", memory__current="500")
    assert control_group_headroom(root, membership(tmp_path, "0::/job/step")) == 650


def test_version_1_names_its_files_otherwise(tmp_path: Path) -> None:
    root = tmp_path / "groups"
    group(root, "memory/job", memory__limit_in_bytes="1000", memory__usage_in_bytes="400")
    group(root, "memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="900")
    lines = ("4:cpu,cpuacct:/job", "7:memory:/job")
    assert control_group_headroom(root, membership(tmp_path, *lines)) == 600


def test_without_a_limit_there_is_no_headroom_to_name(tmp_path: Path) -> None:
    root = tmp_path / "groups"
    group(root, "job", memory__max="max", memory__current="400")
    assert control_group_headroom(root, membership(tmp_path, "0::/job")) is None
    assert control_group_headroom(root, tmp_path / "none") is None
    assert control_group_headroom(root, membership(tmp_path, "", "garbled")) is None


def test_the_host_has_no_more_left_than_it_has() -> None:
    assert 0 < available_host_bytes() <= psutil.virtual_memory().total


def test_ranks_on_the_cpu_have_no_device_of_their_own() -> None:
    limits = limits_here("cpu", imposed_bytes=5)
    assert limits.device_bytes is None
    assert limits.imposed_bytes == 5
    assert limits.host_bytes


def test_the_smallest_gpu_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.plan.limits.find_gpus", lambda: gpus_of(81559 * 2**20, 40960 * 2**20))
    assert limits_here("cuda").device_bytes == 40960 * 2**20
