"""The checks of a GPU machine, each ok, failed, skipped or n/a with its figure, and the runs behind:
cells of a tiny model, and comparisons of six strategies at two sizes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, Literal

from harness.backends import registry
from harness.doctor.packing import kept_trace, pack_matrix
from harness.errors import HarnessError
from harness.fabric.result import FabricResult, start_ranks
from harness.forms.terms import STEP_PHASES
from harness.forms.textbook import find_peak, is_stub
from harness.gpus.found import Gpus
from harness.import_path import module_command, safe_environment
from harness.job.batch import batch_layout, reference_layout
from harness.job.config import load_experiment
from harness.judge import quantities
from harness.judge.rows import reason
from harness.launch.cells import canonical_label, make_cell
from harness.launch.ending import await_end, die_with
from harness.launch.launcher import LocalLauncher, run_cell
from harness.nested import totals
from harness.record import Record
from harness.record.provenance import package_versions
from harness.record.store import Store
from harness.run_directory.events import FailureEvent, Tail
from harness.run_directory.rank_state import WATCH, DeviceNote, device_note, log_tail, read_part
from harness.run_directory.request import rank_file
from harness.shipped import resolve
from harness.traces.device import KERNELS, is_communication
from harness.traces.scanning import STEP

SINGLE, AGAIN, ON_CPU, ZERO, FULL, SHARDED = "single", "again", "cpu", "zero2", "out of memory", "fsdp"
FABRIC = "fabric"
RUNS = (ON_CPU, SINGLE, AGAIN, ZERO, FULL, SHARDED)

Kernels = Mapping[int, Mapping[int, int]]
"""Kernels of NCCL by rank and traced step."""


@dataclass(kw_only=True)
class Evidence:
    """Everything that was measured; what is missing has its reason in `missing`."""

    gpus: Gpus
    ranks: int
    """Of the runs on several GPUs."""
    records: dict[str, Record] = field(default_factory=dict)
    """By the names above."""
    notes: dict[str, tuple[DeviceNote, ...]] = field(default_factory=dict)
    """Of each run's ranks, in order."""
    kernels: dict[str, Kernels] = field(default_factory=dict)
    """Of runs whose traces were kept."""
    fabric: FabricResult | None = None
    seconds_to_notice: float | None = None
    """From the planted lack of memory to the record that says so."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why a run, or the measurement of the network, was not made."""
    is_interrupted: bool = False
    """The user ended it: what was measured until then is there."""

    @property
    def is_stub(self) -> bool:
        return any(is_stub(gpu.name) for gpu in self.gpus.devices)


Verdict = Literal["ok", "failed", "skipped", "n/a"]
Finding = tuple[Verdict, str]
"""The verdict, and what was measured or why nothing was."""
Judge = Callable[[Evidence], Finding]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question about the machine."""

    id: str
    question: str
    tolerance: str
    judge: Judge
    """Called where all that it needs is there."""
    runs: Sequence[str] = ()
    """Runs that it needs; they must have ended well."""
    least_ranks: int = 1
    not_on_stub: str | None = None
    """Why a machine without a GPU cannot answer; None: it can."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came out of a check."""

    check: Check
    verdict: Verdict
    detail: str

    def as_json(self) -> dict[str, Any]:
        """For `--json` and the bundle."""
        return {
            "id": self.check.id,
            "question": self.check.question,
            "tolerance": self.check.tolerance,
            "verdict": self.verdict,
            "detail": self.detail,
        }


def answer(check: Check, evidence: Evidence) -> Answer:
    """Judge, unless the machine or a run that is missing rules that out."""
    try:
        verdict, detail = _obstacle(check, evidence) or check.judge(evidence)
    except Exception as error:  # one check that fails on an unknown machine costs no other
        verdict, detail = "failed", f"cannot be judged: {type(error).__name__}: {error}"
    return Answer(check=check, verdict=verdict, detail=detail)


def held(condition: bool, detail: str) -> Finding:
    return ("ok" if condition else "failed"), detail


def _obstacle(check: Check, evidence: Evidence) -> Finding | None:
    if check.not_on_stub is not None and evidence.is_stub:
        return "n/a", f"CUDA stub: {check.not_on_stub}"
    if evidence.ranks < check.least_ranks:
        return "skipped", "there is one GPU"
    for name in check.runs:
        if name not in evidence.records:
            return "skipped", evidence.missing.get(name, f"the run {name} was not made")
        record = evidence.records[name]
        if record.status != "ok":
            return "failed", f"the run {name} ended as {record.status}: {reason(record) or 'no reason given'}"
    return None


def devices_differ(evidence: Evidence) -> Finding:
    uuids = [note.uuid for note in evidence.notes.get(ZERO, ())]
    if len(uuids) < evidence.ranks:
        return "failed", f"{len(uuids)} of {evidence.ranks} ranks named their device"
    return held(len(set(uuids)) == len(uuids), f"{len(set(uuids))} devices for {len(uuids)} ranks")


def transport_is_nccl(evidence: Evidence) -> Finding:
    found = {evidence.records[name].world.collectives for name in (ZERO, SHARDED)}
    return held(found == {"nccl"}, ", ".join(sorted(found)))


def architecture_is_built(evidence: Evidence) -> Finding:
    gpus = evidence.gpus
    if not gpus.architectures:
        return "n/a", f"{gpus.wheel} names no architectures"
    lacking = [gpu for gpu in gpus.devices if not gpu.is_served_by(gpus.architectures)]
    named = ", ".join(dict.fromkeys(gpu.architecture for gpu in lacking or gpus.devices))
    return held(
        not lacking, f"{named} is {'not ' if lacking else ''}served by {', '.join(gpus.architectures)}"
    )


LOSS_TOLERANCE = 1e-5
"""Relative; fp32 without TF32, so what differs is the order of additions."""


def digests_are_equal(evidence: Evidence) -> Finding:
    runs = (SINGLE, ZERO, SHARDED)
    digests = {name: w.digest for name in runs if (w := evidence.records[name].initial_weights) is not None}
    other = [name for name in runs if digests.get(name) != digests.get(SINGLE) or name not in digests]
    if other:
        return "failed", f"{', '.join(other)}: other initial weights than {SINGLE}, or none digested"
    return "ok", f"{digests[SINGLE][:12]} in {len(runs)} runs"


def repeats_are_equal(evidence: Evidence) -> Finding:
    first, second = evidence.records[SINGLE], evidence.records[AGAIN]
    for before, after in zip(first.steps, second.steps, strict=False):
        if (before.loss, before.gradient_norm) != (after.loss, after.gradient_norm):
            return "failed", f"step {before.step}: losses {before.loss!r} and {after.loss!r}"
    weights = (first.final_weights, second.final_weights)
    if len(first.steps) != len(second.steps) or None in weights:
        return "failed", "a run lacks steps, or the digest of its last weights"
    same = weights[0] is not None and weights[1] is not None and weights[0].digest == weights[1].digest
    return held(
        same, f"{len(first.steps)} losses and norms are equal, last weights {'too' if same else 'differ'}"
    )


def loss_is_that_of_the_cpu(evidence: Evidence) -> Finding:
    ours, cpu = (evidence.records[name].steps[0].loss for name in (SINGLE, ON_CPU))
    if ours is None or cpu is None:
        return "failed", f"losses {ours} and {cpu}"
    difference = abs(ours - cpu) / abs(cpu)
    return held(difference <= LOSS_TOLERANCE, f"differs by {difference:.1e}")


STRATEGIES = (ZERO, SHARDED)
NORM_SHARE = 0.01
"""Of the gradients, while their norm is taken."""
BESIDES_BYTES = 3 * 2**30
"""CUDA's context, NCCL's buffers and cuBLAS's workspaces, which torch's allocator does not serve."""


def volumes_are_as_expected(evidence: Evidence) -> Finding:
    for name in STRATEGIES:
        differences = quantities.volume_differences(evidence.records[name])
        if differences is None:
            return "failed", f"{name}: nothing is expected, or no step was probed"
        if differences:
            first = differences[0]
            return "failed", (
                f"{name}, rank {first.rank}, {first.phase}: {first.op} of {first.dtype} moved "
                f"{first.measured_bytes:,} bytes, expected {first.expected_bytes:,}"
            )
    return "ok", f"every collective of {' and '.join(STRATEGIES)}"


def states_are_as_expected(evidence: Evidence) -> Finding:
    sizes = []
    for name in STRATEGIES:
        states = quantities.rank_states(evidence.records[name])
        if len(states) < evidence.records[name].world.world_size:
            return "failed", f"{name}: {len(states)} ranks measured their states"
        for of_rank in states:
            if of_rank.expected is None:
                return "failed", f"{name}: nothing is expected"
            expected = of_rank.expected.model_state_bytes
            if of_rank.measured_bytes != expected:
                return "failed", (
                    f"{name}, rank {of_rank.rank}: {of_rank.measured_bytes:,} bytes, expected {expected:,}"
                )
        sizes.append(f"{name} {max(of_rank.measured_bytes for of_rank in states):,}")
    return "ok", f"{', '.join(sizes)} bytes"


def norm_needs_no_copy(evidence: Evidence) -> Finding:
    notes = evidence.notes.get(SHARDED, ())
    if not notes:
        return "failed", "no rank noted it"
    share = max(note.norm_peak_bytes / note.gradient_bytes for note in notes)
    return held(share <= NORM_SHARE, f"{share:.3%} of {notes[0].gradient_bytes / 1e6:.0f} MB")


def driver_agrees(evidence: Evidence) -> Finding:
    records = [evidence.records[name] for name in RUNS if name in evidence.records]
    moments = [moment for record in records for rank in record.ranks for moment in rank.memory]
    besides = [
        moment.device_used_bytes - moment.reserved_bytes
        for moment in moments
        if moment.device_used_bytes is not None
        and moment.device_used_of != "device"
        and moment.reserved_bytes is not None
    ]
    if not besides:
        unknown = [moment.device_used_unknown for moment in moments if moment.device_used_unknown]
        return "n/a", unknown[0] if unknown else "no step was probed on a GPU"
    least, most = min(besides), max(besides)
    detail = f"{least / 1e6:,.0f} to {most / 1e6:,.0f} MB above what torch reserved"
    return held(least >= 0 and most <= BESIDES_BYTES, detail)


PHASE_TOLERANCE = STEP_TOLERANCE = 0.02


def phases_add_up(evidence: Evidence) -> Finding:
    worst = 0.0
    for name in (ZERO, SHARDED):
        record = evidence.records[name]
        first = quantities.first_timed(record)
        for rank in record.ranks:
            steps = rank.step_seconds[first:]
            if not steps or len(rank.phase_seconds) == 0:
                return "failed", f"{name}, rank {rank.rank}: no timed step"
            phases = [sum(of_step) for of_step in zip(*rank.phase_seconds.values(), strict=True)][first:]
            worst = max(worst, median(
                max(0.0, of_phases - step, step - data - of_phases) / step  # the host may fetch data between
                for step, data, of_phases in zip(steps, rank.data_seconds[first:], phases, strict=True)
            ))  # fmt: skip
    return held(worst <= PHASE_TOLERANCE, f"off by {worst:.2%} of the median step")


def clock_agrees_with_events(evidence: Evidence) -> Finding:
    worst = 0.0
    for name in (ZERO, SHARDED):
        record, notes = evidence.records[name], evidence.notes.get(name, ())
        first = quantities.first_timed(record)
        if len(notes) < len(record.ranks) or first >= len(record.steps):
            return "failed", f"{name}: {len(notes)} of {len(record.ranks)} ranks noted events of timed steps"
        for rank, note in zip(record.ranks, notes, strict=False):
            if len(note.event_step_seconds) != len(rank.step_seconds):
                return "failed", (
                    f"{name}, rank {rank.rank}: {len(note.event_step_seconds)} pairs of events in "
                    f"{len(rank.step_seconds)} steps"
                )
            pairs = zip(rank.step_seconds[first:], note.event_step_seconds[first:], strict=True)
            worst = max(worst, median(abs(clock - events) / events for clock, events in pairs))
    return held(worst <= STEP_TOLERANCE, f"off by {worst:.2%} of the median step")


def no_device_wait(evidence: Evidence) -> Finding:
    record, notes = evidence.records[ZERO], evidence.notes.get(ZERO, ())
    counts = {len(note.synchronisations) for note in notes}
    if not record.steps or counts != {len(record.steps)}:
        return "failed", "not every rank noted every step"
    most = max(count for note in notes for count in note.synchronisations)
    return held(most == 0, f"{most} in the {notes[0].micro_steps} micro-steps of a step")


ADDS_UP = 0.01


def steps_divide(evidence: Evidence) -> Finding:
    record = evidence.records[SHARDED]
    for rank in record.ranks:
        if not rank.overlap:
            return "failed", f"rank {rank.rank} has no traced step"
        for part in rank.overlap:
            communicates = part.communication_seconds > 0 or evidence.ranks == 1
            if part.compute_seconds <= 0 or not communicates:
                return "failed", (
                    f"rank {rank.rank}, step {part.step}: computing {part.compute_seconds:.6f} s, "
                    f"communication {part.communication_seconds:.6f} s"
                )
            total = part.compute_seconds + part.exposed_seconds + part.idle_seconds
            # Copies that run alone are the rest of the step.
            rest = part.seconds - total
            most = (part.copy_seconds or 0.0) + ADDS_UP * part.seconds
            if not -ADDS_UP * part.seconds <= rest <= most:
                said = f"parts are {total:.6f} s of a step of {part.seconds:.6f} s"
                return "failed", f"rank {rank.rank}: {said}"
    computing = record.ranks[0].overlap[-1]
    return "ok", f"computing is {computing.compute_seconds / computing.seconds:.0%} of a step"


def kernels_are_counted(evidence: Evidence) -> Finding:
    record, kernels = evidence.records[SHARDED], evidence.kernels.get(SHARDED, {})
    expected = collectives_per_step(record)
    if not kernels or not expected:
        return "failed", "no trace was kept, or no collective was counted"
    for rank, steps in kernels.items():
        for step, count in steps.items():
            if count != expected.get(rank):
                return "failed", (
                    f"rank {rank}, step {step}: {count} kernels of NCCL, {expected.get(rank)} collectives"
                )
    return held(all(kernels.values()), f"{max(expected.values()):g} a step")


def collectives_per_step(record: Record) -> dict[int, float]:
    """Calls of each rank in a probed step that move something; {} where none was counted."""
    probed = record.probed_steps
    if not probed or not quantities.all_ranks_counted(record):
        return {}
    moving = (row for row in record.comm if row.phase in STEP_PHASES and row.group_size > 1)
    calls = totals((row.rank, row.calls) for row in moving)
    return {rank: count / probed for rank, count in calls.items()}


LEAST_SHARE, MOST_SHARE = 0.40, 1.05
"""Of the data sheet: large products reach 60 to 90 %; a sheet's clock may be exceeded a little."""
LEAST_BUS, MOST_BUS = 1e9, 1e12
"""Bytes per second between two GPUs of a machine: below, even PCIe 3.0 x1 is faster; above, no link."""
MOST_LATENCY_SECONDS = 1e-3


def products_reach_the_sheet(evidence: Evidence) -> Finding:
    record = evidence.records[SHARDED]
    dtype = quantities.peak_dtype(record) or ""
    shares = []
    for rank in record.ranks:
        rate, sheet = rank.matmul_flops_per_second.get(dtype), find_peak(rank.device_name, dtype)
        if sheet is None:
            return "n/a", f"no data sheet is known for {rank.device_name} in {dtype}"
        if rate is None:
            return "failed", f"rank {rank.rank} measured no matrix products in {dtype}"
        shares.append(rate / sheet[0])
    detail = f"{min(shares):.0%} to {max(shares):.0%} in {dtype}"
    return held(min(shares) >= LEAST_SHARE and max(shares) <= MOST_SHARE, detail)


def utilisation_is_possible(evidence: Evidence) -> Finding:
    record = evidence.records[SHARDED]
    share = quantities.share_of(
        quantities.model_flops_per_second(quantities.Run.of(record)), quantities.sheet_rate(record)
    )
    if share is None:
        return "n/a", f"no data sheet is known for {record.ranks[0].device_name}, or no step was timed"
    return held(share < 1.0, f"{share:.2%} of a tiny model")


def network_is_plausible(evidence: Evidence) -> Finding:
    result = evidence.fabric
    if result is None:
        return "skipped", evidence.missing.get(FABRIC, "the network was not measured")
    bus, latency = result.bus_bandwidth(), result.latency_seconds()
    if bus is None or latency is None:
        return "failed", "all-reduce was not measured"
    detail = f"{bus / 1e9:.1f} GB/s, {latency * 1e6:.0f} us over {result.transport}"
    return held(LEAST_BUS <= bus <= MOST_BUS and latency <= MOST_LATENCY_SECONDS, detail)


MOST_SECONDS = 15.0


def lack_is_recorded(evidence: Evidence) -> Finding:
    if FULL not in evidence.records:
        return "skipped", evidence.missing.get(FULL, "the run was not made")
    record = evidence.records[FULL]
    if record.status != "oom":
        return "failed", f"recorded as {record.status}: {reason(record) or 'no reason given'}"
    seconds = evidence.seconds_to_notice
    if seconds is None:
        return "failed", "recorded as oom, but no rank said when"
    return held(seconds <= MOST_SECONDS, f"recorded after {seconds:.1f} s")


def next_run_is_well(evidence: Evidence) -> Finding:
    if FULL not in evidence.records:
        return "skipped", evidence.missing.get(FULL, "the run without memory was not made")
    return "ok", f"{SHARDED} ended as ok"


JUDGES: dict[str, Judge] = {
    "devices": devices_differ,
    "transport": transport_is_nccl,
    "architecture": architecture_is_built,
    "initial-weights": digests_are_equal,
    "repeat": repeats_are_equal,
    "cpu-loss": loss_is_that_of_the_cpu,
    "traffic": volumes_are_as_expected,
    "states": states_are_as_expected,
    "norm": norm_needs_no_copy,
    "driver-memory": driver_agrees,
    "phases": phases_add_up,
    "step-time": clock_agrees_with_events,
    "deepspeed-waits": no_device_wait,
    "trace": steps_divide,
    "kernels": kernels_are_counted,
    "products": products_reach_the_sheet,
    "utilisation": utilisation_is_possible,
    "fabric": network_is_plausible,
    "out-of-memory": lack_is_recorded,
    "after-out-of-memory": next_run_is_well,
}
TOLERANCES = {
    "loss": LOSS_TOLERANCE, "norm": NORM_SHARE, "phase": PHASE_TOLERANCE, "step": STEP_TOLERANCE,
    "adds_up": ADDS_UP, "least": LEAST_SHARE, "most": MOST_SHARE, "seconds": MOST_SECONDS,
}  # fmt: skip


_FILE = tomllib.loads(files(__package__).joinpath("checks.toml").read_text(encoding="utf-8"))
CHECKS = tuple(
    Check(id=id, judge=JUDGES[id], **row | {"tolerance": row["tolerance"].format(**TOLERANCES)})
    for id, row in _FILE.items()
)


def answer_all(evidence: Evidence) -> list[Answer]:
    return [answer(check, evidence) for check in CHECKS]


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
FABRIC_ARGUMENTS = ("--device", "cuda", "--max-size", "64MB", "--repeats", "10")
CPU_LOG = "cpu.log"
END_SECONDS = 20.0
"""For a run on the CPU that is not needed any more."""
OUT_OF_TIME, INTERRUPTED = "out of time (--minutes)", "interrupted"


def ranks_on(gpus: Gpus) -> int:
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
        artifact.rank: count_kernels(kept_trace(folder / artifact.path))
        for artifact in record.artifacts
        if artifact.kind == "trace" and artifact.rank is not None
    }


def count_kernels(trace: dict[str, Any]) -> dict[int, int]:
    """Kernels by the step in which they begin, since a step ends when the device is done."""
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
                lines = pack_matrix(found, packed / matrix.name)
        except Exception as error:  # what was measured before is packed
            lines = [f"not packed: {type(error).__name__}: {error}"]
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
