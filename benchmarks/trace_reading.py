"""Reading traces beside `json.load`: `python benchmarks/trace_reading.py [BYTES...]`, 1e9 by default.

Writes a trace of a GPU of each size into a temporary folder, plain and gzipped, reads it as `harness trace`
does and by `json.load`, each in a process of its own, and prints processor time and the largest resident set.
"""

from __future__ import annotations

import gzip
import json
import resource
import shutil
import subprocess
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
        host | {"cat": "cpu_op", "name": operator, "ts": start, "dur": 15.625, "args": {**shapes, **told}},
        host
        | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start + 2, "dur": 4.375, "args": launch},
        {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "pid": 0,
            "tid": 7,
            "ts": start + 9,
            "dur": 12.875,
            "args": kernel,
        },
    ]


def measured(how: str, file: Path) -> tuple[float, float]:
    """Seconds of processor time, and bytes resident at most."""
    done = subprocess.run([sys.executable, __file__, how, file], check=True, capture_output=True, text=True)
    seconds, resident = done.stdout.split()
    return float(seconds), float(resident)


def read(how: str, file: Path) -> None:
    begin = time.process_time()
    if how == "trace":
        read_trace(file)
    else:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open(encoding="utf-8") as opened:
            json.load(opened)
    seconds = time.process_time() - begin
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def compare(size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
        write(plain, size)
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
        for file in (plain, packed):
            (ours, held), (theirs, whole) = measured("trace", file), measured("json", file)
            print(
                f"{file.name}, {size / 1e6:,.0f} MB: {ours:.1f} s, {held / 1e9:.2f} GB; "
                f"json.load {theirs:.1f} s, {whole / 1e9:.2f} GB; {ours / theirs:.2f} x, {held / whole:.0%}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] in (["trace"], ["json"]):
        read(sys.argv[1], Path(sys.argv[2]))
    else:
        for argument in sys.argv[1:] or ["1e9"]:
            compare(int(float(argument)))
