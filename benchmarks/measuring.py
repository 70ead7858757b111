"""Shared by the benchmarks: starts the harness and the bare loops, judges results, describes the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tabulate import tabulate

BARE = Path(__file__).parent / "bare"
BARE_LOOPS: dict[str, list[str]] = {
    "single": ["single.py"],
    "ddp": ["ddp.py"],
    "zero0": ["zero.py", "--stage", "0"],
    "zero1": ["zero.py", "--stage", "1"],
    "zero2": ["zero.py", "--stage", "2"],
    "zero3": ["zero.py", "--stage", "3"],
    "fsdp": ["fsdp2.py"],
    "fsdp1": ["fsdp1.py"],
}
"""The bare loop equivalent to each backend."""
RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Result:
    """A ratio of the harness over the plain libraries, and its target."""

    name: str
    ratio: float
    lowest: float
    highest: float
    target: float
    detail: str

    @property
    def met(self) -> bool:
        return self.ratio <= self.target


def harness_command() -> list[str]:
    """The `harness` command of this environment."""
    return [str(Path(sys.executable).with_name("harness"))]


def bare_command(backend: str, *arguments: str) -> list[str]:
    """Command that starts the bare loop of a backend with torchrun."""
    script, *own = BARE_LOOPS[backend]
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    ranks = 1 if backend == "single" else RANKS
    return [torchrun, "--nproc-per-node", str(ranks), str(BARE / script), *own, *arguments]


def run_quietly(command: Sequence[str]) -> tuple[float, str]:
    """Wall seconds and standard output of a command; exits if it fails."""
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        # gloo may find no interface by the host name; the harness's launcher sets this too.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-20:])
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{tail}")
    return seconds, done.stdout


def bare_document(output: str) -> dict[str, Any]:
    """The JSON line of a bare loop, ignoring what libraries print."""
    lines = [line for line in output.splitlines() if line.startswith('{"step_seconds"')]
    return json.loads(lines[-1])


def progress(text: str) -> None:
    """Print a progress line to standard error."""
    print(text, file=sys.stderr, flush=True)


def paired(
    what: str,
    backends: Sequence[str],
    pairs: int,
    one_pair: Callable[[str, bool], tuple[float, float]],
    sides: tuple[str, str],
    target: float,
) -> list[Result]:
    """Median and extremes of the ratios of each backend's pairs of seconds.

    `one_pair(backend, first side first)`. Backends alternate, so that all run under the same load.
    """
    measured: dict[str, list[tuple[float, float]]] = {backend: [] for backend in backends}
    for number in range(pairs):
        for backend in backends:
            left, right = one_pair(backend, number % 2 == 0)
            measured[backend].append((left, right))
            progress(
                f"{what}, {backend}, pair {number + 1}/{pairs}: {sides[0]} {left:.4f} s, "
                f"{sides[1]} {right:.4f} s, ratio {left / right:.3f}"
            )
    return [_paired_result(f"{what}, {backend}", done, target) for backend, done in measured.items()]


def _paired_result(name: str, pairs: Sequence[tuple[float, float]], target: float) -> Result:
    ratios = [left / right for left, right in pairs]
    left_seconds = statistics.median(left for left, _ in pairs)
    right_seconds = statistics.median(right for _, right in pairs)
    return Result(
        name=name,
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        target=target,
        detail=f"{left_seconds * 1e3:.1f} ms over {right_seconds * 1e3:.1f} ms, {len(pairs)} pairs",
    )


def machine() -> dict[str, Any]:
    """Description of the machine and versions, which every result must include."""
    packages = ("torch", "deepspeed", "transformers")
    return {
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "versions": {name: version(name) for name in packages},
    }


def options(description: str | None) -> argparse.ArgumentParser:
    """Parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


def present(results: Sequence[Result], *, as_json: bool) -> int:
    """Print the results; 1 if a target is missed."""
    if as_json:
        documents = [asdict(result) | {"met": result.met} for result in results]
        print(json.dumps({"machine": machine(), "results": documents}, indent=1))
    else:
        print(table(results))
    return 0 if all(result.met for result in results) else 1


def table(results: Sequence[Result]) -> str:
    """The results for a person."""
    rows = [
        (
            result.name,
            f"{result.ratio:.3f}",
            f"{result.lowest:.3f} to {result.highest:.3f}",
            f"at most {result.target:g}",
            "met" if result.met else "MISSED",
            result.detail,
        )
        for result in results
    ]
    headers = ("benchmark", "ratio", "spread", "target", "", "measured")
    return tabulate(rows, headers=headers, disable_numparse=True)


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
