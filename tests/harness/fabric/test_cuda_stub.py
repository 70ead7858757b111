"""The network of a CUDA stub has no speed: not in the result, not in what is shown of it."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from harness.cli.fabric import present
from harness.errors import HarnessError
from harness.fabric.result import FabricResult, FabricRow, fabric_table, shortfall


def a_result(device_name: str | None = "CUDA stub", seconds: tuple[float, ...] = ()) -> FabricResult:
    row = FabricRow(op="all_reduce", ranks=[0, 1], size_bytes=2**20, repeats=5, seconds=list(seconds))
    return FabricResult(
        created_at="2026-01-02T03:04:05+00:00", transport="nccl", device="cuda", device_name=device_name,
        hosts=["a", "a"], interface=None, rows=[row],
    )  # fmt: skip


def test_what_is_shown_has_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    result = a_result()
    head, _, _, line = fabric_table(result).splitlines()
    assert head.startswith("nccl on 2 ranks (CUDA stub), 1 node")
    assert line.split()[-3:] == ["n/a"] * 3
    assert present(result, 2**20, None, None, True) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["rows"]
    assert (row["seconds"], row["algorithm_bytes_per_second"], row["bus_bytes_per_second"]) == (
        [],
        None,
        None,
    )
    assert document["summary"]["all_reduce_bus_bytes_per_second"] is None
    assert document["summary"]["all_reduce_latency_seconds"] is None


def test_a_threshold_is_missed_and_a_picture_refused(tmp_path: Path) -> None:
    result = a_result()
    assert shortfall(result, 1.0) == "the bus bandwidth of a CUDA stub is not measured: no network takes part"
    with pytest.raises(HarnessError, match="a CUDA stub has no speed to draw"):
        present(result, 2**20, None, tmp_path / "fabric.svg", False)


@pytest.mark.parametrize(
    ("device_name", "seconds"),
    [("CUDA stub", (0.5,)), ("CUDA stub NVIDIA H100", (0.5,)), ("NVIDIA H100", ())],
)
def test_only_devices_are_timed(device_name: str, seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match=f"durations on {device_name}"):
        a_result(device_name, seconds)


def test_the_device_of_a_gpu_is_named_next_to_its_speed() -> None:
    table = fabric_table(a_result("NVIDIA H100", (1e-3,)))
    assert "nccl on 2 ranks (NVIDIA H100), 1 node" in table
    assert table.splitlines()[-1].split()[-2:] == ["1.05", "1.05"]
