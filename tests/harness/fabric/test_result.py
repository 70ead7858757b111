"""Bandwidths as nccl-tests defines them, sizes, pairs, thresholds."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from harness.cli import harness
from harness.cli.doctor import present, split_operations
from harness.errors import HarnessError
from harness.fabric.result import (
    FabricResult,
    FabricRow,
    bus_factor,
    fabric_table,
    pairs_to_test,
    parse_rate,
    parse_size,
    read_fabric,
    shortfall,
    sizes_to_test,
    whole_elements,
    write_result,
)
from harness.tell.formats import WIDTH


def a_row(op: str = "all_reduce", size: int = 2**20, seconds: float = 0.001, ranks: int = 4) -> FabricRow:
    return FabricRow(
        op=op, ranks=list(range(ranks)), size_bytes=size, repeats=5, seconds=[seconds, 2 * seconds]
    )


def a_result(
    *rows: FabricRow, transport: str = "gloo", hosts: tuple[str, ...] = ("a", "a", "b", "b")
) -> FabricResult:
    return FabricResult(
        created_at="2026-01-02T03:04:05+00:00", transport=transport, device="cpu", hosts=list(hosts),
        interface="eth0", rows=list(rows),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("broadcast", 1.0),
        ("point_to_point", 1.0),
    ],
)  # fmt: skip
def test_bus_factors_are_those_of_nccl_tests(op: str, factor: float) -> None:
    assert bus_factor(op, 4) == factor


def test_the_group_is_judged_at_its_largest_size_and_latency_at_its_smallest() -> None:
    result = a_result(a_row(seconds=1.0), a_row(size=1024, seconds=0.5), a_row(op="broadcast", size=2**30))
    assert result.bus_bandwidth() == 1.5 * 2**20  # of the fastest batch
    assert result.rows[0].algorithm_bandwidth == 2**20
    assert result.latency_seconds() == 0.5
    assert result.summary().nodes == 2


def test_a_size_that_memory_was_short_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    result = a_result(a_row(size=2**20))
    assert present(result, 2**20 + 15, None, False) == 0
    assert "memory" not in capsys.readouterr().err
    assert present(result, 2**32, None, False) == 0
    told = capsys.readouterr().err
    assert told == "not enough memory for 4,294,967,296 bytes: measured up to 1,048,576\n"


def test_sizes_end_at_the_largest_and_are_shared_evenly() -> None:
    assert sizes_to_test(70_000) == [1024, 4096, 16384, 65536, 70_000]
    assert sizes_to_test(1024) == [1024]
    assert (whole_elements(1024, 3), whole_elements(4, 8)) == (255, 8)


def test_all_pairs_of_few_ranks_and_nodes_of_many() -> None:
    assert pairs_to_test(["a", "a", "b"]) == [(0, 1), (0, 2), (1, 2)]
    many = [name for name in "abc" for _ in range(4)]
    assert pairs_to_test(many) == [(0, 1), (0, 4), (0, 8), (4, 8)]


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("5GB/s", 5e9), ("5 GB/s", 5e9), ("50GBps", 50e9), ("400Gbps", 50e9), ("400Gb/s", 50e9),
        ("400 Gbit/s", 50e9), ("200Mbit/s", 25e6), ("1Gbit/s", 125e6), ("1GiB/s", 2**30), ("0.5GB/s", 5e8),
    ],
)  # fmt: skip
def test_rates_are_read(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "is not a rate") for text in ("5", "5GB", "fast", "-1GB/s", "")),
        ("400gbps", "may mean bits or bytes; write 400GB/s for bytes or"),
        ("5 gb/s", "may mean bits or bytes; write 5GB/s for bytes or"),
    ],
)
def test_what_is_no_rate_or_two_is_refused(text: str, says: str) -> None:
    with pytest.raises(HarnessError, match=says):
        parse_rate(text)


def test_sizes_are_read_as_nccl_tests_does() -> None:
    assert (parse_size("4GB"), parse_size("64M"), parse_size("1KiB")) == (2**32, 2**26, 1024)
    for text in ("4GB/s", "4Gbit", "much", "1"):
        with pytest.raises(HarnessError):
            parse_size(text)


def test_a_threshold_is_missed_with_causes_of_the_transport() -> None:
    result = a_result(a_row(seconds=1.0))
    assert shortfall(result, 1.5 * 2**20) is None
    said = shortfall(result, 5e9)
    assert said is not None
    assert "below the required 5 GB/s (gloo, 2 nodes)" in said
    assert "'eth0'" in said
    assert "judged: the fastest of 2 batches of 5 all_reduce, 1,048,576 bytes each; the slowest:" in said
    assert "the slowest: 0.000786 GB/s" in said
    nccl = shortfall(a_result(a_row(seconds=1.0), transport="nccl"), 5e9)
    assert nccl is not None
    assert "NET/IB" in nccl
    assert "not measured" in (shortfall(a_result(), 1.0) or "")


def test_a_result_is_read_back_and_checked(tmp_path: Path) -> None:
    result = a_result(a_row(seconds=1.0))
    write_result(result, tmp_path)
    path = tmp_path / "fabric.json"
    assert read_fabric(path) == result
    assert CliRunner().invoke(harness, ["slurm", "gate", str(tmp_path), "1MB/s"]).exit_code == 0
    missed = CliRunner().invoke(harness, ["slurm", "gate", str(tmp_path), "5GB/s"])
    assert missed.exit_code == 3
    assert "Usual causes" in missed.stderr
    for seconds in ("[]", "[0.0]"):
        path.write_text(result.model_dump_json().replace("[1.0,2.0]", seconds))
        with pytest.raises(HarnessError, match="not a result"):
            read_fabric(path)
    path.write_text("{}")
    with pytest.raises(HarnessError, match="not a result"):
        read_fabric(path)


def test_unknown_operations_are_refused() -> None:
    assert split_operations("all-reduce, broadcast") == ["all_reduce", "broadcast"]
    with pytest.raises(HarnessError, match="Did you mean 'all_gather'"):
        split_operations("allgather")


def test_the_table_names_pairs_and_groups() -> None:
    pair = FabricRow(op="point_to_point", ranks=[0, 2], size_bytes=1024, repeats=5, seconds=[1e-6])
    table = fabric_table(a_result(a_row(), pair))
    assert "all 4" in table
    assert "0-2" in table
    assert max(map(len, table.splitlines())) <= WIDTH
    assert "1.57" in table


def on_device(device_name: str | None = "CUDA stub", seconds: tuple[float, ...] = ()) -> FabricResult:
    row = FabricRow(op="all_reduce", ranks=[0, 1], size_bytes=2**20, repeats=5, seconds=list(seconds))
    return FabricResult(
        created_at="2026-01-02T03:04:05+00:00", transport="nccl", device="cuda", device_name=device_name,
        hosts=["a", "a"], interface=None, rows=[row],
    )  # fmt: skip


def test_the_device_is_named_and_a_stub_has_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    result = on_device()
    head, _, _, line = fabric_table(result).splitlines()
    assert head.startswith("nccl on 2 ranks (CUDA stub), 1 node")
    assert line.split()[-3:] == ["n/a"] * 3
    assert present(result, 2**20, None, True) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["rows"]
    assert (row["seconds"], row["algorithm_bytes_per_second"], row["bus_bytes_per_second"]) == (
        [], None, None,
    )  # fmt: skip
    assert document["summary"]["all_reduce_bus_bytes_per_second"] is None
    assert document["summary"]["all_reduce_latency_seconds"] is None
    assert shortfall(result, 1.0) == "the bus bandwidth of a CUDA stub is not measured: no network takes part"
    table = fabric_table(on_device("NVIDIA H100", (1e-3,)))
    assert "nccl on 2 ranks (NVIDIA H100), 1 node" in table
    assert table.splitlines()[-1].split()[-2:] == ["1.05", "1.05"]


@pytest.mark.parametrize(
    ("device_name", "seconds"),
    [("CUDA stub", (0.5,)), ("CUDA stub NVIDIA H100", (0.5,)), ("NVIDIA H100", ())],
)
def test_only_devices_are_timed(device_name: str, seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match=f"durations on {device_name}"):
        on_device(device_name, seconds)
