"""A process of a trace and its collectives: what was called, how much it moved in which group, for how long.

Facts come from `record_param_comms`, the `nccl:*` launch, the arguments that NCCL's kernels carry and the
shapes of the operator. A kernel's name is none of them: NCCL 2.17 runs all-to-all under the name of SendRecv.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

from harness.bounds import MOST_RANKS
from harness.forms.layout import element_bytes
from harness.forms.terms import RING_PASSES
from harness.nested import grouped
from harness.traces.device import (
    ALWAYS,
    COMMUNICATES,
    DEVICE_ACTIVITIES,
    NEVER,
    DeviceEvents,
    Interval,
    Kind,
    Launches,
    Named,
    named,
)
from harness.traces.scanning import (
    HOST_OPERATORS,
    INPUT_AT,
    LAUNCHES,
    OPERATORS,
    OTHER_ACTIVITIES,
    PHASE,
    TRANSPORTS,
    Event,
    Operator,
    arguments_of,
    collective_of,
    dtype_of,
    nanoseconds,
    operator_computes,
    step_number,
)

# What to do with an event, by category and name.
_OPERATOR, _TRANSPORT, _CALL, _LAUNCH, _STEP, _PHASE, _DEVICE_MARK = 8, 16, 32, 64, 128, 256, 512
_OPERATOR_COMPUTES, _STYLED = 1024, 2048
_ON_DEVICE = -1
"""And below: of the name of that index, counted down."""
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
    kind: Kind


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

    events: DeviceEvents
    communications: list[DeviceCommunication] = field(default_factory=list)
    marks: list[HostEvent] = field(default_factory=list)
    """Annotations of collectives as they lie on the device."""
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
    launches: Launches = field(default_factory=Launches)
    launchers: array[int] = field(default_factory=lambda: array("q"))
    """Index in `names` of the thread of each launch."""
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
        self._names: list[Named] = []
        self._codes: dict[tuple[Any, Any], int] = {}

    def take(self, event: Event) -> None:
        """One event; what no figure needs is forgotten. Raises nothing for values of odd types."""
        self.events += 1
        kind, category, name, pid, thread, start, duration, arguments = event
        if kind != "X":
            return
        try:
            code = self._codes.get((category, name))
        except TypeError:
            return
        if code is None:
            code = self._codes[category, name] = self._code(str(category or "").lower(), str(name or ""))
        if not code:
            return
        start, duration = nanoseconds(start), nanoseconds(duration)
        if start is None or duration is None or not NEVER < start <= start + duration < ALWAYS:
            self.untimed += 1
            return
        end, pid, thread = start + duration, str(pid), str(thread)
        if code > 0 and not code & _DEVICE_MARK:
            self._on_host(pid, thread, code, str(name), start, end, arguments)
            return
        device = self.devices.get(pid)
        if device is None:
            device = self.devices[pid] = TracedDevice(DeviceEvents(self._names))
        if code > 0:
            device.marks.append(_host_event(thread, str(name), start, end, arguments))
        else:
            self._on_device(device, thread, _ON_DEVICE - code, start, end, arguments)

    def _on_device(
        self, device: TracedDevice, thread: str, index: int, start: int, end: int, arguments: Any
    ) -> None:  # fmt: skip
        if start < device.first:
            device.first = start
        if end > device.last:
            device.last = end
        correlation, events = _correlation(arguments), device.events
        events.begins.append(start)
        events.ends.append(end)
        events.named.append(index)
        events.correlations.append(-1 if correlation is None else correlation)
        name, kind, code = self._names[index]
        if code & COMMUNICATES:
            host = _host_event(thread, name, start, end, arguments)
            device.communications.append(
                DeviceCommunication(
                    name, thread, start, end, correlation, host.external, host.arguments, kind
                )
            )  # fmt: skip

    def _on_host(
        self, pid: str, thread: str, code: int, name: str, start: int, end: int, arguments: Any
    ) -> None:
        process = self.processes.get(pid)
        if process is None:
            process = self.processes[pid] = Process()
        if code & _LAUNCH:
            correlation = _correlation(arguments)
            if correlation is not None:
                process.launches.correlations.append(correlation)
                process.launches.begins.append(start)
                process.launchers.append(process.names.setdefault(thread, len(process.names)))
            return
        if code & _OPERATOR:
            if start < process.first:
                process.first = start
            if end > process.last:
                process.last = end
            of_thread = process.threads.get(thread)
            if of_thread is None:
                of_thread = process.threads[thread] = array("q"), array("b")
            of_thread[0].extend((start, end))
            of_thread[1].append((1 if code & _OPERATOR_COMPUTES else 0) | (2 if code & _TRANSPORT else 0))
            if code & ~(_OPERATOR | _OPERATOR_COMPUTES) == 0:
                return
        if code & _CALL:
            process.calls.append(_host_event(thread, name, start, end, arguments))
        if code & _TRANSPORT:
            process.transports.append(_host_event(thread, name, start, end, arguments))
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
            self._names.append(named(category, name))
            return _ON_DEVICE - (len(self._names) - 1)
        if category == "gpu_user_annotation":
            return _DEVICE_MARK if name.startswith(_CALLS) else 0
        if category in LAUNCHES:
            return _LAUNCH if re.search("launch|memcpy|memset", name, re.IGNORECASE) else 0
        if category not in HOST_OPERATORS:
            return 0
        code = _OPERATOR
        code |= _OPERATOR_COMPUTES if operator_computes(name) else 0
        code |= _TRANSPORT if name.startswith(TRANSPORTS) else 0
        code |= _CALL if name == "record_param_comms" or name.startswith(_CALLS) else 0
        code |= _STEP if step_number(name) is not None else 0
        code |= _PHASE if name.startswith(PHASE) else 0
        return code | (_STYLED if name.startswith(tuple(_STYLES)) else 0)


_CORRELATION = re.compile(r'"correlation"\s*:\s*"?(\d{1,18})(?!\d)')


def _correlation(arguments: Any) -> int | None:
    if isinstance(arguments, str):
        found = _CORRELATION.search(arguments)
        return int(found[1]) if found else None
    return whole(arguments_of(arguments).get("correlation"))


def _host_event(thread: str, name: str, start: int, end: int, given: Any) -> HostEvent:
    arguments = arguments_of(given)
    external = whole(arguments.get("External id", arguments.get("external id")))
    kept = {key: arguments[key] for key in _KEPT if key in arguments}
    return HostEvent(thread, start, end, name, external, kept)


def whole(value: Any) -> int | None:
    """A whole number that may be a text; None: it is none."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else None
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 19 else None


RECORD = "record_param_comms"
_RANKS = re.compile(r"\[\s*\d+(?:\s*,\s*\d+)*\s*\]")


class Group(NamedTuple):
    """A process group, as far as the trace tells."""

    name: str | None = None
    size: int | None = None
    ranks: tuple[int, ...] | None = None


@dataclass
class Call:
    """One collective of one rank; what the trace does not tell is None."""

    operation: str | None
    dtype: str | None = None
    elements: int | None = None
    """Of the complete tensor: what is gathered, or is to be scattered."""
    group: Group = field(default_factory=Group)
    thread: str = ""
    start: int = 0
    """When the host called it; of a kernel without a call, when it began."""
    end: int = 0
    own_elements: int | None = None
    """Of this rank's input, where shapes tell."""
    externals: set[int] = field(default_factory=set)
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of its kernels, or of the transport's work."""
    step: int | None = None
    """The annotated step in which the host called it."""
    kernel: str | None = None
    """Name of a kernel whose collective is unknown."""
    kind: str | None = None
    """What that kernel's name says it does."""

    @property
    def payload_bytes(self) -> int | None:
        """Bytes of the complete tensor."""
        if self.operation == "barrier":
            return 0
        width = element_bytes(self.dtype) if self.dtype else None
        return None if self.elements is None or width is None else self.elements * width

    @property
    def seconds(self) -> float | None:
        """How long it ran, waiting for other ranks included."""
        spent, reached = 0, NEVER  # a union of arrays takes longer than these few
        for begin, end in sorted(self.runs):
            spent += max(0, end - max(begin, reached))
            reached = max(reached, end)
        return spent / 1e9 if self.runs else None

    @property
    def bus_bytes_per_second(self) -> float | None:
        """As nccl-tests defines it; None without payload, duration or size of the group."""
        payload, seconds, size = self.payload_bytes, self.seconds, self.group.size
        if not payload or not seconds or not size or self.operation is None:
            return None
        if self.operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            return payload / seconds * RING_PASSES[self.operation] * (size - 1) / size
        return payload / seconds


class GroupsOfJob:
    """The process groups that the file lists, which name those of calls without arguments."""

    def __init__(self, distributed: dict[str, Any]) -> None:
        self._groups: list[Group] = []
        configured = distributed.get("pg_config")
        for entry in configured if isinstance(configured, list) else []:
            if isinstance(entry, dict):
                ranks = entry.get("ranks")
                whole = isinstance(ranks, list) and bool(ranks) and all(isinstance(r, int) for r in ranks)
                self._groups.append(
                    Group(
                        str(entry.get("pg_name")), _size(entry.get("pg_size")),
                        tuple(ranks) if whole and isinstance(ranks, list) else None,
                    )
                )  # fmt: skip
        listed = distributed.get("pg_count")
        self._complete = not isinstance(listed, int) or listed == len(self._groups)

    def only(self, size: int | None) -> Group:
        """The group of a size if there is one only, by its ranks; otherwise what is known of it."""
        fitting = [g for g in self._groups if size is None or g.size == size]
        if not self._complete or not fitting or any(g.ranks is None for g in fitting):
            return Group(size=size)
        if len({(g.ranks, g.size) for g in fitting}) > 1:
            return Group(size=size)
        return fitting[0] if len(fitting) == 1 else Group(None, fitting[0].size, fitting[0].ranks)


def calls_of(process: Process, device: TracedDevice | None, groups: GroupsOfJob) -> list[Call]:
    """Every collective of a rank in the order of its calls, with what ran for it."""
    calls = [call for tree in _trees(process.calls) for call in _calls(tree, groups)]
    calls.sort(key=lambda call: call.start)
    if device is not None and device.communications:
        calls += _match_kernels(calls, process, device, groups)
        calls.sort(key=lambda call: call.runs[0][0] if call.runs else call.start)
    elif process.transports:
        _match_transports(calls, process.transports)
    return calls


@dataclass
class _Node:
    event: HostEvent
    inner: list[_Node] = field(default_factory=list)


def _trees(events: Iterable[HostEvent]) -> Iterator[_Node]:
    """Events of each thread within those that hold them."""
    threads = grouped((event.thread, event) for event in events)
    for of_thread in threads.values():
        roots: list[_Node] = []
        open_ones: list[_Node] = []
        for event in sorted(of_thread, key=lambda e: (e.start, -e.end)):
            while open_ones and event.start >= open_ones[-1].event.end:
                open_ones.pop()
            node = _Node(event)
            (open_ones[-1].inner if open_ones else roots).append(node)
            open_ones.append(node)
        yield from roots


def _calls(node: _Node, groups: GroupsOfJob) -> list[Call]:
    """The collectives of an event and of what it holds, each once."""
    event = node.event
    inner = [call for held in node.inner for call in _calls(held, groups)]
    if event.name == RECORD:
        named = event.arguments.get("Collective name")
        operation = collective_of(str(named)) if named is not None else None
        found = inner
        if operation is not None and len(inner) < 2:
            own = of_arguments(event.arguments, operation, groups)
            own.thread, own.start, own.end = event.thread, event.start, event.end
            found = [_joined(own, inner[0]) if inner else own]
    elif len(inner) > 1:
        found = inner
    else:
        operation = collective_of(event.name)
        if operation is None or event.name.endswith("wait_tensor"):
            found = inner
        else:
            own = _shaped(event, operation, groups)
            found = [_joined(inner[0], own) if inner else own]
    for call in found:
        call.start, call.end = event.start, max(event.end, call.end)
        if event.external is not None and len(found) == 1:
            call.externals.add(event.external)
    return found


def of_arguments(arguments: dict[str, Any], operation: str, groups: GroupsOfJob) -> Call:
    """The call that arguments of NCCL describe: those of `record_param_comms`, or of a kernel."""
    size = _size(arguments.get("Group size"))
    given, taken = _count(arguments.get("In msg nelems")), _count(arguments.get("Out msg nelems"))
    elements = taken if operation in ("all_gather", "recv", "scatter") else given
    if elements in (None, 0):
        elements = given or taken if (given or taken) is not None else elements
    if operation in ("gather", "scatter"):
        elements = None if elements is None or size is None else elements * size
    dtype = arguments.get("dtype")
    name = arguments.get("Process Group Name")
    group = groups.only(size)
    if name is not None or size is not None:
        group = Group(
            None if name is None else str(name), size or group.size, _ranks(arguments, size) or group.ranks
        )
    return Call(
        operation, dtype_of(str(dtype)) if dtype is not None else None, elements, group, own_elements=given
    )


def _shaped(event: HostEvent, operation: str, groups: GroupsOfJob) -> Call:
    """The call that the shapes of an operator or launch describe."""
    dims, types = event.arguments.get("Input Dims"), event.arguments.get("Input type")
    shapes = _Shapes(dims, types)
    scope, _, bare = event.name.rpartition(":")
    call = Call(operation, thread=event.thread, start=event.start, end=event.end)
    if scope.startswith("c10d") and bare in OPERATORS:
        at = OPERATORS[bare][1]
        call.elements, call.dtype = shapes.elements(at), shapes.dtype(at)
        own_at = INPUT_AT.get(bare, at)
        call.own_elements = shapes.elements(own_at)
        call.dtype = call.dtype or shapes.dtype(own_at)
        size = None
        if (operation in ("all_gather", "reduce_scatter") and own_at != at) or operation == "reduce_scatter":
            piece = shapes.elements(own_at if operation == "all_gather" else 0)
            size = call.elements // piece if call.elements and piece and call.elements % piece == 0 else None
        call.group = groups.only(size)
        if operation in ("gather", "scatter"):
            call.elements = _times(call.elements, call.group.size)
        elif operation == "all_gather" and call.elements is None:
            call.elements = _times(call.own_elements, call.group.size)
        return call
    # A launch or a transport tells this rank's input.
    call.group = groups.only(None)
    call.own_elements, call.dtype = shapes.all_elements(), shapes.dtype(0)
    pieces = operation in ("all_gather", "gather", "scatter")
    call.elements = _times(call.own_elements, call.group.size) if pieces else call.own_elements
    return call


def _joined(first: Call, second: Call) -> Call:
    """One call of what two events say of it; the first is believed."""
    for name in ("operation", "dtype", "elements", "own_elements", "thread"):
        known = getattr(first, name)
        setattr(first, name, getattr(second, name) if known in (None, "") else known)
    own, other = first.group, second.group
    first.group = Group(own.name or other.name, own.size or other.size, own.ranks or other.ranks)
    if first.elements is None and first.operation in ("all_gather", "gather", "scatter"):
        first.elements = _times(first.own_elements, first.group.size)
    first.end = max(first.end, second.end)
    first.externals |= second.externals
    return first


class _Shapes:
    """Shapes and types of an operator's arguments."""

    def __init__(self, dims: Any, types: Any) -> None:
        self._dims = dims if isinstance(dims, list) else []
        self._types = types if isinstance(types, list) else []

    def elements(self, at: int) -> int | None:
        """Elements of an argument, a tensor or a list of them; None: not recorded."""
        if at >= len(self._dims):
            return None
        dims, kind = self._dims[at], self._types[at] if at < len(self._types) else ""
        if not isinstance(dims, list):
            return None
        if not dims:
            return 1 if dtype_of(str(kind)) else None
        if all(isinstance(d, int) for d in dims):
            return prod(dims)
        if all(isinstance(d, list) and all(isinstance(n, int) for n in d) for d in dims):
            return sum(prod(d) for d in dims)
        return None

    def all_elements(self) -> int | None:
        """Elements of all arguments together: a launch or a transport lists tensors one by one."""
        known = [n for at in range(len(self._dims)) if (n := self.elements(at)) is not None]
        return sum(known) if known else None

    def dtype(self, at: int) -> str | None:
        """Dtype of an argument; of a list of tensors it is not recorded."""
        return dtype_of(str(self._types[at])) if at < len(self._types) else None


def _match_kernels(
    calls: list[Call], process: Process, device: TracedDevice, groups: GroupsOfJob
) -> list[Call]:
    """Give each kernel to the call that launched it; returns calls that only kernels tell of."""
    names, wanted = list(process.names), {c.correlation for c in device.communications}
    launched = zip(process.launches.correlations, process.launches.begins, process.launchers, strict=True)
    launches: dict[int | None, tuple[str, int]] = {
        one: (names[thread], start) for one, start, thread in launched if one in wanted
    }
    threads = _Latest(calls)
    externals = {external: call for call in calls for external in call.externals}
    marks = _Latest(sorted(device.marks, key=lambda mark: mark.start))
    left: list[DeviceCommunication] = []
    for event in device.communications:
        launch = launches.get(event.correlation)
        call = threads.at(*launch, until=launch[1]) if launch is not None else None
        if call is None and event.external is not None and event.external != event.correlation:
            call = externals.get(event.external)
        if call is None:
            left.append(event)
        else:
            call.runs.append((event.start, event.end))
            _joined(call, _of_kernel(event, call.operation, groups))
    return _without_launch(left, calls, marks, groups)


def _without_launch(
    left: list[DeviceCommunication], calls: list[Call], marks: _Latest[HostEvent], groups: GroupsOfJob
) -> list[Call]:
    """Calls of kernels whose launch is not in the trace; a call that ran nothing yet takes its kernel."""
    idle = grouped(((call.operation, call.elements), call) for call in reversed(calls) if not call.runs)
    found = []
    for event in sorted(left, key=lambda e: e.start):
        named = event.arguments.get("Collective name")
        if named is None and (mark := marks.at(event.stream, event.start, event.end)) is not None:
            named = mark.name
        operation = collective_of(str(named)) if named is not None else None
        call = _of_kernel(event, operation, groups)
        waiting = idle.get((call.operation, call.elements)) if operation is not None else None
        if waiting and waiting[-1].start <= event.start:
            waiting.pop().runs.append((event.start, event.end))
            continue
        call.thread, call.start, call.end = event.stream, event.start, event.end
        call.runs = [(event.start, event.end)]
        if operation is None:
            call.kernel, call.kind = event.name, event.kind.operation
        found.append(call)
    return found


def _of_kernel(event: DeviceCommunication, operation: str | None, groups: GroupsOfJob) -> Call:
    if operation is None or "Collective name" not in event.arguments:
        return Call(operation)
    return of_arguments(event.arguments, operation, groups)


Timed = TypeVar("Timed", Call, HostEvent)


class _Latest(Generic[Timed]):
    """Finds what began last on a thread or stream at a time, among what was recorded there."""

    def __init__(self, timed: Iterable[Timed]) -> None:
        self._on: dict[str, list[Timed]] = grouped((one.thread, one) for one in timed)
        self._starts = {place: [one.start for one in of] for place, of in self._on.items()}

    def at(self, place: str, time: int, until: int) -> Timed | None:
        """What began at `time` or before and lasts until then; None: nothing does."""
        index = bisect_right(self._starts.get(place, []), time) - 1
        return self._on[place][index] if index >= 0 and self._on[place][index].end >= until else None


def _match_transports(calls: Sequence[Call], transports: Sequence[HostEvent]) -> None:
    """Give each work of a transport to its call: the earliest of the kind and size that waits for one.

    gloo implements reduce-scatter as all-reduce, and names it so.
    """
    waiting = list(calls)
    for event in sorted(transports, key=lambda e: e.start):
        operation = collective_of(event.name)
        shapes = _Shapes(event.arguments.get("Input Dims"), event.arguments.get("Input type"))
        elements = shapes.all_elements()
        for index, call in enumerate(waiting):
            if call.start > event.start:
                break
            alike = call.operation in (
                operation,
                "reduce_scatter" if operation == "all_reduce" else operation,
            )
            sizes = {elements, call.own_elements, call.elements}
            if alike and (None in sizes or elements in (call.own_elements, call.elements)):
                call.runs.append((event.start, event.end))
                call.dtype = call.dtype or shapes.dtype(0)
                if call.elements is None:
                    pieces = call.operation in ("gather", "scatter", "all_gather")
                    call.elements = _times(elements, call.group.size) if pieces else elements
                del waiting[index]
                break


def _ranks(arguments: dict[str, Any], size: int | None) -> tuple[int, ...] | None:
    """Ranks of a group; torch cuts long lists, but tells first rank and stride."""
    first, stride = _count(arguments.get("Global rank start")), _count(arguments.get("Global rank stride"))
    return _listed(str(arguments.get("Process Group Ranks", "")).strip(), size, first, stride)


@lru_cache(maxsize=4096)
def _listed(text: str, size: int | None, first: int | None, stride: int | None) -> tuple[int, ...] | None:
    if _RANKS.fullmatch(text):
        return tuple(int(rank) for rank in text[1:-1].split(","))
    if size and first is not None and stride:
        return tuple(range(first, first + size * stride, stride))
    return None


def _count(value: Any) -> int | None:
    number = whole(value)
    return None if number is None or number < 0 else number


def _size(value: Any) -> int | None:
    size = _count(value)
    return size if size and size <= MOST_RANKS else None


def _times(elements: int | None, size: int | None) -> int | None:
    return None if elements is None or size is None else elements * size
