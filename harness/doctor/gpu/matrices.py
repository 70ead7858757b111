"""Comparisons of six strategies at two sizes, as `harness compare` makes them, until the time is up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.doctor.gpu.packing import pack_matrix
from harness.doctor.gpu.runs import END_SECONDS, INTERRUPTED, OUT_OF_TIME
from harness.errors import HarnessError
from harness.forms.flops import is_stub
from harness.import_path import module_command, safe_environment
from harness.job.config import load_experiment
from harness.launch.ending import await_end, die_with
from harness.record.store import Store
from harness.shipped import resolve

SMALL, AT_SIZE = "@default", "@gpu-node"
"""The second names the strategies of both."""
LEAST_SECONDS = 20.0
"""No comparison begins with less left."""
ASKED_SECONDS = 120.0
"""For a prediction, which computes only."""


@dataclass(frozen=True, kw_only=True)
class BackendMatrix:
    """One job under every strategy on the same ranks."""

    name: str
    """Of its folder in the bundle."""
    config: str
    """As `--config` takes it."""
    backends: tuple[str, ...]
    ranks: int
    device: str
    settings: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """What the commands that ask for this job share."""
        given = self.settings
        if self.device == "cuda":
            # One run of each cell, timed as jobs run; other checks show that deterministic kernels repeat.
            given = (*given, "measure.memory_snapshot=true", "training.deterministic=false")
        assigned = [word for setting in given for word in ("--set", setting)]
        return ["--config", self.config, "--backends", ",".join(self.backends), *assigned]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What came of a comparison."""

    matrix: BackendMatrix
    missing: str | None
    """Why not every cell has a record; None: each has."""
    lines: Sequence[str] = ()
    """What a person reads of it."""
    statuses: Mapping[str, str] = field(default_factory=dict)
    """How the runs ended, by run id."""
    is_interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        """For `--json` and the bundle."""
        return {
            "config": self.matrix.config,
            "backends": list(self.matrix.backends),
            "ranks": self.matrix.ranks,
            "missing": self.missing,
            "runs": dict(self.statuses),
        }


def compare_all(
    asked: Sequence[BackendMatrix],
    folder: Path,
    packed: Path,
    ends: float,
    report: Callable[[str], None],
    gpu: str,
) -> Iterator[Compared]:
    """Make one after the other and pack each in a folder of its name; stops where the user interrupts.

    A comparison may take its share of the time that is left; what it does not need is left to the next.
    """
    for number, matrix in enumerate(asked):
        now = time.monotonic()
        runs, is_interrupted = folder / matrix.name, False
        try:
            until = now + (ends - now) / (1 if number == len(asked) - 1 else 2)
            missing = compare_until(matrix, runs, until, report)
        except KeyboardInterrupt:
            missing, is_interrupted = INTERRUPTED, True
        found = Store(runs).runs()[0]
        lines: list[str] = []
        try:
            if found:
                lines = pack_matrix(found, packed / matrix.name, predict(matrix, gpu))
        except (HarnessError, OSError) as error:
            lines = [f"not packed: {error}"]
        statuses = {record.run_id: record.status for _, record in found}
        yield Compared(
            matrix=matrix, missing=missing, lines=lines, statuses=statuses, is_interrupted=is_interrupted
        )
        if is_interrupted:
            return


def matrices(ranks: int, config: str = AT_SIZE) -> list[BackendMatrix]:
    """The default job and a larger one under the strategies that the larger one's file names."""
    backends = tuple(load_experiment(resolve(Path(config), "configs"), ()).compare.backends)
    return [
        BackendMatrix(name=name, config=given, backends=backends, ranks=ranks, device="cuda")
        for name, given in (("default", SMALL), ("at-size", config))
    ]


def compare_until(
    matrix: BackendMatrix, runs: Path, ends: float, report: Callable[[str], None]
) -> str | None:
    """Run `harness compare` with records in `runs`; None, or why not every cell has one.

    ends: by the monotonic clock. The cell that runs then is ended and recorded as any other.
    """
    left = ends - time.monotonic()
    if left < LEAST_SECONDS:
        return OUT_OF_TIME
    report(f"{matrix.name}: compare --config {matrix.config} on {matrix.ranks}, at most {left:.0f} s")
    process = subprocess.Popen(
        [
            *module_command("harness"), "compare", *matrix.words(), "--nproc", str(matrix.ranks),
            "--set", "measure.trace=true", "--set", f"runtime.device={matrix.device}", "--runs", str(runs),
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=safe_environment(), process_group=0, preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
    )  # fmt: skip
    assert process.stderr is not None
    told = threading.Event()

    def end() -> None:
        if process.poll() is None and not told.is_set():
            told.set()
            process.terminate()  # SIGINT is ignored below a shell that started it with `&`

    timer = threading.Timer(left, end)
    timer.start()
    last = ""
    try:
        for line in process.stderr:
            last = line.strip() or last
            report(f"  {line.rstrip()}")
        code = process.wait()
    finally:
        timer.cancel()
        end()  # once: a second signal would keep it from recording
        await_end(process, END_SECONDS)
    if told.is_set():
        return OUT_OF_TIME
    return None if code == 0 else f"harness compare ended with {code}: {last}"


def predict(matrix: BackendMatrix, gpu: str) -> dict[str, Any] | str:
    """The document of `harness estimate --json` for this machine's GPU, or why there is none."""
    if is_stub(gpu):
        return "the device is a stub"
    count = str(matrix.ranks)
    words = ["--world-size", count, "--gpus-per-node", count, "--gpu", gpu, "--json"]
    try:
        done = subprocess.run(
            [*module_command("harness"), "estimate", *matrix.words(), *words],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, env=safe_environment(),
            timeout=ASKED_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            document: dict[str, Any] = json.loads(done.stdout)
            return document
    except (subprocess.TimeoutExpired, ValueError) as error:
        return f"harness estimate: {type(error).__name__}"
    return "".join(done.stderr.strip().splitlines()[-1:]).removeprefix("harness: ").partition(". ")[0]
