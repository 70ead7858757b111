"""Figures of traces: how each rank's time divides, which rank came late, which strategy the traffic suggests.

The rank that comes last to a collective runs it shortest, so no clocks need to agree. Also the JSON document.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.bounds import MOST_RANKS
from harness.errors import HarnessError
from harness.nested import grouped
from harness.traces.collectives import Call, GroupsOfJob, Process, Timeline, TracedDevice, calls_of, whole
from harness.traces.device import (
    IDLE_REASONS,
    NEVER,
    OTHER,
    WAITS_FOR_COMMUNICATION,
    DeviceEvents,
    Integers,
    Interval,
    KernelTime,
    Work,
    cut,
    division,
    gaps,
    length,
    subtract,
    union,
)
from harness.traces.scanning import TraceFile, computing_stretches


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a stretch of one rank's time divides, seconds; None: the trace does not tell."""

    seconds: float
    compute_seconds: float | None
    communication_seconds: float | None
    exposed_seconds: float | None
    copy_seconds: float | None
    idle_seconds: float | None
    idle_reasons: dict[str, float] | None = None
    """Seconds by each reason of `device.gaps`; they add up to `idle_seconds`."""

    @property
    def overlap_share(self) -> float | None:
        """Share of the communication during which something computes."""
        if not self.communication_seconds or self.exposed_seconds is None:
            return None
        return 1 - self.exposed_seconds / self.communication_seconds

    def as_json(self) -> dict[str, Any]:
        """The figures under the names of `harness trace --json`."""
        figures = asdict(self)
        del figures["idle_reasons"]
        return figures | {"overlap_share": self.overlap_share}


@dataclass(frozen=True, kw_only=True)
class StepDivision:
    """One step of one rank."""

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
    kernels: list[KernelTime]
    """Kernels and copies by name; those with most time first."""
    part: str = ""
    """Which device or process of the file, where no rank is known and it has several."""
    remarks: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else f"{self.file}{self.part}"


def read_traces(paths: Sequence[Path]) -> list[RankTrace]:
    """Every rank of these files, in order.

    Raises HarnessError for no trace, for a file or rank given twice, and for ranks of several jobs.
    """
    # Path.resolve raises RuntimeError for a loop of links.
    twice = [path for path, times in Counter(map(os.path.realpath, paths)).items() if times > 1]
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
    found = _participants(timeline, distributed)
    ranks = [_rank(path, distributed, file, one, alone=len(found) == 1) for one in found]
    if not any(rank.on_device or rank.calls for rank in ranks):
        raise HarnessError(
            f"trace '{path}' has neither kernels or copies of a GPU nor collectives; record it with "
            "ProfilerActivity.CUDA, or on ranks that communicate"
        )
    return ranks


class Participant(NamedTuple):
    """A process of a file with the devices that it works on."""

    process: Process
    devices: list[TracedDevice]
    number: int | None = None
    """Its place among several, if devices are numbered from 0."""
    part: str = ""


def _participants(timeline: Timeline, distributed: dict[str, Any]) -> list[Participant]:
    """Processes with their devices: one, unless traces of several were merged.

    A device belongs to the process whose launches have its correlation ids, before its events began.
    """
    devices = {pid: timeline.devices[pid] for pid in sorted(timeline.devices, key=_in_order)}
    devices = {pid: device for pid, device in devices.items() if device.is_used}
    hosts = {pid: p for pid, p in timeline.processes.items() if p.threads or p.calls or p.launches.begins}
    owners = {pid: _owner(d, hosts) for pid, d in devices.items()} if len(devices) > 1 else {}
    busy = {pid: p for pid, p in hosts.items() if p.calls or p.transports}
    known = set(owners.values()) - {None}
    if len(known) > 1 or (len(devices) > 1 and len(hosts) != 1 and not known and "rank" not in distributed):
        # One for each process, and for each device that none is known to work on.
        shares = grouped(
            (f"device {pid}" if owner is None else f"process {owner}", pid) for pid, owner in owners.items()
        )
        numbered = list(devices) == [str(number) for number in range(len(devices))]
        world = whole(distributed.get("world_size"))
        numbered = numbered and world in (None, len(shares))
        return [
            Participant(
                hosts.get(owners[pids[0]] or "", Process()), [devices[pid] for pid in pids],
                number if numbered else None, f", device {' and '.join(pids)}",
            )
            for number, pids in enumerate(shares.values())
        ]  # fmt: skip
    if devices or len(busy) <= 1:
        # Of several processes of one rank the first that communicates, or the one with most operators.
        process = max(hosts.values(), key=_work, default=Process())
        process = next(iter(busy.values())) if len(busy) == 1 else process
        for other in hosts.values():
            if other is not process and not process.launches.begins:
                for name in ("launches", "launchers", "names"):
                    setattr(process, name, getattr(other, name))
        return [Participant(process, list(devices.values()))]
    order = sorted(busy, key=_in_order)
    return [Participant(busy[pid], [], None, f", process {pid}") for pid in order]


def _in_order(pid: str) -> list[Any]:
    """Numbers within texts by their size: device 10 comes after 2."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", pid)]


def _owner(device: TracedDevice, hosts: dict[str, Process]) -> str | None:
    """The process that launched most of a device's events; of equal ones that with the shortest delays."""
    fits = {}
    begins = np.asarray(device.events.begins)
    for pid, process in hosts.items():
        launched = process.launches.of(device.events)
        known = launched != NEVER
        if known.any():
            fits[pid] = (int(known.sum()), -int((begins - launched)[known].sum()))
    return max(fits, key=lambda pid: fits[pid]) if fits else None


def _work(process: Process) -> tuple[int, int, int]:
    operators = sum(len(kinds) for _, kinds in process.threads.values())
    return len(process.calls), len(process.launches.begins), operators


_RANK = r"(?<![a-z])(?<!local[-_.])(?<!node[-_.])(?<!group[-_.])(?<![cdempst]p[-_.])rank[-_.]?(\d+)"
"""Not of a machine, nor within a dimension ('tp_rank_1')."""
_RANK_IN_FOLDER = re.compile(rf"(?:.*[-_.])?{_RANK}", re.IGNORECASE)
_RANK_IN_NAME = re.compile(rf"{_RANK}|^(?:trace|profile)?[-_]?r(\d+)$", re.IGNORECASE)
_OF_HOST = re.compile(r"^(?!rank[-_.]?\d).*(?<!rank)_\d+\.\d+(?:\.\d+)?\.pt\.trace\.", re.IGNORECASE)
"""HOST_PID.TIME.pt.trace.json, as tensorboard_trace_handler names files: a host's name is no rank."""
NEAREST_FOLDERS = 2


def rank_of_path(path: Path) -> int | None:
    """The rank that a folder ('rank_0'), or else the name of the file ('trace_rank3.json'), tells."""
    for folder in [*path.absolute().parents][:NEAREST_FOLDERS]:
        if found := _RANK_IN_FOLDER.fullmatch(folder.name):
            return int(found[1])
    if _OF_HOST.match(path.name):
        return None
    found = _RANK_IN_NAME.search(re.sub(r"(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$", "", path.name))
    return int(found[1] or found[2]) if found else None


def _rank(
    path: Path, distributed: dict[str, Any], file: TraceFile, participant: Participant, *, alone: bool
) -> RankTrace:  # fmt: skip
    process, device = participant.process, _joined(participant.devices)
    idle = None if device is None else _idle(device, process)
    groups = GroupsOfJob(distributed)
    calls = calls_of(process, device, groups)
    told, world = whole(distributed.get("rank")), whole(distributed.get("world_size"))
    rank = participant.number
    if alone:
        rank = told if told is not None and 0 <= told < MOST_RANKS else rank_of_path(path)
    backend = distributed.get("backend")
    if device is not None:
        window = device.first, device.last
        work = device.events.division()
    else:
        # From the first to the last event of the host.
        begin = min([process.first, *(call.start for call in calls)])
        end = max([process.last, *(call.end for call in calls)])
        window = (begin, end) if end >= begin else (0, 0)
        talking = union((t.start, t.end) for t in process.transports)
        work = division(computing_stretches(process.operators()), talking)
    known = device is not None or bool(process.transports)
    properties = file.settings.get("deviceProperties")
    names = [p.get("name") for p in properties if isinstance(p, dict)] if isinstance(properties, list) else []
    trace = RankTrace(
        file=str(path), rank=rank, world_size=world if world and 0 < world <= MOST_RANKS else None,
        backend=str(backend) if backend else None,
        device_name=str(names[0]) if names and names[0] else None,
        on_device=device is not None, division=_division(window, work, idle, known=known),
        steps=_steps(process, device, work, idle, known=known), calls=calls,
        styles=frozenset(process.styles), kernels=device.events.kernels() if device else [],
        part=participant.part,
    )  # fmt: skip
    marks = sorted((at, number) for number, at in process.steps)
    for call in calls:
        place = bisect_right(marks, call.start, key=lambda mark: mark[0][0]) - 1
        call.step = marks[place][1] if place >= 0 and call.start < marks[place][0][1] else None
    trace.remarks = _remarks(trace, file, known=known)
    return trace


def _joined(devices: list[TracedDevice]) -> TracedDevice | None:
    if len(devices) < 2:
        return devices[0] if devices else None
    joined = TracedDevice(DeviceEvents(devices[0].events.names))
    for device in devices:
        joined.events.extend(device.events)
        joined.communications += device.communications
        joined.marks += device.marks
        joined.first, joined.last = min(joined.first, device.first), max(joined.last, device.last)
    return joined


Idle = dict[str, Integers] | None


def _idle(device: TracedDevice, process: Process) -> Idle:
    found = gaps(device.events, process.launches)
    # The host may communicate for the device, by gloo: whatever is launched then waits for it.
    by_host = union((t.start, t.end) for t in process.transports)
    if len(by_host):
        every = union(np.concatenate([found[reason] for reason in IDLE_REASONS]))
        waits = subtract(every, subtract(every, by_host))
        found |= {reason: subtract(found[reason], by_host) for reason in IDLE_REASONS}
        found[WAITS_FOR_COMMUNICATION] = union(np.concatenate([found[WAITS_FOR_COMMUNICATION], waits]))
    return found


def _division(window: Interval, work: Work, idle: Idle, *, known: bool) -> Division:
    row: dict[str, Any] = dict(work(window))
    if idle is not None:
        row["idle_reasons"] = {name: length(cut(of, window)) / 1e9 for name, of in idle.items()}
    unknown = () if known else ("communication_seconds", "exposed_seconds", "idle_seconds")
    return Division(**row | dict.fromkeys(unknown))


def _steps(
    process: Process, device: TracedDevice | None, work: Work, idle: Idle, *, known: bool
) -> list[StepDivision]:
    """Each annotated step, from its begin to its end on the host."""
    found = []
    for step, window in sorted(set(process.steps), key=lambda mark: mark[1]):
        seen = device is None or (window[1] > device.first and window[0] < device.last)
        division = _division(window, work, idle, known=known) if seen else None
        # A step was recorded whole where the device's first event comes in its first tenth.
        tenth = (window[1] - window[0]) // 10
        complete = seen and (device is None or device.first - window[0] <= tenth)
        found.append(StepDivision(step=step, division=division, is_complete=complete))
    return found


MOST_UNKNOWN = 3


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
    unnamed = sum(call.operation is None and call.kind is None for call in trace.calls)
    if unnamed:
        found.append(f"{unnamed:,} kernels communicate and no launch says for which collective")
    sizes = [trace.world_size or 0, *(call.group.size or 0 for call in trace.calls)]
    several = f"{max(sizes)} ranks" if max(sizes) > 1 else "several ranks" if trace.styles else None
    is_silent = trace.world_size != 1 and not any(call.runs for call in trace.calls)
    if trace.on_device and known and several and is_silent:
        bare = (
            re.split("[<(]", one.name.removeprefix("void ").replace("(anonymous namespace)::", ""))[0]
            for one in trace.kernels
            if one.kind.what == OTHER
        )
        unknown = ", ".join([*dict.fromkeys(bare)][:MOST_UNKNOWN])
        told = f"longest unknown kernels: {unknown}" if unknown else "no name is unknown"
        found.append(f"{several}, yet no kernel is known as communication; {told}")
    return found


Key = tuple[str, tuple[int, ...] | None, str | None, int | None, int | None]
MEETING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""No rank ends these before the last has come; the root of a broadcast does not wait."""


@dataclass
class RankWaits:
    """How one rank meets the others."""

    rank: int | None
    label: str
    waited_seconds: float = 0.0
    """In collectives, for a rank that came later."""
    caused_seconds: float = 0.0
    """What the others waited for it, as it came last: summed over them."""
    times_last: int = 0


@dataclass
class CollectiveSkew:
    """One kind of collective over the ranks."""

    operation: str
    payload_bytes: int | None
    matched: int
    mean_skew_seconds: float
    """From the arrival of the first to that of the last rank."""
    largest_skew_seconds: float
    last_rank: int | None
    """Which rank comes last most often."""


@dataclass(frozen=True)
class Skew:
    """What the ranks given say together."""

    ranks: Sequence[RankWaits]
    collectives: Sequence[CollectiveSkew]
    matched: int
    unmatched: Sequence[str]
    """Why collectives could not be matched."""


def skew_of(ranks: Sequence[RankTrace]) -> Skew | None:
    """How long ranks waited for each other; None: there is one rank."""
    if len(ranks) < 2:
        return None
    waits = [RankWaits(rank=rank.rank, label=rank.label) for rank in ranks]
    unmatched: list[str] = []
    rows: dict[tuple[str, int | None], list[tuple[float, int]]] = {}
    for key, members in _by_key(ranks).items():
        if len(members) < 2:
            continue
        counts = {index: len(calls) for index, calls in members.items()}
        if len(set(counts.values())) > 1:
            shown = ", ".join(f"{ranks[index].label}: {count}" for index, count in counts.items())
            unmatched.append(f"{key[0]}: numbers of calls differ ({shown})")
            continue
        for calls in zip(*members.values(), strict=True):
            _compare(list(members), calls, waits, rows, is_group_known=key[1] is not None)
    found = []
    for (operation, payload), of in rows.items():
        skews, lasts = [skew for skew, _ in of], [last for _, last in of]
        found.append(
            CollectiveSkew(
                operation=operation, payload_bytes=payload, matched=len(of),
                mean_skew_seconds=sum(skews) / len(of), largest_skew_seconds=max(skews),
                last_rank=ranks[max(set(lasts), key=lasts.count)].rank,
            )
        )  # fmt: skip
    found.sort(key=lambda row: -row.mean_skew_seconds * row.matched)
    return Skew(waits, found, sum(row.matched for row in found), unmatched)


def _by_key(ranks: Sequence[RankTrace]) -> dict[Key, dict[int, list[Call]]]:
    keys: dict[Key, dict[int, list[Call]]] = {}
    for index, rank in enumerate(ranks):
        for call in rank.calls:
            if call.operation not in MEETING or not call.runs:
                continue
            group, world = call.group, rank.world_size
            # A part of all ranks that are not known need not hold the ranks given.
            is_part = group.ranks is None and group.size and world is not None and group.size < world
            if group.size == 1 or is_part:
                continue
            # What ranks hand to all-to-all differs; of groups without ranks, sizes are compared later.
            payload = call.payload_bytes if group.ranks and call.operation != "all_to_all" else None
            name = group.name if group.ranks is not None else None
            key = (call.operation, group.ranks, name, group.size, payload)
            keys.setdefault(key, {}).setdefault(index, []).append(call)
    return keys


def _compare(
    members: Sequence[int], calls: Sequence[Call], waits: Sequence[RankWaits],
    rows: dict[tuple[str, int | None], list[tuple[float, int]]], *, is_group_known: bool,
) -> None:  # fmt: skip
    spans = [(min(s for s, _ in call.runs), max(e for _, e in call.runs)) for call in calls]
    if not is_group_known and max(s for s, _ in spans) >= min(e for _, e in spans):
        return  # not at the same time: they are of different groups
    payloads = {call.payload_bytes for call in calls}
    if len(payloads) > 1 and calls[0].operation != "all_to_all":
        return
    seconds = [call.seconds or 0.0 for call in calls]
    shortest = min(seconds)
    last = seconds.index(shortest)
    for index, of_rank in zip(members, seconds, strict=True):
        waits[index].waited_seconds += of_rank - shortest
    waits[members[last]].caused_seconds += sum(seconds) - shortest * len(seconds)
    waits[members[last]].times_last += 1
    operation = calls[0].operation or ""
    payload = None if operation == "all_to_all" else calls[0].payload_bytes
    rows.setdefault((operation, payload), []).append((max(seconds) - shortest, members[last]))
