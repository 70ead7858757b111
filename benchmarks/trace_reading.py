"""Time and memory of reading a trace: `python benchmarks/trace_reading.py [BYTES]`, 1e9 without an argument.

Writes a trace of a GPU of that size into a temporary folder, reads it as `harness trace` does, and prints
seconds and the largest resident set.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from harness.traces.analysis import read_trace


def write(path: Path, size: int) -> None:
    """Kernels, launches, operators and collectives in the form that Kineto writes."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 8}, "traceEvents": [\n')
        number = 0
        while file.tell() < size:
            for _ in range(1000):
                number += 1
                for event in events(number):
                    file.write(json.dumps(event) + ",\n")
        file.write('{"ph": "M"}\n]}')


def events(number: int) -> list[dict[str, object]]:
    """One operator with its launch and kernel; every hundredth is a collective."""
    talks = number % 100 == 0
    start = 1_000_000.125 + 20 * number
    name = (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        if talks
        else f"void at::native::elementwise_{number % 300}<float>"
    )
    host = {"ph": "X", "pid": 4242, "tid": 4242}
    shapes = {"Input Dims": [[number, 128]], "Input type": ["float"], "External id": number, "Ev Idx": number}
    operator = "record_param_comms" if talks else f"aten::op_{number % 50}"
    told = (
        {"Collective name": "allreduce", "In msg nelems": 4096, "Group size": 8, "dtype": "Float"}
        if talks
        else {}
    )
    launch = {"External id": number, "cbid": 211, "correlation": number}
    kernel = {"External id": number, "device": 0, "stream": 7, "correlation": number, "grid": [8, 1, 1]}
    kernel |= {
        "queued": 0,
        "context": 1,
        "registers per thread": 32,
        "shared memory": 0,
        "block": [128, 1, 1],
    }
    return [
        host | {"cat": "cpu_op", "name": operator, "ts": start, "dur": 15.5, "args": {**shapes, **told}},
        host
        | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start + 2, "dur": 4.25, "args": launch},
        {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "pid": 0,
            "tid": 7,
            "ts": start + 9,
            "dur": 12.75,
            "args": kernel,
        },
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        write(trace, int(float(sys.argv[1])) if len(sys.argv) > 1 else 10**9)
        begin, cpu = time.perf_counter(), time.process_time()
        (rank,) = read_trace(trace)
        seconds, processor = time.perf_counter() - begin, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            f"{trace.stat().st_size / 1e9:.2f} GB: {seconds:.1f} s, {processor:.1f} s of processor time, "
            f"{peak / 1e9:.2f} GB resident, {len(rank.calls):,} collectives"
        )
