"""Figures of traces: how each rank's time divides, as a whole and per step, and its collectives."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from harness.bounds import MOST_RANKS
from harness.errors import HarnessError
from harness.traces.collectives import Call, GroupsOfJob, calls_of
from harness.traces.overlap import Interval, Stretches, computing_stretches, seconds_within, union
from harness.traces.scanning import TraceFile
from harness.traces.timeline import Process, Timeline, TracedDevice, whole

_RANK_IN_NAME = re.compile(r"(?:rank|^r|[-_.]r)[-_]?(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a stretch of one rank's time divides, seconds; None: the trace does not tell."""

    seconds: float
    compute_seconds: float | None
    communication_seconds: float | None
    exposed_seconds: float | None
    copy_seconds: float | None
    idle_seconds: float | None

    @property
    def overlap_share(self) -> float | None:
        """Share of the communication during which something computes."""
        if not self.communication_seconds or self.exposed_seconds is None:
            return None
        return 1 - self.exposed_seconds / self.communication_seconds

    def as_json(self) -> dict[str, Any]:
        """The figures under the names of `harness trace --json`."""
        return asdict(self) | {"overlap_share": self.overlap_share}


FIGURES = tuple(figure.name for figure in fields(Division))


@dataclass(frozen=True, kw_only=True)
class StepDivision:
    """One step of one rank."""

    rank: int | None
    step: int
    division: Division | None
    """None: no event of the device was recorded in it."""
    is_complete: bool
    """Whether the device was recorded from its begin on."""


@dataclass(kw_only=True)
class RankTrace:
    """All that one rank's trace says."""

    file: str
    rank: int | None
    world_size: int | None
    backend: str | None
    device_name: str | None
    on_device: bool
    """Whether events of a device were recorded; otherwise the host computes and a transport communicates."""
    division: Division
    steps: list[StepDivision]
    calls: list[Call]
    styles: frozenset[str]
    kernels: dict[str, list[int]]
    remarks: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else self.file


def read_traces(paths: Sequence[Path]) -> list[RankTrace]:
    """Every rank of these files, in order.

    Raises HarnessError for no trace, for a file or rank given twice, and for ranks of several jobs.
    """
    twice = [path for path, times in Counter(path.resolve() for path in paths).items() if times > 1]
    if twice:
        raise HarnessError(f"'{twice[0]}' is given twice; give each rank once")
    ranks = [rank for path in paths for rank in read_trace(path)]
    worlds = {rank.world_size: rank.file for rank in ranks if rank.world_size is not None}
    if len(worlds) > 1:
        (one, first), (other, second) = list(worlds.items())[:2]
        raise HarnessError(
            f"'{first}' is of a job with {one} ranks, '{second}' of one with {other}; give ranks of one job, "
            "or compare two with --baseline FILE"
        )
    given: dict[int, str] = {}
    for rank in ranks:
        if rank.rank is None:
            continue
        if rank.rank in given:
            raise HarnessError(
                f"'{given[rank.rank]}' and '{rank.file}' are both of rank {rank.rank}; give each rank "
                "once, or compare two runs with --baseline FILE"
            )
        given[rank.rank] = rank.file
    return sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0))


def read_trace(path: Path) -> list[RankTrace]:
    """The ranks of one file: one, unless traces were merged. Raises HarnessError for what is no trace."""
    file, timeline = TraceFile(path), Timeline()
    for event in file.events():
        timeline.take(event)
    file.unreadable += timeline.untimed
    if not file.has_events:
        raise HarnessError(
            f"trace '{path}' has no list 'traceEvents': it is JSON of something else; give a trace of "
            "torch.profiler (export_chrome_trace)"
        )
    if not timeline.events:
        raise HarnessError(f"trace '{path}' holds no event; record it while the program works")
    if not timeline.is_kineto:
        raise HarnessError(
            f"trace '{path}' has {timeline.events:,} events, none of a category that torch.profiler writes "
            "(cpu_op, kernel, gpu_memcpy, ...): it is a trace of another tool; give one of torch.profiler"
        )
    distributed = file.settings.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    ranks = [
        _rank(path, distributed, file, process, devices, number, count)
        for number, count, process, devices in _participants(timeline, distributed)
    ]
    if not any(rank.on_device or rank.calls for rank in ranks):
        raise HarnessError(
            f"trace '{path}' has neither kernels or copies of a GPU nor collectives; record it with "
            "ProfilerActivity.CUDA, or on ranks that communicate"
        )
    return ranks


Participant = tuple[int, int, Process, list[TracedDevice]]


def _participants(timeline: Timeline, distributed: dict[str, Any]) -> list[Participant]:
    """Processes with their devices: one, unless a file that names no rank has several."""
    devices = {pid: device for pid, device in timeline.devices.items() if device.is_used}
    hosts = {pid: p for pid, p in timeline.processes.items() if p.threads or p.calls or p.correlations}
    busy = {pid: p for pid, p in hosts.items() if p.calls or p.transports}
    if "rank" in distributed and len(busy) <= 1:
        process = _merged(hosts.values()) if not busy else next(iter(busy.values()))
        for other in hosts.values():
            if other is not process and not process.correlations:
                process.correlations, process.launched = other.correlations, other.launched
                process.launchers, process.names = other.launchers, other.names
        return [(0, 1, process, list(devices.values()))]
    if len(devices) > 1:
        every = [p for _, p in sorted(hosts.items())]
        nobody = [Process() for _ in range(len(devices) - 1)]
        owners = every if len(every) == len(devices) else [_merged(every), *nobody]
        pairs = zip(owners, (d for _, d in sorted(devices.items())), strict=False)
        return [(n, len(devices), process, [device]) for n, (process, device) in enumerate(pairs)]
    if devices or len(busy) <= 1:
        return [(0, 1, _merged(hosts.values()), list(devices.values()))]
    return [(n, len(busy), process, []) for n, (_, process) in enumerate(sorted(busy.items()))]


def _merged(processes: Iterable[Process]) -> Process:
    """Several processes of one rank as one: the first that communicates, or the one with most operators."""
    every = list(processes)
    if not every:
        return Process()
    return max(
        every, key=lambda p: (len(p.calls), len(p.correlations), sum(len(k) for _, k in p.threads.values()))
    )


def _rank(
    path: Path, distributed: dict[str, Any], file: TraceFile, process: Process, devices: list[TracedDevice],
    number: int, count: int,
) -> RankTrace:  # fmt: skip
    device = _joined(devices)
    groups = GroupsOfJob(distributed)
    calls = calls_of(process, device, groups)
    told, world = whole(distributed.get("rank")), whole(distributed.get("world_size"))
    rank = told if told is not None and 0 <= told < MOST_RANKS and count == 1 else None
    if rank is None:
        named = _RANK_IN_NAME.search(path.name.split(".")[0]) if count == 1 else None
        rank = int(named[1]) if named else (number if count > 1 else None)
    backend = distributed.get("backend")
    if device is not None:
        window, work = (device.first, device.last), _device_work(device)
    else:
        window, work = _host_window(process, calls), _host_work(process)
    known = device is not None or bool(process.transports)
    trace = RankTrace(
        file=str(path), rank=rank, world_size=world if world and 0 < world <= MOST_RANKS else None,
        backend=str(backend) if backend else None, device_name=_device_name(file.settings),
        on_device=device is not None, division=_division(window, work, known=known),
        steps=[], calls=calls, styles=frozenset(process.styles), kernels=device.kernels if device else {},
    )  # fmt: skip
    trace.steps = _steps(rank, process, device, work, known=known)
    marks = sorted((at, number) for number, at in process.steps)
    for call in calls:
        place = bisect_right(marks, call.start, key=lambda mark: mark[0][0]) - 1
        call.step = marks[place][1] if place >= 0 and call.start < marks[place][0][1] else None
    trace.remarks = _remarks(trace, file, known=known)
    return trace


def _joined(devices: list[TracedDevice]) -> TracedDevice | None:
    if len(devices) < 2:
        return devices[0] if devices else None
    whole = TracedDevice()
    for device in devices:
        whole.computing.extend(device.computing)
        whole.copies.extend(device.copies)
        whole.communications += device.communications
        whole.marks += device.marks
        for name, (time, count) in device.kernels.items():
            total = whole.kernels.setdefault(name, [0, 0])
            total[0] += time
            total[1] += count
        whole.first, whole.last = min(whole.first, device.first), max(whole.last, device.last)
    return whole


def _device_work(device: TracedDevice) -> Stretches:
    talking = union((c.start, c.end) for c in device.communications)
    return Stretches(union(_pairs(device.computing)), talking, union(_pairs(device.copies)))


def _host_work(process: Process) -> Stretches:
    talking = union((t.start, t.end) for t in process.transports)
    return Stretches(computing_stretches(process.operators()), talking)


def _host_window(process: Process, calls: Sequence[Call]) -> Interval:
    """From the first to the last event of the host."""
    starts = [process.first, *(call.start for call in calls)]
    ends = [process.last, *(call.end for call in calls)]
    return (min(starts), max(ends)) if max(ends) >= min(starts) else (0, 0)


def _pairs(times: Sequence[int]) -> Iterable[Interval]:
    return zip(times[::2], times[1::2], strict=True)


def _division(window: Interval, work: Stretches, *, known: bool) -> Division:
    row = seconds_within(window, work)
    unknown = () if known else ("communication_seconds", "exposed_seconds", "idle_seconds")
    figures: dict[str, Any] = {name: None if name in unknown else row[name] for name in FIGURES}
    return Division(**figures)


def _steps(
    rank: int | None, process: Process, device: TracedDevice | None, work: Stretches, *, known: bool
) -> list[StepDivision]:
    """Each annotated step, from its begin to its end on the host."""
    found = []
    for step, window in sorted(set(process.steps), key=lambda mark: mark[1]):
        seen = device is None or (window[1] > device.first and window[0] < device.last)
        division = _division(window, work, known=known) if seen else None
        complete = seen and (device is None or window[0] >= device.first or _begins_within(device, window))
        found.append(StepDivision(rank=rank, step=step, division=division, is_complete=complete))
    return found


def _begins_within(device: TracedDevice, window: Interval) -> bool:
    """Whether the device's first event comes in the first tenth of a step: the step was recorded whole."""
    return device.first - window[0] <= (window[1] - window[0]) // 10


def _device_name(settings: dict[str, Any]) -> str | None:
    properties = settings.get("deviceProperties")
    names = [p.get("name") for p in properties if isinstance(p, dict)] if isinstance(properties, list) else []
    return str(names[0]) if names and names[0] else None


def _remarks(trace: RankTrace, file: TraceFile, *, known: bool) -> list[str]:
    found = []
    if file.unreadable:
        found.append(f"{file.unreadable:,} events are not JSON or have no valid time, and were left out")
    if not known:
        found.append("only the host was recorded: what the devices did and how long collectives ran is n/a")
    unsized = sum(call.payload_bytes is None for call in trace.calls if call.operation is not None)
    if unsized:
        found.append(
            f"bytes of {unsized:,} of {len(trace.calls):,} collectives are n/a; record with "
            "record_shapes=True"
        )
    unnamed = sum(call.operation is None for call in trace.calls)
    if unnamed:
        found.append(f"{unnamed:,} kernels communicate and no launch says for which collective")
    return found
