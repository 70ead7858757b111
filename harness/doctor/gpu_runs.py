"""Makes the runs of the checks: cells of a tiny model, and comparisons of six strategies at two sizes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.backends import registry
from harness.doctor.gpu_checks import (
    AGAIN,
    FABRIC,
    FULL,
    ON_CPU,
    RUNS,
    SHARDED,
    SINGLE,
    ZERO,
    Evidence,
    Kernels,
)
from harness.doctor.packing import pack_matrix
from harness.errors import HarnessError
from harness.fabric.ranks import start_ranks
from harness.forms.textbook import is_stub
from harness.gpus.found import Gpus
from harness.import_path import module_command, safe_environment
from harness.job.batch import batch_layout, reference_layout
from harness.job.config import load_experiment
from harness.launch.cells import canonical_label, make_cell
from harness.launch.ending import await_end, die_with
from harness.launch.launcher import LocalLauncher, run_cell
from harness.record import Record
from harness.record.provenance import package_versions
from harness.record.store import Store
from harness.run_directory.events import FailureEvent, Tail
from harness.run_directory.rank_state import WATCH, DeviceNote, device_note, log_tail, read_part
from harness.run_directory.request import rank_file
from harness.shipped import resolve
from harness.traces.scanning import KERNELS, STEP, is_communication

JOB = (
    "training.global_batch_size=16", "training.accumulation_steps=2", "training.steps=16",
    "data.sequence_length=128", "measure.warmup_steps=2", "measure.probed_steps=2",
    "measure.cooldown_steps=2", "runtime.timeout_seconds=180", "runtime.stuck_after_seconds=10",
)  # fmt: skip
"""The built-in model of four blocks: a step takes some 10 ms, of which 2 % exceed a clock's error."""
WATCHED = ("measure.traced_steps=2", "measure.trace=true")
NOT_TRACED = ("measure.traced_steps=0",)
BACKENDS = {SINGLE: SINGLE, AGAIN: SINGLE, ZERO: ZERO, FULL: "planted-out-of-memory-later", SHARDED: SHARDED}
MOST_RANKS = 8
"""That share the global batch."""
FABRIC_ARGUMENTS = ("--device", "cuda", "--max-size", "64MB", "--repeats", "10", "--seconds-per-row", "1")
CPU_LOG = "cpu.log"
END_SECONDS = 20.0
"""For a run on the CPU that is not needed any more."""
OUT_OF_TIME, INTERRUPTED = "out of time (--minutes)", "interrupted"


def ranks_on(gpus: Gpus) -> int:
    """Ranks of the runs on several GPUs."""
    return max(size for size in (1, 2, 4, 8) if size <= min(gpus.count, MOST_RANKS))


def gather(
    folder: Path, gpus: Gpus, seconds: float, report: Callable[[str], None], operations: str = "all_reduce"
) -> Evidence:
    """Make all runs in `folder`; what cannot begin within so many seconds is left out.

    operations: of the network, as `harness fabric` takes them.
    """
    found = Evidence(gpus=gpus, ranks=ranks_on(gpus))
    return _Gathering(folder, found, time.monotonic() + seconds, report, operations).all()


@dataclass
class _Gathering:
    """Adds to `found` what each run shows."""

    folder: Path
    found: Evidence
    ends: float
    report: Callable[[str], None]
    operations: str

    def all(self) -> Evidence:
        """What all runs showed, or those until the user interrupts."""
        try:
            self._make_all()
        except KeyboardInterrupt:
            self.found.is_interrupted = True
            self.found.missing |= {n: INTERRUPTED for n in (*RUNS, FABRIC) if n not in self.found.records}
        return self.found

    def _make_all(self) -> None:
        """Run on the CPU while `single` runs; what is timed runs alone."""
        on_cpu = self._start_on_cpu()
        try:
            for name in (SINGLE, AGAIN):
                self._run(name, NOT_TRACED, 1)
            self._take_from_cpu(on_cpu)
        finally:
            if on_cpu.poll() is None:
                on_cpu.terminate()
            await_end(on_cpu, END_SECONDS)
        self._run(ZERO, NOT_TRACED, self.found.ranks)
        self._run(FULL, NOT_TRACED, self.found.ranks)
        products = () if self.found.is_stub else ("measure.matmul_peak=true",)
        self._run(SHARDED, (*WATCHED, *products), self.found.ranks)
        self._measure_network()

    def _run(self, name: str, settings: tuple[str, ...], ranks: int) -> None:
        if (why := self._why_not(name)) is not None:
            self.found.missing[name] = why
            return
        self.report(f"{name}: {BACKENDS[name]} on {ranks}")
        experiment = load_experiment(None, [*JOB, *settings])
        store = Store(self.folder / name.replace(" ", "-"))
        store.prepare()
        layout = batch_layout(experiment.training, self.found.ranks)
        if BACKENDS[name] == registry.REFERENCE:
            layout = reference_layout(layout, experiment.training)
        cell = make_cell(experiment, canonical_label(BACKENDS[name]), ranks, layout, 0, "cuda")
        with _watching():
            command = ["harness", "doctor", "--gpu"]
            record = run_cell(cell, store, LocalLauncher("cuda"), command=command)
        directory = store.root / record.run_id
        self.found.records[name] = record
        notes = (read_part(device_note(directory, rank), DeviceNote) for rank in range(ranks))
        self.found.notes[name] = tuple(note for note in notes if note is not None)
        if name == FULL:
            self.found.seconds_to_notice = _since_failure(directory, ranks)
        elif experiment.measure.trace and not self.found.is_stub:
            self.found.kernels[name] = read_kernels(record, directory)

    def _why_not(self, name: str) -> str | None:
        if time.monotonic() > self.ends:
            return OUT_OF_TIME
        packages = registry.parse(BACKENDS[name])[0].packages if name in BACKENDS else ()
        lacking = [package for package in packages if package not in package_versions(packages)]
        return f"{', '.join(lacking)} is not installed" if lacking else None

    def _start_on_cpu(self) -> subprocess.Popen[bytes]:
        self.report("cpu: single on the CPU, at the same time")
        settings = [*JOB, *NOT_TRACED, "runtime.device=cpu"]
        words = [word for setting in settings for word in ("--set", setting)]
        runs = str(self.folder / ON_CPU)
        with (self.folder / CPU_LOG).open("wb") as log:
            return subprocess.Popen(
                [*module_command("harness"), "run", "--backend", SINGLE, *words, "--runs", runs],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=safe_environment(),
            )  # fmt: skip

    def _take_from_cpu(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(timeout=max(1.0, self.ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.found.missing[ON_CPU] = OUT_OF_TIME
            return
        records, _ = Store(self.folder / ON_CPU).records()
        if records:
            self.found.records[ON_CPU] = records[0]
        else:
            said = log_tail(self.folder / CPU_LOG).strip().splitlines()[-1:]
            self.found.missing[ON_CPU] = f"it left no record: {''.join(said)}"

    def _measure_network(self) -> None:
        if self.found.ranks == 1 or self.found.is_stub:
            return
        if (why := self._why_not(FABRIC)) is not None:
            self.found.missing[FABRIC] = why
            return
        self.report(f"fabric: {self.operations} over {self.found.ranks}")
        try:
            self.found.fabric = start_ranks(
                self.found.ranks, (*FABRIC_ARGUMENTS, "--operations", self.operations)
            )
        except HarnessError as error:
            self.found.missing[FABRIC] = str(error)


@contextmanager
def _watching() -> Iterator[None]:
    """Ranks started meanwhile note what they see of their device."""
    os.environ[WATCH] = "1"
    try:
        yield
    finally:
        del os.environ[WATCH]


def _since_failure(directory: Path, ranks: int) -> float | None:
    """Seconds since the first rank said that it failed; None: none did."""
    events = (event for rank in range(ranks) for event in Tail(rank_file(directory, rank)).read())
    first = min((event.at for event in events if isinstance(event, FailureEvent)), default=None)
    return None if first is None else time.time() - first


def read_kernels(record: Record, folder: Path) -> Kernels:
    """Kernels of NCCL in each traced step, from the traces that a run kept."""
    return {
        artifact.rank: count_kernels(json.loads((folder / artifact.path).read_bytes()))
        for artifact in record.artifacts
        if artifact.kind == "trace" and artifact.rank is not None
    }


def count_kernels(trace: dict[str, Any]) -> dict[int, int]:
    """By step; a kernel belongs to the step in which it begins, since a step ends when the device is done."""
    events = trace.get("traceEvents", ())
    steps = {
        int(event["name"].removeprefix(STEP)): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(STEP)
    }
    begins = [
        event["ts"]
        for event in events
        if event.get("cat") in KERNELS and is_communication(event["cat"], str(event.get("name", "")))
    ]
    return {step: sum(begin <= at < end for at in begins) for step, (begin, end) in steps.items()}


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
