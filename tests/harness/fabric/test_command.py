"""`harness fabric` on two real ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

from harness.fabric.result import OPERATIONS, read_fabric


def test_two_ranks_measure_every_operation_and_a_gate_closes(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "harness", "fabric", "--nproc", "2", "--device", "cpu", "--max-size",
            "64KB", "--repeats", "3", "--warmup", "1", "--output", "fabric.json", "--require-busbw", "1TB/s",
            "--json",
        ],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "below the required 1e+03 GB/s" in done.stderr
    document = json.loads(done.stdout)
    result = read_fabric(tmp_path / "fabric.json")
    assert (result.transport, result.world_size) == ("gloo", 2)
    assert {row["op"] for row in document["rows"]} == set(OPERATIONS)
    for op in OPERATIONS:
        assert [row.size_bytes for row in result.rows if row.op == op] == [1024, 4096, 16384, 65536]
    assert all(second > 0 for row in result.rows for second in row.seconds)
    assert document["summary"]["all_reduce_bus_bytes_per_second"] == result.bus_bandwidth()
