"""What crosses between nodes, by the kernel's counters; the self-test on a link of known speed."""

from pathlib import Path

import pytest

from harness.record import Record
from harness.tell.sections.amounts import node_volumes
from tests.cluster.matrices import measured_fabric, render
from tests.cluster.slurm import SlurmCluster
from tests.representatives import EXHAUSTIVE, first

pytestmark = pytest.mark.long(seconds=180)

MBIT = 1e6 / 8
# Ethernet, IP and TCP take 66 of 1514 bytes of a full frame.
PAYLOAD_SHARE = 1448 / 1514
LARGER_MODEL = ("--set", "model.config.hidden_size=192", "--set", "model.config.intermediate_size=512")


@pytest.mark.parametrize("megabits", first([200], [200, 1000]))
def test_fabric_finds_the_speed_of_a_shaped_link(
    cluster: SlurmCluster, tmp_path: Path, megabits: int
) -> None:
    cluster.nodes.shape(f"{megabits}mbit")
    try:
        result = measured_fabric(
            cluster, tmp_path, "--max-size", "8MB", "--operations", "all_reduce,point_to_point"
        )
    finally:
        cluster.nodes.shape(None)
    assert len(set(result.hosts)) == 2
    assert result.interface == "hsn0"
    possible = megabits * MBIT * PAYLOAD_SHARE
    for op in ("all_reduce", "point_to_point"):
        measured = result.bus_bandwidth(op)
        assert measured is not None
        # A token bucket lets 256 KB through at once, 3 % of 8 MB.
        assert 0.8 * possible < measured < 1.05 * possible, (op, measured, possible)


def sent_per_step(
    cluster: SlurmCluster, folder: Path, backend: str, nproc: int
) -> tuple[dict[str, float], Record]:
    """Bytes that each node sends per step: a longer run less a shorter one, so that set-up cancels."""
    sent = {}
    for steps in (6, 18):
        matrix = render(
            cluster, folder / str(steps), "--backends", backend, "--nodes", "2", "--nproc", str(nproc),
            *LARGER_MODEL, steps=steps,
        )  # fmt: skip
        matrix.without("single")
        before = cluster.nodes.sent_bytes()
        matrix.harness("submit", "--wait")
        after = cluster.nodes.sent_bytes()
        sent[steps] = {name: after[name] - before[name] for name in after}
        (record,) = matrix.records()
        assert record.status == "ok"
    hosts = sorted({rank.host for rank in record.ranks})
    return {host: (sent[18][host] - sent[6][host]) / 12 for host in hosts}, record


@pytest.mark.parametrize(
    ("backend", "nproc"),
    first([("fsdp", 1)], [("ddp", 1), ("zero3", 1), ("fsdp", 1), ("fsdp-hybrid", 2)]),
    ids=["ddp", "zero3", "fsdp", "fsdp-hybrid"],
)
def test_the_wire_carries_what_the_record_says(
    cluster: SlurmCluster, tmp_path: Path, backend: str, nproc: int
) -> None:
    """Interface counters, what TCP sent again taken off, within 1 % of the counted collectives."""
    wire, record = sent_per_step(cluster, tmp_path, backend, nproc)
    volumes = {volume.host: volume for volume in node_volumes(record)}
    assert set(volumes) == set(wire)
    for host, volume in volumes.items():
        assert volume.between == pytest.approx(wire[host], rel=0.01)
    if backend == "fsdp-hybrid":
        for volume in volumes.values():
            # Beside the replica all-reduce only scalars cross, such as the gradient norm.
            assert volume.between_by_role["replica"] > 0.999 * volume.between
            assert "shard" not in volume.between_by_role


@EXHAUSTIVE
def test_a_slow_network_ends_a_run_before_it_begins(cluster: SlurmCluster, tmp_path: Path) -> None:
    records = {}
    for rate in ("1MB/s", "900GB/s"):
        matrix = render(
            cluster, tmp_path / rate.replace("/", "-"), "--backends", "ddp", "--nodes", "2", "--nproc", "1",
            site=f"require_busbw: {rate}\n",
        )  # fmt: skip
        matrix.without("single").harness("submit", "--wait")
        (records[rate],) = matrix.records()
    fast, slow = records["1MB/s"], records["900GB/s"]
    assert (fast.status, fast.environment.fabric.nodes) == ("ok", 2)
    assert fast.environment.fabric.all_reduce_bus_bytes_per_second > 1e6
    assert (slow.status, slow.error.kind, slow.steps) == ("failed", "SlowFabric", [])
    assert "below the required 900 GB/s" in slow.error.message
    assert slow.environment.fabric.all_reduce_bytes == 64 * 2**20
