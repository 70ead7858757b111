"""Reads a Chrome trace event by event: a file of gigabytes never stands in memory as a whole."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from harness.bounds import MOST_EVENT_BYTES, MOST_TRACE_BYTES
from harness.errors import HarnessError
from harness.files import require_plain_input

Event = dict[str, Any]
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
            raise HarnessError(f"trace '{self.path}' cannot be read: {reason}") from error

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
        scan, gap = _SCAN, _GAP.match
        while True:
            text = self._text
            found = gap(text, self._at)
            self._at = found.end() if found else self._at
            if len(text) - self._at < 2 or text[self._at] != "{":
                character = self._next(_GAP)
                if character == "]":
                    self._at += 1
                    return
                if character == "":
                    raise self._cut_off()
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
            yield event

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

    def _repaired(self) -> Event | None:
        """The event that is no JSON, with what old versions of Kineto wrote mended; None: it is left out."""
        end = _NEXT_EVENT.search(self._text, self._at)
        while end is None:
            if not self._more():
                raise self._cut_off()
            end = _NEXT_EVENT.search(self._text, self._at)
        piece = self._text[self._at : end.start() + 1]
        self._at = end.start() + 1
        mended = _BACKSLASH.sub(r"\\\\", _BARE.sub(r"\1null", piece))
        try:
            value = _DECODER.decode(mended)
        except (RecursionError, ValueError):
            value = None
        if not isinstance(value, dict):
            self.unreadable += 1
            return None
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
