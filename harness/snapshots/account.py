"""What a snapshot says of each device: the peak, what was alive at it and whose it was, and what lay unused.

The history of the allocator is walked back from what
is allocated at the end, so that it may begin anywhere. A block is allocated until its free is requested and
active until that completes: in between other streams hold it.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.resources import files
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from harness.bounds import MOST_SNAPSHOT_BYTES
from harness.errors import HarnessError
from harness.nested import grouped, totals
from harness.snapshots.reading import is_size, read_values, where, whole

Snapshot = dict[str, Any]


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file, pickle or JSON, also gzipped. Raises HarnessError for anything else."""
    return _checked(path, read_values(path, "snapshot", _GIVE, MOST_SNAPSHOT_BYTES))


def _checked(path: Path, found: Any) -> Snapshot:
    """The value, if it has the form of a snapshot. Raises HarnessError."""
    if isinstance(found, list) and all(
        isinstance(segment, dict) and "blocks" in segment for segment in found
    ):
        found = {"segments": found}  # `torch.cuda.memory_snapshot()`
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise _not_one(path, "has no list 'segments'")
    for segment in found["segments"]:
        blocks = segment.get("blocks") if isinstance(segment, dict) else None
        whole = isinstance(blocks, list) and all(
            isinstance(b, dict) and is_size(b.get("size")) and isinstance(b.get("state"), str) for b in blocks
        )
        if not whole or not is_size(segment.get("total_size")):
            raise _not_one(path, "has a segment without blocks or size")
    traces = found.get("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(t, list) for t in traces):
        raise _not_one(path, "has 'device_traces' that are no lists")
    for trace in traces:
        if not all(
            isinstance(e, dict) and isinstance(e.get("action"), str) and is_size(e.get("size", 0))
            for e in trace
        ):
            raise _not_one(path, "has a history whose entries name no action or no valid size")
    return found


_GIVE = "what torch.cuda.memory._dump_snapshot wrote, or that as JSON"


def _not_one(path: Path, what: str) -> HarnessError:
    return HarnessError(f"snapshot '{path}' {what}; give {_GIVE}")


ROUNDING = 512
"""The allocator rounds sizes up to these (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
MOST_GROUPS, MOST_MOMENTS = 20, 200
UNKNOWN, OLDER = "unknown", "before the recording"
CATEGORIES = (
    "weights", "gradients", "optimizer", "activations", "communication", "backward", "temporary", OLDER,
    UNKNOWN,
)  # fmt: skip
"""'communication': gathered weights and buckets; 'backward': of its pass, freed before what follows it."""
_RULES = tuple(
    (rule["category"], re.compile(rule["place"]))
    for rule in tomllib.loads(files(__package__).joinpath("places.toml").read_text("utf-8"))["rule"]
)
"""First match from the innermost frame outwards."""


@dataclass(kw_only=True)
class BlockGroup:
    """Blocks that were allocated at one place."""

    category: str
    bytes: int
    blocks: int
    where: str
    """The innermost frame outside of torch, or the innermost one; n/a without stacks."""


@dataclass(kw_only=True)
class DeviceAccount:
    """One device; bytes."""

    device: int
    peak_allocated_bytes: int
    peak_active_bytes: int
    """With blocks whose free waits for other streams."""
    peak_reserved_bytes: int
    has_history: bool
    """Whether the peak is of a recorded history; otherwise of the moment of the snapshot."""
    reserved_bytes: int
    allocated_bytes: int
    active_bytes: int
    at_peak: dict[str, int] = field(default_factory=dict)
    """Bytes alive at the peak by category."""
    groups: list[BlockGroup] = field(default_factory=list)
    """The same by place, largest first."""
    reserved_at_peak_bytes: int = 0
    held_for_streams_bytes: int = 0
    """At the end: freed, and waiting for other streams."""
    most_held_for_streams_bytes: int = 0
    free_in_used_segments_bytes: int = 0
    """Unused parts of segments that hold something: they cannot be returned to the device."""
    largest_free_block_bytes: int = 0
    free_blocks: int = 0
    over_time: list[dict[str, Any]] = field(default_factory=list)
    """Bytes by category at moments of the history, the peak among them: `event`, `seconds` (None where the
    history has no times), `is_peak`, `bytes`."""
    out_of_memory: list[dict[str, int | None]] = field(default_factory=list)
    """Requests that failed: their size and what the device had free."""

    @property
    def fragmentation_share(self) -> float | None:
        """Share of the reserved memory that lies unused in segments that hold something."""
        return self.free_in_used_segments_bytes / self.reserved_bytes if self.reserved_bytes else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"fragmentation_share": self.fragmentation_share}


@dataclass
class _Live:
    size: int
    frames: Sequence[Any]
    born: int
    """Index in the history; -1: before it."""


def accounts(snapshot: Snapshot) -> list[DeviceAccount]:
    """Every device that holds memory or has a history."""
    segments = [s for s in snapshot["segments"] if isinstance(s, dict)]
    traces: list[list[dict[str, Any]]] = snapshot.get("device_traces") or []
    devices = {whole(segment.get("device")) for segment in segments}
    devices |= {number for number, trace in enumerate(traces) if trace}
    return [
        _account(
            number,
            [s for s in segments if whole(s.get("device")) == number],
            traces[number] if number < len(traces) else [],
        )
        for number in sorted(devices)
    ]


def _account(device: int, segments: list[dict[str, Any]], trace: list[dict[str, Any]]) -> DeviceAccount:
    blocks = [block for segment in segments for block in _addressed(segment)]
    allocated = {
        a: _Live(b["size"], b.get("frames") or (), -1) for a, b in blocks if b["state"] == "active_allocated"
    }
    held = sum(b["size"] for _, b in blocks if b["state"] in ("active_awaiting_free", "active_pending_free"))
    reserved = sum(segment["total_size"] for segment in segments)
    now = sum(live.size for live in allocated.values())
    account = DeviceAccount(
        device=device, peak_allocated_bytes=now, peak_active_bytes=now + held, peak_reserved_bytes=reserved,
        has_history=bool(trace), reserved_bytes=reserved, allocated_bytes=now, active_bytes=now + held,
        reserved_at_peak_bytes=reserved, held_for_streams_bytes=held, most_held_for_streams_bytes=held,
    )  # fmt: skip
    account.out_of_memory = [
        {"bytes": whole(e.get("size")), "device_free_bytes": left if is_size(left) else None}
        for e in trace
        if e["action"] == "oom"
        for left in [e.get("device_free")]
    ]
    used = [s for s in segments if any(b["state"] != "inactive" for b in s["blocks"])]
    free = [b["size"] for s in used for b in s["blocks"] if b["state"] == "inactive"]
    account.free_in_used_segments_bytes = sum(free)
    account.free_blocks = len(free)
    account.largest_free_block_bytes = max(
        (b["size"] for s in segments for b in s["blocks"] if b["state"] == "inactive"), default=0
    )
    history = _History(trace, allocated)
    peak = history.find_peaks(account)
    account.over_time = history.over_time(peak) if trace else []
    groups = grouped(
        ((history.category(block), where(block.frames)), block.size) for block in history.alive_after(peak)
    )
    found = [BlockGroup(category=c, bytes=sum(of), blocks=len(of), where=w) for (c, w), of in groups.items()]
    by_category = sorted(found, key=lambda group: CATEGORIES.index(group.category))
    account.at_peak = totals((group.category, group.bytes) for group in by_category)
    account.groups = sorted(found, key=lambda group: (-group.bytes, group.where))[:MOST_GROUPS]
    return account


class _History:
    """The allocator's events of one device, walked back from the end."""

    def __init__(self, trace: list[dict[str, Any]], allocated: dict[int, _Live]) -> None:
        self._trace = trace
        self._end = allocated
        self._births: dict[int, int] = {}
        """By index of a free: the index of the allocation that it ends."""
        self._deaths: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, event in enumerate(trace):
            address = whole(event.get("addr"))
            if event["action"] == "alloc":
                last[address] = index
            elif event["action"] == "free_requested" and address in last:
                self._births[index] = last.pop(address)
                self._deaths[self._births[index]] = index
        for address, live in allocated.items():
            if address in last:
                live.born = last[address]
                live.frames = live.frames or trace[live.born].get("frames") or ()
        # Most frees complete at once: nothing was held for another stream.
        self._at_once = {
            index + ahead
            for index, (event, following) in enumerate(pairwise(trace))
            if event["action"] == "free_requested" and following["action"] == "free_completed"
            if event.get("addr") == following.get("addr")
            for ahead in (0, 1)
        }
        self._stacks = [_stack(e.get("frames")) if e["action"] == "alloc" else () for e in trace]
        """By event, the categories of an allocation's frames, innermost first."""
        self._has_passes = any("backward" in found for found in self._stacks)
        self._after_backward = [
            index for index, (event, found) in enumerate(zip(trace, self._stacks, strict=True))
            if event["action"] == "alloc" and event.get("frames") and not _PASS.intersection(found)
        ]  # fmt: skip
        """Allocations by which a backward pass that had begun before is over."""
        self._after_update = [index for index in self._after_backward if "update" not in self._stacks[index]]
        self._last_bucket = max((n for n, found in enumerate(self._stacks) if "bucket" in found), default=-1)
        self._weight_sizes = {
            self._size(index, whole(event.get("size")))
            for index, (event, found) in enumerate(zip(trace, self._stacks, strict=True))
            if found and found[0] in ("weights", "optimizer")
        }
        self._weight_sizes |= {
            b.size for b in allocated.values()
            if (trace and b.born < 0 and not b.frames) or _stack(b.frames)[:1] == ("weights",)
        }  # fmt: skip

    def find_peaks(self, account: DeviceAccount) -> int:
        """Set the largest sums, from those at its end; returns after how many events the peak stands."""
        allocated, held = account.allocated_bytes, account.held_for_streams_bytes
        reserved, at = account.reserved_bytes, len(self._trace)
        for index in range(len(self._trace) - 1, -1, -1):
            event = self._trace[index]
            size, action = whole(event.get("size")), event["action"]
            rounded = self._size(index, size)
            if action == "alloc":
                allocated -= rounded
            elif action == "free_requested":
                allocated += rounded
                held -= 0 if index in self._at_once else rounded
            elif action == "free_completed":
                held += 0 if index in self._at_once else rounded
            elif action in ("segment_alloc", "segment_map"):
                reserved -= size
            elif action in ("segment_free", "segment_unmap"):
                reserved += size
            if allocated > account.peak_allocated_bytes:
                at, account.peak_allocated_bytes, account.reserved_at_peak_bytes = index, allocated, reserved
            account.peak_active_bytes = max(account.peak_active_bytes, allocated + max(held, 0))
            account.peak_reserved_bytes = max(account.peak_reserved_bytes, reserved)
            account.most_held_for_streams_bytes = max(account.most_held_for_streams_bytes, held)
        return at

    def alive_after(self, count: int) -> list[_Live]:
        alive = dict(self._end)
        for index in range(len(self._trace) - 1, count - 1, -1):
            address = whole(self._trace[index].get("addr"))
            if self._trace[index]["action"] == "alloc":
                alive.pop(address, None)
            elif self._trace[index]["action"] == "free_requested":
                alive[address] = self._block(index)
        return list(alive.values())

    def _block(self, index: int) -> _Live:
        """What an event allocates or frees."""
        born = index if self._trace[index]["action"] == "alloc" else self._births.get(index, -1)
        frames = self._trace[born].get("frames") or () if born >= 0 else ()
        return _Live(self._size(index, whole(self._trace[index].get("size"))), frames, born)

    def over_time(self, peak: int) -> list[dict[str, Any]]:
        """What is allocated after every so many events, and after those to the peak."""
        times = [whole(event.get("time_us")) for event in self._trace]
        timed = times[0] > 0 and times == sorted(times) and times[-1] > times[0]
        shown = {*range(0, len(times) + 1, -(-len(times) // MOST_MOMENTS)), peak, len(times)}
        allocated: Counter[str] = Counter()
        for block in self.alive_after(0):
            allocated[self.category(block)] += block.size
        found: list[dict[str, Any]] = []
        for index in range(len(times) + 1):
            if index in shown:
                seconds = (times[max(0, index - 1)] - times[0]) / 1e6 if timed else None
                kinds = {kind: allocated[kind] for kind in CATEGORIES if allocated[kind]}
                found.append({"event": index, "seconds": seconds, "is_peak": index == peak, "bytes": kinds})
            if index < len(times) and (action := self._trace[index]["action"]) in ("alloc", "free_requested"):
                block = self._block(index)
                allocated[self.category(block)] += block.size if action == "alloc" else -block.size
        return found

    def category(self, block: _Live) -> str:
        """Whose a block is, as far as its stack and life prove it."""
        found = _stack(block.frames)
        category = found[0] if found else UNKNOWN
        death = self._deaths.get(block.born)
        has_size = block.size in self._weight_sizes
        if category == "bucket":
            return "gradients" if has_size and block.born == self._last_bucket else "communication"
        if category == "update":
            is_over = block.born >= 0 and self._ends_before(self._after_update, block.born)
            return "temporary" if is_over else "optimizer"
        if category == "temporary" and block.born >= 0 and death is None:
            return UNKNOWN
        if block.born < 0:
            return OLDER if self._trace and not block.frames else category
        # A gradient outlives its backward pass. Threads of autograd have no Python stack: a stack of a pass,
        # or a size that a weight has, tells them from others.
        is_bare = not block.frames and (self._has_passes or has_size)
        if not is_bare and (category not in ("backward", "communication") or "backward" not in found):
            return category
        if self._ends_before(self._after_backward, block.born):
            return "backward" if is_bare else category
        is_over = bisect_right(self._after_backward, block.born) < len(self._after_backward)
        return "gradients" if is_over or has_size else category

    def _ends_before(self, marks: list[int], born: int) -> bool:
        """Whether what was allocated at an event is freed before the next of the marks."""
        death, later = self._deaths.get(born), bisect_right(marks, born)
        return death is not None and (later == len(marks) or death < marks[later])

    def _size(self, index: int, size: int) -> int:
        """The size of a block: what is known of those alive at the end, otherwise the request rounded up."""
        address = whole(self._trace[index].get("addr"))
        live = self._end.get(address)
        if live is not None and live.born == index:
            return live.size
        return -(-size // ROUNDING) * ROUNDING


_PASS = {"backward", "communication", "recomputed"}
"""What a backward pass consists of."""


def _stack(frames: Any) -> tuple[str, ...]:
    """Categories of a stack's frames, innermost first."""
    shown = frames if isinstance(frames, list | tuple) else ()
    texts = (f"{f.get('filename', '')}:{f.get('name', '')}" for f in shown if isinstance(f, dict))
    return tuple(chain.from_iterable(map(_fitting, texts)))


@lru_cache(maxsize=2**16)
def _fitting(text: str) -> tuple[str, ...]:
    """Categories whose rules a frame, 'file:function', meets."""
    return tuple(category for category, pattern in _RULES if pattern.search(text))


def _addressed(segment: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Blocks with their addresses; old snapshots give that of the segment alone."""
    address = whole(segment.get("address"))
    for block in segment["blocks"]:
        own = block.get("address")
        yield (own if isinstance(own, int) else address), block
        address += block["size"]
