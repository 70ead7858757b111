"""What a trace holds of one process, in the little that figures need: gigabytes become megabytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.traces.kinds import (
    COPIES,
    DEVICE_ACTIVITIES,
    HOST_OPERATORS,
    LAUNCHES,
    OTHER_ACTIVITIES,
    PHASE,
    is_communication,
    is_transport,
    operator_computes,
    step_number,
)
from harness.traces.overlap import Interval, Operator
from harness.traces.scanning import Event, nanoseconds

# What to do with an event, by category and name.
_COMPUTES, _COPIES, _COMMUNICATES = 1, 2, 4
_OPERATOR, _TRANSPORT, _CALL, _LAUNCH, _STEP, _PHASE, _DEVICE_MARK = 8, 16, 32, 64, 128, 256, 512
_OPERATOR_COMPUTES, _STYLED = 1024, 2048
_FAR = 2**62
"""Nanoseconds that no clock reaches."""
_ON_DEVICE = _COMPUTES | _COPIES | _COMMUNICATES
_CALLS = ("nccl:", "rccl:", "c10d::", "_c10d_functional::", "symm_mem::")
_STYLES = {
    "FSDP::": "FSDP2", "FullyShardedDataParallel": "FSDP1", "DistributedDataParallel": "DDP",
    "_FSDP": "FSDP1", "DeepSpeed": "DeepSpeed",
}  # fmt: skip
"""What annotations of libraries begin with, and whose they are."""
_KEPT = (
    "Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size", "Process Group Name",
    "Process Group Ranks", "Global rank start", "Global rank stride", "Input Dims", "Input type", "Seq",
)  # fmt: skip
"""Arguments of a collective that are read."""


class DeviceCommunication(NamedTuple):
    """A kernel or copy that moves data between ranks."""

    name: str
    stream: str
    start: int
    end: int
    correlation: int | None
    external: int | None
    arguments: dict[str, Any]


class HostEvent(NamedTuple):
    """A launch, operator or transport's work that belongs to a collective."""

    thread: str
    start: int
    end: int
    name: str
    external: int | None
    arguments: dict[str, Any]


@dataclass
class TracedDevice:
    """What ran on one device; times in nanoseconds."""

    computing: array[int] = field(default_factory=lambda: array("q"))
    """Begin and end of each kernel that does not communicate, one after the other."""
    copies: array[int] = field(default_factory=lambda: array("q"))
    communications: list[DeviceCommunication] = field(default_factory=list)
    marks: list[HostEvent] = field(default_factory=list)
    """Annotations of collectives as they lie on the device."""
    kernels: dict[str, list[int]] = field(default_factory=dict)
    """Nanoseconds and number of each computing kernel and copy by its name."""
    first: int = 2**63 - 1
    last: int = -(2**63)

    @property
    def is_used(self) -> bool:
        return self.last >= self.first


@dataclass
class Process:
    """What one process did on the host."""

    calls: list[HostEvent] = field(default_factory=list)
    """Operators and launches of collectives."""
    transports: list[HostEvent] = field(default_factory=list)
    """A transport's own work on them, where no device communicates."""
    steps: list[tuple[int, Interval]] = field(default_factory=list)
    phases: list[tuple[str, Interval]] = field(default_factory=list)
    threads: dict[str, tuple[array[int], array[int]]] = field(default_factory=dict)
    """Begin and end, and kind, of every operator by thread."""
    correlations: array[int] = field(default_factory=lambda: array("q"))
    launched: array[int] = field(default_factory=lambda: array("q"))
    launchers: array[int] = field(default_factory=lambda: array("q"))
    """Of each launch: its correlation, its begin, and the index of its thread in `names`."""
    names: dict[str, int] = field(default_factory=dict)
    styles: set[str] = field(default_factory=set)
    """Libraries whose annotations were seen."""
    first: int = 2**63 - 1
    last: int = -(2**63)

    def operators(self) -> Iterator[Operator]:
        """Every operator of the host."""
        for index, (times, kinds) in enumerate(self.threads.values()):
            for place, kind in enumerate(kinds):
                yield Operator(index, times[2 * place], times[2 * place + 1], bool(kind & 1), bool(kind & 2))


class Timeline:
    """Takes the events of a file one by one."""

    def __init__(self) -> None:
        self.devices: dict[str, TracedDevice] = {}
        self.processes: dict[str, Process] = {}
        self.is_kineto = False
        """Whether any event is of a category that torch.profiler writes."""
        self.events = 0
        self.untimed = 0
        """Events that figures need and that have no valid time."""
        self._codes: dict[tuple[Any, Any], int] = {}

    def take(self, event: Event) -> None:
        """One event; what no figure needs is forgotten. Raises nothing for values of odd types."""
        self.events += 1
        if event.get("ph") != "X":
            return
        category, name = event.get("cat"), event.get("name")
        try:
            code = self._codes.get((category, name))
        except TypeError:
            return
        if code is None:
            code = self._codes[category, name] = self._code(str(category or "").lower(), str(name or ""))
        if not code:
            return
        start, duration = nanoseconds(event.get("ts")), nanoseconds(event.get("dur", 0))
        if start is None or duration is None or not -_FAR < start <= start + duration < _FAR:
            self.untimed += 1
            return
        if code & _ON_DEVICE:
            self._on_device(event, code, str(name), start, start + duration)
        elif code & _DEVICE_MARK:
            device = self.devices.setdefault(str(event.get("pid")), TracedDevice())
            device.marks.append(_host_event(event, str(name), start, start + duration))
        else:
            self._on_host(event, code, str(name), start, start + duration)

    def _on_device(self, event: Event, code: int, name: str, start: int, end: int) -> None:
        pid = str(event.get("pid"))
        device = self.devices.get(pid)
        if device is None:
            device = self.devices[pid] = TracedDevice()
        if start < device.first:
            device.first = start
        if end > device.last:
            device.last = end
        if code & _COMPUTES:
            device.computing.extend((start, end))
        if code & _COPIES:
            device.copies.extend((start, end))
        if code & _COMMUNICATES:
            arguments = _arguments(event)
            device.communications.append(
                DeviceCommunication(
                    name, str(event.get("tid")), start, end, whole(arguments.get("correlation")),
                    whole(arguments.get("External id", arguments.get("external id"))), _kept(arguments),
                )
            )  # fmt: skip
            return
        total = device.kernels.get(name)
        if total is None:
            total = device.kernels[name] = [0, 0]
        total[0] += end - start
        total[1] += 1

    def _on_host(self, event: Event, code: int, name: str, start: int, end: int) -> None:
        pid, thread = str(event.get("pid")), str(event.get("tid"))
        process = self.processes.get(pid)
        if process is None:
            process = self.processes[pid] = Process()
        if code & _LAUNCH:
            correlation = whole(_arguments(event).get("correlation"))
            if correlation is not None:
                process.correlations.append(correlation)
                process.launched.append(start)
                process.launchers.append(process.names.setdefault(thread, len(process.names)))
            return
        if code & _OPERATOR:
            if start < process.first:
                process.first = start
            if end > process.last:
                process.last = end
            times, kinds = process.threads.setdefault(thread, (array("q"), array("b")))
            times.extend((start, end))
            kinds.append((1 if code & _OPERATOR_COMPUTES else 0) | (2 if code & _TRANSPORT else 0))
        if code & _CALL:
            process.calls.append(_host_event(event, name, start, end))
        if code & _TRANSPORT:
            process.transports.append(_host_event(event, name, start, end))
        if code & _STEP:
            number = step_number(name)
            process.steps.append((0 if number is None else number, (start, end)))
        if code & _PHASE:
            process.phases.append((name.removeprefix(PHASE), (start, end)))
        if code & _STYLED:
            process.styles.update(of for begin, of in _STYLES.items() if name.startswith(begin))

    def _code(self, category: str, name: str) -> int:
        """What to do with events of a category and name."""
        known = category in DEVICE_ACTIVITIES or category in HOST_OPERATORS or category in LAUNCHES
        self.is_kineto = self.is_kineto or known or category in OTHER_ACTIVITIES
        if category in DEVICE_ACTIVITIES:
            kind = _COPIES if category in COPIES else 0
            if is_communication(category, name):
                return kind | _COMMUNICATES
            return kind or _COMPUTES
        if category == "gpu_user_annotation":
            return _DEVICE_MARK if name.startswith(_CALLS) else 0
        if category in LAUNCHES:
            return _LAUNCH if "launch" in name.lower() or "memcpy" in name.lower() else 0
        if category not in HOST_OPERATORS:
            return 0
        code = _OPERATOR
        code |= _OPERATOR_COMPUTES if operator_computes(name) else 0
        code |= _TRANSPORT if is_transport(name) else 0
        code |= _CALL if name == "record_param_comms" or name.startswith(_CALLS) else 0
        code |= _STEP if step_number(name) is not None else 0
        code |= _PHASE if name.startswith(PHASE) else 0
        return code | (_STYLED if name.startswith(tuple(_STYLES)) else 0)


def _arguments(event: Event) -> dict[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _kept(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: arguments[key] for key in _KEPT if key in arguments}


def _host_event(event: Event, name: str, start: int, end: int) -> HostEvent:
    arguments = _arguments(event)
    external = whole(arguments.get("External id", arguments.get("external id")))
    return HostEvent(str(event.get("tid")), start, end, name, external, _kept(arguments))


def whole(value: Any) -> int | None:
    """A whole number that may be a text; None: it is none."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else None
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 19 else None
