"""Reads a Chrome trace event by event, in bounded memory; kinds of events; intervals of time."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, NamedTuple

from harness.bounds import MOST_EVENT_BYTES, MOST_TRACE_BYTES
from harness.errors import HarnessError
from harness.files import require_plain_input
from harness.forms.terms import OPERATIONS
from harness.nested import grouped
from harness.traces.device import Integers, Interval, cut, division, subtract, union

STEP, PHASE = "harness::step ", "harness::phase "
"""How the loop names its steps and phases."""
HOST_OPERATORS = frozenset({"cpu_op", "operator", "user_annotation"})
_FILE = tomllib.loads(files(__package__).joinpath("kinds.toml").read_text(encoding="utf-8"))
LAUNCHES = frozenset(_FILE["launches"])
OTHER_ACTIVITIES = frozenset(_FILE["other_activities"])
TRANSPORTS = ("gloo:", "mpi:", "ucc:", "oneccl:")
"""What a transport of the host calls its work on a collective."""
NOT_COMPUTING = ("c10d::", "_c10d_functional::", "autograd::", "torch::", "torch.", "FSDP::")
"""Their own time is waiting, or Python that may wait; what computes inside of them is seen by itself."""


@lru_cache(maxsize=100_000)
def operator_computes(name: str) -> bool:
    """Whether a host operator of this name computes: 'aten::mm' and other 'library::operator' do."""
    return "::" in name and not name.startswith((*NOT_COMPUTING, STEP, PHASE))


_PROFILER_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")


@lru_cache(maxsize=10_000)
def step_number(name: str) -> int | None:
    """The step that an annotation spans: 'ProfilerStep#3' of torch, 'harness::step 3' of the harness."""
    if name.startswith(STEP):
        number = name.removeprefix(STEP)
        return int(number) if number.isdecimal() else None
    found = _PROFILER_STEP.fullmatch(name)
    return int(found[1]) if found else None


OPERATORS: dict[str, tuple[str, int]] = {
    name: (operator["collective"], operator["tensor"]) for name, operator in _FILE["operators"].items()
}
"""Of `torch.ops.c10d`: the collective, and the index of the argument that holds the complete tensor."""
INPUT_AT = {name: at for name, operator in _FILE["operators"].items() if (at := operator.get("input"))}
"""Index of the argument with this rank's input, where it tells the group's size or the payload."""
_NO_COLLECTIVE = re.compile(r"wait|coalescing|init|finali|group(?:start|end)|^coalesced$", re.IGNORECASE)


@lru_cache(maxsize=4096)
def collective_of(name: str) -> str | None:
    """The collective that the name of a launch or operator says; None: it says none.

    'nccl:_all_gather_base', 'allreduce_coalesced' and 'c10d::alltoall_base_' are in; names of kernels do not
    tell and must not be given.
    """
    scope, _, bare = name.rpartition(":")
    if bare in OPERATORS and scope.startswith("c10d"):
        return OPERATORS[bare][0]
    if _NO_COLLECTIVE.search(bare):
        return None
    plain = bare.lower().replace("multimem_", "").replace("one_shot_", "").replace("two_shot_", "")
    return next(
        (op for op, word in _FILE["words"].items() if op in OPERATIONS and re.search(word, plain)), None
    )


@lru_cache(maxsize=1024)
def dtype_of(text: str) -> str | None:
    """A dtype by torch's name, from NCCL's arguments ('Float') or shapes ('c10::BFloat16'); None: unknown."""
    bare = text.strip().rpartition("::")[2].lower()
    return bare if bare.startswith("float8") else _FILE["dtypes"].get(bare)


LONGEST_WAITS = 10


@dataclass(frozen=True, kw_only=True)
class Communication:
    """A collective while the transport works on it, waiting for the other ranks included."""

    name: str
    phase: str
    start: int
    end: int


class Operator(NamedTuple):
    """A stretch that the profiler saw on one thread of the host; stretches of a thread nest."""

    thread: int
    start: int
    end: int
    computes: bool
    transports: bool = False
    """Whether it is a transport's work on a collective: nothing inside of it computes."""


class RankActivity(NamedTuple):
    """What one rank did."""

    computing: Sequence[Interval] | Integers
    communications: Sequence[Communication]
    copies: Sequence[Interval] | None = None
    """Copies and memsets of a device; None: the host worked."""


def divide(step: int, window: Interval, work: RankActivity) -> dict[str, Any]:
    """One row in the form of `record.OverlapPart`; what lies outside of `window` is cut off."""
    computing, talking = union(work.computing), union((c.start, c.end) for c in work.communications)
    copies = None if work.copies is None else union(work.copies)
    exposed: list[Interval] = subtract(cut(talking, window), cut(computing, window)).tolist()
    longest = sorted(exposed, key=lambda stretch: stretch[0] - stretch[1])[:LONGEST_WAITS]
    waits = []
    for start, end in longest:
        # By the collective that covers most of it.
        cause = max(work.communications, key=lambda c: min(c.end, end) - max(c.start, start))
        waits.append({"name": cause.name, "phase": cause.phase, "seconds": (end - start) / 1e9})
    return {"step": step, **division(computing, talking, copies)(window), "waits": waits}


def computing_stretches(operators: Iterable[Operator]) -> Integers:
    """When the innermost operator of some thread computes.

    An outer operator may call a hook that waits for a collective, so only the innermost one says what
    its thread is doing.
    """
    threads = grouped((operator.thread, operator) for operator in operators)
    stretches: list[Interval] = []
    for nested in threads.values():
        # Outer before inner where both begin together.
        stretches += _innermost(sorted(nested, key=lambda operator: (operator.start, -operator.end)))
    return union(stretches)


def _innermost(operators: Sequence[Operator]) -> list[Interval]:
    stretches: list[Interval] = []
    open_ones: list[Operator] = []
    reached = transported = 0

    def advance(until: int) -> None:
        nonlocal reached
        while open_ones and reached < until:
            innermost = open_ones[-1]
            stop = min(innermost.end, until)
            begin = max(reached, transported)
            if innermost.computes and stop > begin:
                stretches.append((begin, stop))
            reached = max(reached, stop)
            if innermost.end <= reached:
                open_ones.pop()

    for operator in operators:
        advance(operator.start)
        reached = max(reached, operator.start)
        open_ones.append(operator)
        if operator.transports:
            transported = max(transported, operator.end)
    if open_ones:
        advance(max(operator.end for operator in open_ones))
    return stretches


FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
Event = tuple[Any, ...]
"""Values of FIELDS; `args` may be the text between the braces (`arguments_of`)."""
CHUNK_BYTES = 2**22
GZIP = b"\x1f\x8b"
OTHER_FORMATS = {
    b"PK": "a zip archive", b"\xfd7zXZ": "an xz archive", b"(\xb5/\xfd": "a zstd archive",
    b"SQLite format 3": "an SQLite database, as nsys exports it", b"NVIDIA Nsight": "a report of nsys",
    b"%PDF": "a PDF", b"\x80\x02": "a pickle", b"\x80\x04": "a pickle", b"\x0a": "no JSON",
}  # fmt: skip
EARLY_BYTES, LARGEST_RATIO = 2**30, 250
"""Traces pack to a tenth or a twentieth; what unpacks further than this is not one."""
_GAP = re.compile(r"[\s,]*")
_KEY_GAP = re.compile(r"[\s:]*")
_NEXT_EVENT = re.compile(r"\}\s*,\s*(?=\{\s*\"(?:ph|name|cat|args|pid|tid|ts)\")|\}\s*(?=\])")
_BARE = re.compile(r"(:\s*)-?(?:inf|nan|infinity)(?=\s*[,}\]])", re.IGNORECASE)
_TEXT, _PLACE, _TIME = r'"([^"\\]*+)"', r'"?+(-?\d++|(?<=")[^"\\]*+)"?+', r"(-?\d++(?:\.\d++)?+)"
_FLAT = r"\{([^{}\\]*+)\}"
"""An object without another in it; its texts have no braces if their quotes are paired."""
_VALUES = dict(zip(FIELDS, (_TEXT, _TEXT, _TEXT, _PLACE, _PLACE, _TIME, _TIME, _FLAT), strict=True))
_OTHER_VALUE = r'(?:"[^"\\]*+"|[\w.+-]++)'
_NOTHING, _COMMA = "(?:(?!)())?", r"\s*+,\s*+"
MOST_SHAPES, MOST_KEYS = 12, 16
_BACKSLASH = re.compile(r"\\(?![\"\\/bfnrtu])|\\u(?![0-9a-fA-F]{4})")

# Times stay texts: a float has no room for nanoseconds since 1970.
_DECODER = json.JSONDecoder(strict=False, parse_float=str, parse_constant=str)
_SCAN: Callable[[str, int], tuple[Any, int]] = _DECODER.scan_once  # type: ignore[attr-defined]


class TraceFile:
    """One file; `events` may be read once, `settings` is complete after that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: dict[str, Any] = {}
        """What the file says besides its events: distributedInfo, deviceProperties and others."""
        self.unreadable = 0
        """Events that are no JSON and were left out: old versions of Kineto did not quote every name."""
        self.has_events = False
        """Whether the file has a list of events at all."""
        self._text = ""
        self._at = 0
        self._ended = False
        self._read_bytes = 0
        self._count = 0
        self._shapes: dict[tuple[str, ...], str] = {}
        self._shaped: re.Pattern[str] | None = None
        """Events with keys in an order that was seen: what of them is not used is not decoded."""
        self._groups: list[tuple[int, ...]] = []

    def events(self) -> Iterator[Event]:
        """Every event of the file. Raises HarnessError for what is no trace, is cut off or too large."""
        require_plain_input(self.path, "trace")
        if self.path.is_dir():
            raise HarnessError(f"trace '{self.path}' is a folder; give its files, such as {self.path}/*.json")
        try:
            with self.path.open("rb") as raw:
                yield from self._of_file(raw)
        except (OSError, EOFError, zlib.error) as error:
            if isinstance(error, EOFError):
                raise self._cut_off() from error
            reason = getattr(error, "strerror", None) or str(error)
            raise self._not_one(f"cannot be read: {reason}") from error

    def _of_file(self, raw: IO[bytes]) -> Iterator[Event]:
        start = raw.read(16)
        raw.seek(0)
        packed = start.startswith(GZIP)
        size = os.fstat(raw.fileno()).st_size
        if not start:
            raise HarnessError(f"trace '{self.path}' is empty")
        if not packed:
            if size > MOST_TRACE_BYTES:
                raise self._too_large(f"has {size:,} bytes")
            for magic, what in OTHER_FORMATS.items():
                if start.startswith(magic) and magic != b"\x0a":
                    raise self._not_one(f"is {what}")
        source = gzip.GzipFile(fileobj=raw) if packed else raw
        decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self._more = lambda: self._read(source, decode, size if packed else None)  # type: ignore[arg-type]
        yield from self._document()

    def _read(self, source: IO[bytes], decode: Callable[..., str], packed_size: int | None) -> bool:
        """Append a piece of the file to what is left; False at its end."""
        if self._ended:
            return False
        data = source.read(CHUNK_BYTES)
        self._read_bytes += len(data)
        if packed_size is not None:
            if self._read_bytes > MOST_TRACE_BYTES:
                raise self._too_large("unpacks to more")
            if self._read_bytes > max(EARLY_BYTES, LARGEST_RATIO * packed_size):
                raise HarnessError(
                    f"trace '{self.path}' unpacks to more than {LARGEST_RATIO} times its size, which no "
                    "trace does"
                )
        self._ended = not data
        self._text = self._text[self._at :] + decode(data, final=self._ended)
        self._at = 0
        if len(self._text) > MOST_EVENT_BYTES + CHUNK_BYTES:
            raise self._not_one(f"holds more than {MOST_EVENT_BYTES:,} bytes that are no event")
        return not self._ended

    def _document(self) -> Iterator[Event]:
        first = self._next(_GAP)
        if first == "[":
            self._at += 1
            self.has_events = True
            yield from self._list()
        elif first == "{":
            self._at += 1
            yield from self._members()
        else:
            raise self._not_one("is not JSON")
        if self._next(_GAP) not in ("", "\0"):
            raise self._not_one("goes on after the end of its JSON")

    def _members(self) -> Iterator[Event]:
        while (character := self._next(_GAP)) != "}":
            if character != '"':
                raise self._cut_off() if character == "" else self._not_one("is not the JSON of a trace")
            key = self._value()
            character = self._next(_KEY_GAP)
            if key == "traceEvents" and character == "[":
                self._at += 1
                self.has_events = True
                yield from self._list()
            else:
                self.settings[key] = self._value()
        self._at += 1

    def _list(self) -> Iterator[Event]:
        scan, gap, width = _SCAN, _GAP.match, len(FIELDS)
        while True:
            text = self._text
            if self._shaped is not None:
                match, at, groups = self._shaped.match, self._at, self._groups
                while (known := match(text, at)) is not None:
                    found = known.group(*groups[((known.lastindex or 1) - 1) // width])
                    if found[-1] is not None and found[-1].count('"') % 2:
                        break
                    at = known.end()
                    self._count += 1
                    yield found
                self._at = at
            space = gap(text, self._at)
            self._at = space.end() if space else self._at
            if len(text) - self._at < 2 or text[self._at] != "{":
                character = self._next(_GAP)
                if character == "]":
                    self._at += 1
                    return
                if character == "":
                    raise self._cut_off()
                if character == "[" and not self._count:
                    raise HarnessError(
                        f"trace '{self.path}' is a memory timeline (export_memory_timeline), not a trace; "
                        "give one of torch.profiler (export_chrome_trace)"
                    )
                if character != "{":
                    value = self._value()  # no event: null, a number
                    self.unreadable += 1
                    if isinstance(value, str) and character != '"':
                        raise self._not_one("is not JSON")
                    continue
                text = self._text
            try:
                event, self._at = scan(text, self._at)
            except (StopIteration, json.JSONDecodeError) as error:
                if self._incomplete(error):
                    if not self._more():
                        raise self._cut_off() from error
                    continue
                repaired = self._repaired()
                if repaired is None:
                    continue
                event = repaired
            except (RecursionError, ValueError) as error:
                raise self._excessive(error) from error
            self._count += 1
            if len(self._shapes) < MOST_SHAPES:
                self._learn(event)
            arguments = event.get("args")
            yield (
                *map(event.get, FIELDS[:-2]), event.get("dur", 0),
                arguments if isinstance(arguments, dict) else None,
            )  # fmt: skip

    def _learn(self, event: dict[str, Any]) -> None:
        """Read events of this kind with these keys in this order by a pattern from now on."""
        kind = event.get("ph")
        shape = (str(kind), *event)
        if shape in self._shapes or not isinstance(kind, str) or len(event) > MOST_KEYS:
            return
        used = [key for key in event if key in (FIELDS if kind == "X" else ("ph", "args"))]
        if kind == "X" and not {*used} >= {*FIELDS[:-1]}:
            return
        values = dict.fromkeys(event, _OTHER_VALUE) | {key: _VALUES[key] for key in used}
        values["ph"] = f'"({re.escape(kind)})"'
        members = _COMMA.join(rf"{re.escape(json.dumps(key))}\s*+:\s*+{values[key]}" for key in event)
        unused = [key for key in FIELDS if key not in used]
        pattern = rf"\{{\s*+{members}\s*+\}}{_NOTHING * len(unused)}"
        first = len(FIELDS) * len(self._shapes) + 1
        self._groups.append(tuple(first + [*used, *unused].index(key) for key in FIELDS))
        self._shapes[shape] = pattern
        self._shaped = re.compile(rf"[\s,]*+(?:{'|'.join(self._shapes.values())})")

    def _value(self) -> Any:
        while True:
            try:
                value, end = _SCAN(self._text, self._at)
                # A number at the end of what was read may go on.
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            except (StopIteration, json.JSONDecodeError) as error:
                if not self._incomplete(error):
                    raise self._not_one("is not JSON") from error
            except (RecursionError, ValueError) as error:
                raise self._excessive(error) from error
            if not self._more():
                raise self._cut_off()

    def _next(self, gap: re.Pattern[str]) -> str:
        """The character after white space and separators; empty at the end."""
        while True:
            found = gap.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more() and self._at >= len(self._text):
                return ""

    def _incomplete(self, error: Exception) -> bool:
        """Whether the value may go on in what was not read yet."""
        at = (
            error.pos if isinstance(error, json.JSONDecodeError) else getattr(error, "value", len(self._text))
        )
        unterminated = isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated")
        return unterminated or at is None or at >= len(self._text) - 16

    def _repaired(self) -> dict[str, Any] | None:
        """The event that is no JSON, mended; None: it is left out."""
        end = _NEXT_EVENT.search(self._text, self._at)
        while end is None:
            if not self._more():
                raise self._cut_off()
            end = _NEXT_EVENT.search(self._text, self._at)
        piece = self._text[self._at : end.start() + 1]
        self._at = end.start() + 1
        value = _decoded(piece)
        self.unreadable += value is None
        return value

    def _excessive(self, error: Exception) -> HarnessError:
        deep = isinstance(error, RecursionError)
        return self._not_one("nests too deeply" if deep else "holds a number of thousands of digits")

    def _cut_off(self) -> HarnessError:
        events = f" after {self._count:,} events" if self._count else ""
        return HarnessError(
            f"trace '{self.path}' is cut off{events}: its JSON does not end; copy it again, or let "
            "the program end before you do"
        )

    def _not_one(self, what: str) -> HarnessError:
        return HarnessError(
            f"trace '{self.path}' {what}; give a trace of torch.profiler (export_chrome_trace), plain or gzip"
        )

    def _too_large(self, what: str) -> HarnessError:
        return HarnessError(
            f"trace '{self.path}' {what}; at most {MOST_TRACE_BYTES:,} bytes are read; profile fewer steps"
        )


def _decoded(piece: str) -> dict[str, Any] | None:
    """An object, with what old versions of Kineto wrote mended if it is no JSON; None: nothing helps."""
    for text in (piece, _BACKSLASH.sub(r"\\\\", _BARE.sub(r"\1null", piece))):
        with suppress(RecursionError, ValueError):
            value = _DECODER.decode(text)
            return value if isinstance(value, dict) else None
    return None


def arguments_of(arguments: dict[str, Any] | str | None) -> dict[str, Any]:
    """The `args` of an event; empty if it has none, or none that can be read."""
    if not isinstance(arguments, str):
        return arguments or {}
    return _decoded(f"{{{arguments}}}") or {}


def nanoseconds(value: Any) -> int | None:
    """Microseconds of a trace, a number or a text, as whole nanoseconds; None: no finite number."""
    if type(value) is int:
        return value * 1000
    text = str(value)
    if text[-4:-3] == ".":
        # As Kineto writes it: three digits, which is most of what is read.
        try:
            return int(text[:-4] + text[-3:])
        except ValueError:
            return None
    whole, _, fraction = text.partition(".")
    if whole.isdecimal() and (not fraction or fraction.isdecimal()):
        return int(whole) * 1000 + int(f"{fraction}000"[:3])
    try:
        return round(float(text) * 1000)
    except (ValueError, OverflowError):
        return None
