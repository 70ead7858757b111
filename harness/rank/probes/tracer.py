"""torch's profiler over the traced steps: what computed, what communicated, what waited.

CPU: an operator computes while it is the innermost one on its thread; a collective communicates while
gloo works on it (its `gloo:*` events, on gloo's own threads, waiting for the peers included).
CUDA: kernels on any stream compute, those of NCCL and of symmetric memory communicate, copies are neither.
What an event is and how a step divides is decided in `harness.traces`, as for traces of other programs.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from harness.rank.probes.time import PHASES, accounted_seconds
from harness.rank.step_hooks import Step, StepHook
from harness.traces.device import (
    COPIES,
    DEVICE_ACTIVITIES,
    Interval,
    cut,
    is_communication,
    is_computing,
    length,
    subtract,
    union,
)
from harness.traces.scanning import (
    PHASE,
    STEP,
    TRANSPORTS,
    Communication,
    Operator,
    RankActivity,
    computing_stretches,
    divide,
    operator_computes,
)

DISCARDED_STEPS = {"cuda": 1}
"""First steps under the profiler that are left out, by device: they hold the start of CUPTI."""
NOTHING_SEEN = (
    "the profiler saw no kernel on the GPU: CUPTI is missing, another profiler uses it, or the driver allows "
    "it to administrators only (NVreg_RestrictProfilingToAdminUsers)"
)


class Tracer(StepHook):
    """Off until `start`; the loop says which step and phase it is in."""

    def __init__(self, device: str, trace_file: Path | None) -> None:
        self.rows: list[dict[str, Any]] = []
        """Per traced step, in the form of `record.OverlapPart`."""
        self.missing: str | None = None
        """Why steps were traced and there is no row."""
        self.discarded_steps = DISCARDED_STEPS.get(device, 0)
        self.seconds = 0.0
        """What starting, stopping and reading cost, outside of the steps."""
        self.every_thread = False
        """Whether to record all threads of the host, for an engine that works on one of its own."""
        self._device = device
        self._trace_file = trace_file
        self._profile: profile | None = None
        self._step: record_function | None = None
        self._phase: record_function | None = None
        self._number = 0
        self._at_step: float | None = None
        self._at_phase: float | None = None
        self._of_phases: list[float | None] = []
        self._accounts: dict[int, StepAccounts] = {}

    @property
    def at_work(self) -> bool:
        return self._profile is not None

    def start(self) -> None:
        """Start the profiler, if it is not running; ranks should meet before the step that follows."""
        if self._profile is not None:
            return
        begin = time.perf_counter()
        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        config = _ExperimentalConfig(profile_all_threads=True) if self.every_thread else None
        # Without shapes a trace does not tell the bytes of collectives; asking for them costs time.
        self._profile = profile(
            activities=activities, experimental_config=config, record_shapes=self._trace_file is not None
        )
        self._profile.start()
        self.seconds += time.perf_counter() - begin

    def prepare(self, step: Step) -> None:
        self._number = step.number

    def begin(self) -> None:
        if self._profile is not None:
            self._at_step, self._of_phases = accounted_seconds(), []
            self._step = record_function(f"{STEP}{self._number}")
            self._step.__enter__()

    def enter(self, phase: str, last: bool = False) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None
            self._of_phases.append(_since(self._at_phase))
        if self._step is not None and phase in PHASES:
            self._at_phase = accounted_seconds()
            self._phase = record_function(PHASE + phase)
            self._phase.__enter__()

    def end(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
            self._accounts[self._number] = StepAccounts(_since(self._at_step), self._of_phases)

    def stop(self) -> None:
        """Stop the profiler, if it runs; read its events, and write the trace if one is wanted."""
        if self._profile is None:
            return
        begin = time.perf_counter()
        stopped, self._profile = self._profile, None
        stopped.stop()
        results: Any = stopped.profiler.kineto_results  # type: ignore[union-attr]
        rows, self.missing = counted_steps(results.events(), self._device, self._accounts)
        self.rows += rows
        if self._trace_file is not None:
            stopped.export_chrome_trace(str(self._trace_file))
        self.seconds += time.perf_counter() - begin


class StepAccounts(NamedTuple):
    """Seconds that the rank's thread ran, or was queued for a processor, in a step; None: not known."""

    whole: float | None
    phases: Sequence[float | None]
    """Of each phase, in their order."""


def _since(before: float | None) -> float | None:
    after = accounted_seconds()
    return None if after is None or before is None else after - before


Accounts = Mapping[int, StepAccounts]
"""By step."""


def counted_steps(
    events: Any, device: str, accounts: Accounts | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """Rows of the steps that count, and why there is none: without events of the GPU it would look idle."""
    if device == "cuda" and not any(activity_of(e) in DEVICE_ACTIVITIES for e in events):
        return [], NOTHING_SEEN
    return divide_steps(events, device, accounts)[DISCARDED_STEPS.get(device, 0) :], None


LAUNCH = re.compile(r"(cuda|cu|hip)[A-Z]")
"""What the host calls of the driver's and the runtime's interfaces, by name."""
COPY_NAMES = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}


def activity_of(event: Any) -> str:
    """Its kind in Kineto's words, which torch 2.11 and older do not say: told from device and name."""
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    name = event.name()
    if event.device_type().name == "CPU":
        return "cuda_runtime" if LAUNCH.match(name) else "cpu_op"
    if event.is_user_annotation():
        return "gpu_user_annotation"
    return next((kind for start, kind in COPY_NAMES.items() if name.startswith(start)), "kernel")


def divide_steps(events: Any, device: str, accounts: Accounts | None = None) -> list[dict[str, Any]]:
    """Rows of the steps among the events of torch's profiler (Kineto), in the form of `OverlapPart`."""
    # There are thousands of them, and each question to one costs a call into C++.
    named = [(e.name(), e) for e in events if device == "cpu" or e.device_type().name == "CPU"]
    marks = [(name, (e.start_ns(), e.end_ns())) for name, e in named if name.startswith((STEP, PHASE))]
    steps = sorted((int(n.removeprefix(STEP)), at) for n, at in marks if n.startswith(STEP))
    phases = [(n.removeprefix(PHASE), at) for n, at in marks if n.startswith(PHASE)]
    work = _device_work(events, named, phases) if device == "cuda" else _host_work(named, phases)
    rows = [divide(step, at, work) for step, at in steps]
    if device == "cpu":
        # From where a rank hands a collective over until the transport begins with it it waits as well.
        begins = sorted(communication.start for communication in work.communications)
        asked = (e.start_ns() for name, e in named if name.startswith("c10d::"))
        waits = [(at, begins[n]) for at in asked if (n := bisect_left(begins, at)) < len(begins)]
        waits += [(c.start, c.end) for c in work.communications]
        for row, (step, at) in zip(rows, steps, strict=True):
            within = sorted(stretch for _, stretch in phases if at[0] <= stretch[0] < at[1])
            own = (accounts or {}).get(step, StepAccounts(None, []))
            row["asleep_seconds"] = _asleep_seconds([at, *within], [own.whole, *own.phases], work, waits)
    return rows


def _asleep_seconds(
    stretches: list[Interval], accounted: list[float | None], work: RankActivity, waits: list[Interval]
) -> float | None:
    """At the least: all communication that nothing hides may have been waited for. stretches: a step and its
    phases.

    Time queued for a processor while a collective is under way is taken off twice, so each phase is counted
    apart: what other work did in one hides no sleep in another. Of the two bounds the larger one holds.
    """
    asleep = []
    waiting, computing = union(waits), union(work.computing)
    for at, seconds in zip(stretches, accounted, strict=False):
        waited = length(subtract(cut(waiting, at), cut(computing, at)))
        asleep.append(None if seconds is None else max(0.0, (at[1] - at[0] - waited) / 1e9 - seconds))
    whole, *in_phases = asleep
    return None if whole is None else max(whole, sum(seconds for seconds in in_phases if seconds is not None))


Phases = list[tuple[str, Interval]]


def _host_work(named: list[tuple[str, Any]], phases: Phases) -> RankActivity:
    operators, communications = [], []
    for name, e in named:
        begin, end, transports = e.start_ns(), e.end_ns(), name.startswith(TRANSPORTS)
        if transports or not e.is_async():
            operators.append(Operator(e.start_thread_id(), begin, end, operator_computes(name), transports))
        if transports:
            communications.append(
                Communication(name=name, phase=_phase_at(begin, phases), start=begin, end=end)
            )
    return RankActivity(computing_stretches(operators), communications)


def _device_work(events: Any, named: list[tuple[str, Any]], phases: Phases) -> RankActivity:
    # A kernel belongs to the phase in which the host launched it.
    launched = {
        e.correlation_id(): e.start_ns()
        for _, e in named
        if activity_of(e) in ("cuda_runtime", "cuda_driver")
    }
    computing: list[Interval] = []
    copies: list[Interval] = []
    communications: list[Communication] = []
    for e in events:
        kind = activity_of(e)
        if kind not in DEVICE_ACTIVITIES:
            continue
        name, span = e.name(), (e.start_ns(), e.end_ns())
        if is_communication(kind, name):
            phase = _phase_at(launched.get(e.correlation_id(), span[0]), phases)
            communications.append(Communication(name=name, phase=phase, start=span[0], end=span[1]))
        if is_computing(kind, name):
            computing.append(span)
        if kind in COPIES:
            copies.append(span)
    return RankActivity(computing, communications, copies)


def _phase_at(time_ns: int, phases: Phases) -> str:
    return next((name for name, (start, end) in phases if start <= time_ns < end), "none")
