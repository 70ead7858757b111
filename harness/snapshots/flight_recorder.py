"""torch's flight recorders: which collective each rank waits in, and which rank the others wait for.

A dump has the latest collectives of one process, of NCCL or gloo (versions 2.1 to 2.10 of the format,
torch/csrc/distributed/c10d/FlightRecorderDetail.hpp). Loads no torch.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from harness.errors import HarnessError
from harness.nested import grouped
from harness.snapshots.reading import read_values, where, whole

MOST_DUMP_BYTES = 2**28
GIVE = "what torch's flight recorder wrote (TORCH_NCCL_DUMP_ON_TIMEOUT, or _dump_nccl_trace), pickle or JSON"
KEPT = "rank-*.flight-recorder.json"
"""In the folder of a run that was stuck."""
_RANK = re.compile(r"rank[-_]?(\d+)|(\d+)(?=(?:\.[a-z]\w*)*$)", re.IGNORECASE)
"""In the name of a file: 'nccl_trace_rank_3', 'rank-00003.flight-recorder.json', 'dump3.json.gz'."""
_UNEVEN_INPUTS = re.compile(r"all_?to_?all|(?<!reduce_)scatter|_v\b|coalesced", re.IGNORECASE)
_UNEVEN_OUTPUTS = re.compile(r"all_?to_?all|(?<!all_)(?<!all)gather|_v\b|coalesced", re.IGNORECASE)
"""Collectives whose ranks may give, or get, different sizes."""
_PAIR = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})")
DEFAULT = "default_pg"
"""Description of the group of all ranks."""
MOST_SIDES = 64
"""Of a tensor; torch has as many."""
SLOW_SECONDS = 0.5
"""Less cannot be told: a watchdog looks every 0.1 s whether a collective has ended."""
SLOW_SHARE, SLOW_CALLS = 0.8, 5
MOST_PLACES = 4


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One collective that a rank has begun."""

    group: str
    """Name, description, and ranks where they are known: groups of other ranks may have the same name."""
    is_p2p: bool
    number: int
    """Of its kind in the group, from 1."""
    operation: str
    sizes: tuple[str, str]
    """Of inputs and outputs: shapes, and data types."""
    elements: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[tuple[str, ...], tuple[str, ...]]
    created: int
    completed: int | None
    """ns of the rank's clock; None: not completed, or the transport does not say."""
    retired: bool
    frames: tuple[Mapping[str, Any], ...]

    @property
    def key(self) -> tuple[str, bool, int]:
        return self.group, self.is_p2p, self.number

    @property
    def size(self) -> str:
        """What the rank gives, or gets where it gives nothing: '2x4 Float'."""
        return self.sizes[0] or self.sizes[1]

    @property
    def items(self) -> int:
        """Elements that the rank gives, or gets where it gives nothing."""
        return sum(self.elements[0] or self.elements[1])

    @property
    def words(self) -> str:
        """'nccl all_reduce number 4 of group 0, default_pg (8 Float)'."""
        size = f" ({self.size})" if self.size else ""
        return f"{self.operation} number {self.number} of group {self.group}{size}"

    @property
    def where(self) -> str:
        return where(self.frames)

    @property
    def stack(self) -> tuple[str, ...]:
        return _stack(self.frames)


@dataclass(frozen=True)
class Dump:
    """Of one rank."""

    rank: int
    entries: tuple[Entry, ...]
    members: Mapping[str, frozenset[int]]
    """Ranks of its groups, as far as it says."""

    @cached_property
    def at(self) -> dict[tuple[str, bool, int], list[Entry]]:
        """Entries by group, kind and number; a coalesced one has several."""
        found: dict[tuple[str, bool, int], list[Entry]] = defaultdict(list)
        for entry in self.entries:
            found[entry.key].append(entry)
        return found

    @cached_property
    def last(self) -> Counter[tuple[str, bool]]:
        """The highest number of each group and kind."""
        found: Counter[tuple[str, bool]] = Counter()
        for entry in self.entries:
            found[entry.group, entry.is_p2p] = max(found[entry.group, entry.is_p2p], entry.number)
        return found

    @cached_property
    def open(self) -> list[Entry]:
        """Entries that have not ended, oldest first.

        ProcessGroupNCCL notes the operations of a coalesced batch without work that could end them; the batch
        itself ends (torch 2.13, ProcessGroupNCCL.cpp, endCoalescing). Operations of a group end in order, so
        that what one that has ended follows has ended too. Retired without having completed: timed out. gloo
        notes no completion.
        """
        waiting: dict[tuple[str, bool], list[Entry]] = defaultdict(list)
        notes_completion = any(entry.completed for entry in self.entries)
        for entry in self.entries:
            queue = waiting[entry.group, entry.is_p2p]
            if entry.retired and (entry.completed or not notes_completion):
                queue.clear()
            else:
                queue.append(entry)
        return sorted((e for queue in waiting.values() for e in queue), key=lambda e: e.created)


def dump_of(document: Any, rank: int) -> Dump:
    """Raises ValueError where it has not the form of a dump."""
    if not isinstance(document, dict) or not ({"entries", "pg_status"} & document.keys()):
        raise ValueError("has no list 'entries'")
    entries = document.get("entries", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("has 'entries' that are no list of mappings")
    members, groups, known = {}, {}, document.get("pg_config")
    for name, of in (known if isinstance(known, dict) else {}).items():
        with suppress(ValueError, LookupError, TypeError, OverflowError, RecursionError):
            if ranks := frozenset(map(int, json.loads(str(of["ranks"])))):
                on = "" if of["desc"] == DEFAULT else f" [{named(sorted(ranks))}]"
                groups[name] = f"{_group((name, of['desc']))}{on}"
                members[groups[name]] = ranks
    parsed = sorted((_entry(entry, groups) for entry in entries), key=lambda entry: entry.created)
    return Dump(rank, tuple(parsed), members)


def named(ranks: Sequence[int]) -> str:
    """'0, 3'; of many the first eight and the last."""
    return ", ".join(map(str, ranks[:8])) + (f" ... {ranks[-1]}" if len(ranks) > 8 else "")


def _group(names: Any) -> str:
    parts = names if isinstance(names, list | tuple) else [names]
    return ", ".join(str(part) for part in parts if part not in (None, "", "undefined"))


def _entry(entry: dict[str, Any], groups: Mapping[str, str]) -> Entry:
    is_p2p = bool(entry.get("is_p2p"))
    number = entry.get("p2p_seq_id" if is_p2p else "collective_seq_id", entry.get("seq_id"))
    shapes = [_shapes(entry.get(f"{side}_sizes")) for side in ("input", "output")]
    dtypes = [_texts(entry.get(f"{side}_dtypes")) for side in ("input", "output")]
    group, frames = entry.get("process_group"), entry.get("frames")
    return Entry(
        group=groups.get((_texts(group) or ("",))[0], _group(group)), is_p2p=is_p2p, number=whole(number),
        operation=str(entry.get("profiling_name", "a collective")).replace(":", " "),
        sizes=(_size(shapes[0], dtypes[0]), _size(shapes[1], dtypes[1])),
        elements=(tuple(map(prod, shapes[0])), tuple(map(prod, shapes[1]))),
        dtypes=(dtypes[0], dtypes[1]), created=whole(entry.get("time_created_ns")),
        completed=whole(entry.get("time_discovered_completed_ns")) or None,
        retired=bool(entry.get("retired")),
        frames=tuple(f for f in (frames if isinstance(frames, list) else []) if isinstance(f, dict)),
    )  # fmt: skip


def _stack(frames: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(f"{frame.get('filename')}:{frame.get('line')} {frame.get('name')}" for frame in frames)


def _shapes(value: Any) -> list[list[int]]:
    shapes = value if isinstance(value, list) else []
    return [[whole(side) for side in shape[:MOST_SIDES]] for shape in shapes if isinstance(shape, list)]


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _size(shapes: Sequence[Sequence[int]], dtypes: Iterable[str]) -> str:
    shown = ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[:4])
    return f"{shown} {', '.join(dict.fromkeys(dtypes))}".strip()


def read_dumps(paths: Sequence[Path]) -> list[Dump]:
    """The dumps in files, or in the folders of runs, by rank. Raises HarnessError."""
    files = [file for path in paths for file in (_files(path) if path.is_dir() else [path])]
    found: dict[int, tuple[Path, Dump]] = {}
    for path in files:
        values = read_values(path, "dump", GIVE, MOST_DUMP_BYTES)
        named = list(_RANK.finditer(path.name))
        if not named:
            raise HarnessError(f"dump '{path}' names no rank; end its name in it: nccl_trace_rank_0")
        rank = int(named[-1][1] or named[-1][2])
        if rank in found:
            raise HarnessError(
                f"dumps '{found[rank][0]}' and '{path}' are both of rank {rank}; give one of each"
            )
        try:
            found[rank] = path, dump_of(values, rank)
        except ValueError as error:
            raise HarnessError(f"dump '{path}' {error}; give {GIVE}") from error
    jobs = {job: path for path, dump in found.values() if (job := dump.members.get(f"0, {DEFAULT}"))}
    if len(jobs) > 1:
        (one, first), (other, second) = list(jobs.items())[:2]
        sizes = f"'{first}' is of a job with {len(one)} ranks, '{second}' of one with {len(other)}"
        raise HarnessError(f"dump {sizes}; give those of one job")
    if strange := [rank for rank in found if any(rank not in job for job in jobs)]:
        raise HarnessError(
            f"dump '{found[strange[0]][0]}' is named for rank {strange[0]}, which its job has not; "
            "end its name in its own rank"
        )
    return [found[rank][1] for rank in sorted(found)]


def _files(folder: Path) -> list[Path]:
    kept = sorted(folder.glob(KEPT)) or [
        p for p in sorted(folder.iterdir()) if p.is_file() and _RANK.search(p.name)
    ]
    if not kept:
        raise HarnessError(f"folder '{folder}' has no dumps; give {GIVE}")
    return kept


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What one rank is in, or was last in."""

    rank: int
    entry: Entry | None
    """The oldest that has not ended; None: the rank waits in none."""
    last: Entry | None
    """The latest that it began."""
    for_ranks: tuple[int, ...] = ()
    """Members of the group that have not come to it."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """What the dumps say together."""

    verdict: str
    culprits: tuple[int, ...]
    """Ranks that the others wait for, or that do what most do not; empty: none, or none can be told."""
    waits: tuple[Wait, ...]
    missing: tuple[int, ...]
    """Ranks of which no dump was given."""
    remarks: tuple[str, ...] = ()
    is_mismatch: bool = False
    """Whether ranks do, give or expect in one collective what does not fit together."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self, dict_factory=_written)


def _written(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    of = dict(fields)
    frames = of.pop("frames", None)
    return of if frames is None else of | {"where": where(frames), "stack": _stack(frames)}


@dataclass
class _Ranks:
    dumps: Mapping[int, Dump]
    members: dict[str, set[int]] = field(default_factory=dict)
    current: dict[int, Entry | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, dump in self.dumps.items():
            for group, members in dump.members.items():
                self.members.setdefault(group, set()).update(members)
            for entry in dump.entries:
                self.members.setdefault(entry.group, set()).add(rank)
        # gloo names no members: the default group has every rank.
        for group, ranks in self.members.items():
            if DEFAULT in group:
                ranks.update(self.dumps)
        for rank, dump in self.dumps.items():
            self.current[rank] = next((e for e in dump.open if not self._has_ended(e)), None)

    def _has_ended(self, entry: Entry) -> bool:
        """A completed one may be held by the watchdog yet; while a member has not come, it is none."""
        return bool(entry.completed) and (entry.is_p2p or self.members[entry.group] <= self._come(entry))

    def _come(self, entry: Entry) -> set[int]:
        queue = (entry.group, entry.is_p2p)
        return {rank for rank, dump in self.dumps.items() if dump.last[queue] >= entry.number}

    def waits_for(self, rank: int, entry: Entry) -> list[int]:
        """Ranks that have not come to what a rank is in, or whose dumps are missing."""
        if entry.is_p2p:
            peer, open_there = self.other_end(entry)
            return [] if peer is None or peer == rank or open_there else [peer]
        come = self._come(entry)
        late = self.members[entry.group] - come
        for other in come & self.members[entry.group]:
            same, current = self.dumps[other].at.get(entry.key), self.current[other]
            if same and current and current.key != entry.key and current.created < same[0].created:
                late.add(other)
        return sorted(late)

    def other_end(self, entry: Entry) -> tuple[int | None, Entry | None]:
        """The rank that a message is for, or from, and what it has open there."""
        pair = _PAIR.search(entry.operation)
        members = sorted(self.members[entry.group])
        if pair is None or max(int(pair[2]), int(pair[3])) >= len(members):
            return None, None
        peer = members[int(pair[3])]  # 'send ME->PEER', 'recv ME<-PEER'
        wanted = "recv" if pair[1] == "send" else "send", pair[3], pair[2]
        for other in self.dumps[peer].open if peer in self.dumps else ():
            if (found := _PAIR.search(other.operation)) and found.groups() == wanted:
                return peer, other
        return peer, None


def explain(dumps: Sequence[Dump]) -> Hang:
    """Which ranks wait where, and for whom."""
    ranks = _Ranks({dump.rank: dump for dump in dumps})
    edges = {r: tuple(ranks.waits_for(r, e)) if e else () for r, e in ranks.current.items()}
    waits = tuple(
        Wait(rank=r, entry=e, last=max(ranks.dumps[r].entries, key=lambda x: x.created, default=None),
             for_ranks=edges[r])
        for r, e in ranks.current.items()
    )  # fmt: skip
    missing = tuple(sorted(set().union(*ranks.members.values(), ()) - ranks.dumps.keys()))
    mismatch, slow = _mismatch(ranks), _slowest(ranks)
    verdict, culprits = mismatch or _standing(ranks, edges)
    remarks = [f"no dump of rank {named(missing)}"] if missing else []
    if slow and not mismatch and {slow[0]} >= set(culprits):
        verdict, culprits = f"{slow[1]}; {verdict}", (slow[0],)
    elif slow:
        remarks.append(slow[1])
    return Hang(
        verdict=verdict, culprits=culprits, waits=waits, missing=missing, remarks=tuple(remarks),
        is_mismatch=mismatch is not None,
    )  # fmt: skip


def _standing(ranks: _Ranks, edges: Mapping[int, Sequence[int]]) -> tuple[str, tuple[int, ...]]:
    waiting = {rank: entry for rank, entry in ranks.current.items() if entry is not None}
    if not waiting:
        return "no rank waits: every collective recorded has ended", ()
    by_key = grouped(
        ((entry.key, entry.is_p2p and entry.operation), rank)
        for rank, entry in sorted(waiting.items(), key=lambda item: item[1].created)
    )
    most = max(by_key.values(), key=len)
    in_it = f"rank {named(sorted(most))} wait{'s' * (len(most) == 1)} in {_place(waiting[most[0]])}"
    waited_for = sorted({late for of in edges.values() for late in of})
    if roots := [rank for rank in waited_for if rank in waiting and not edges[rank]]:
        return f"rank {named(roots)} {_are(roots)} behind, in {_place(waiting[roots[0]])}; {in_it}", tuple(
            roots
        )
    if roots := [rank for rank in waited_for if rank in ranks.dumps and rank not in waiting]:
        last = max(ranks.dumps[roots[0]].entries, key=lambda entry: entry.created, default=None)
        after = f", after {_place(last)}" if last else ""
        return f"rank {named(roots)} {_are(roots)} in no collective{after}; {in_it}", tuple(roots)
    if roots := [rank for rank in waited_for if rank not in ranks.dumps]:
        have = "has not come, or its dump is" if len(roots) == 1 else "have not come, or their dumps are"
        return f"rank {named(roots)} {have} missing; {in_it}", ()
    if waited_for and all(waiting[rank].is_p2p for rank in waited_for):
        places = "; ".join(f"rank {rank} in {_place(waiting[rank])}" for rank in waited_for[:MOST_PLACES])
        return f"rank {named(waited_for)} wait for one another: {places}", ()
    if waited_for:
        odd = [rank for rank in waited_for if rank not in most]
        decided = odd if 2 * len(most) > len(waiting) else []
        what = "group" if waiting[odd[0]].group != waiting[most[0]].group else "collective"
        return f"rank {named(odd)} {_are(odd)} in another {what}, {_place(waiting[odd[0]])}; {in_it}", tuple(
            decided
        )
    if len(ranks.dumps) == 1:
        return f"{in_it}; give the dumps of the other ranks", ()
    for rank, entry in waiting.items():
        peer, other = ranks.other_end(entry) if entry.is_p2p else (None, None)
        if other and entry.items != other.items:
            return f"rank {rank} and {peer} differ in size: {_place(entry)}; {_place(other)}", ()
    if len(by_key) > 1:
        return f"every rank has come to where the others wait; {in_it}", ()
    return f"no rank is behind and sizes agree: a broken network or device, or it still runs; {in_it}", ()


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _mismatch(ranks: _Ranks) -> tuple[str, tuple[int, ...]] | None:
    """The first collective in which ranks do, give or expect what does not fit together."""
    by_key: dict[tuple[str, bool, int], dict[int, list[Entry]]] = defaultdict(dict)
    for rank, dump in ranks.dumps.items():
        for key, entries in dump.at.items():
            if not key[1] and key[2]:
                by_key[key][rank] = entries
    shared = [of for of in by_key.values() if len(of) > 1]
    differ = [of for of in shared if len({tuple(map(_sent, entries)) for entries in of.values()}) > 1]
    for of in sorted(differ, key=lambda of: min(entries[0].created for entries in of.values())):
        for what, facts in _FACTS.items():
            alike = grouped((tuple(facts(entry) for entry in of[rank]), rank) for rank in sorted(of))
            if len(alike) == 1 or any(fact is None for seen in alike for fact in seen):
                continue
            usual, *others = sorted(alike.values(), key=len, reverse=True)
            odd = sorted(rank for ranks in others for rank in ranks)
            if len(usual) == len(others[0]):
                each = [f"rank {named(r)} in {_place(of[r[0]][0])}" for r in (usual, *others)[:MOST_PLACES]]
                return f"rank {named(sorted(of))} differ in {what}: {'; '.join(each)}", ()
            verb = _are(odd) if what == "collective" else "has" if len(odd) == 1 else "have"
            says = f"rank {named(odd)} {verb} {'in ' * (what == 'collective')}another {what}"
            places = f"{_place(of[odd[0]][0])}; rank {named(usual)} in {_place(of[usual[0]][0])}"
            return f"{says}, in {places}", tuple(odd)
    return None


def _sent(entry: Entry) -> Any:
    return entry.operation, entry.elements, entry.dtypes


def _place(entry: Entry) -> str:
    return f"{entry.words} at {entry.where}" if entry.stack else entry.words


def _elements(entry: Entry) -> Any:
    """Elements that must be equal on all ranks."""
    inputs, outputs = (tuple(sorted(set(side))) for side in entry.elements)
    of_list = len(outputs) > 1
    return (
        None if _UNEVEN_INPUTS.search(entry.operation) or of_list else sum(inputs),
        None if _UNEVEN_OUTPUTS.search(entry.operation) or of_list else sum(outputs),
    )


_FACTS = {
    "collective": lambda entry: entry.operation,
    "size": _elements,
    "data type": lambda entry: entry.dtypes if all(entry.dtypes) else None,
}
"""What all ranks have in common in a collective, in the order of what is said; None: not to be compared."""


def _slowest(ranks: _Ranks) -> tuple[int, str] | None:
    """The rank that comes last nearly always, by how much.

    Clocks of machines differ: a collective ends everywhere at once, which is taken as their difference.
    """
    base = next(iter(ranks.dumps.values()))
    everyone = [ranks.dumps[rank].at for rank in ranks.dumps]
    shared = [key for key in base.at if not key[1] and all(key in at for at in everyone)]
    ended = [key for key in shared if all(at[key][0].completed for at in everyone)]
    if len(ended) < SLOW_CALLS or len(everyone) < 2:
        return None
    ahead = {
        rank: median(dump.at[key][0].completed - base.at[key][0].completed for key in ended)  # type: ignore[operator]
        for rank, dump in ranks.dumps.items()
    }
    lasts: list[tuple[int, float]] = []
    for key in ended:
        came = sorted((dump.at[key][0].created - ahead[rank], rank) for rank, dump in ranks.dumps.items())
        lasts.append((came[-1][1], (came[-1][0] - came[0][0]) / 1e9))
    (rank, times), *_ = Counter(rank for rank, _ in lasts).most_common()
    late = median(seconds for last, seconds in lasts if last == rank)
    if times < SLOW_SHARE * len(ended) or late < SLOW_SECONDS:
        return None
    return (
        rank,
        f"rank {rank} is slow: last in {times} of {len(ended)} collectives, {late:.1f} s late at the median",
    )
