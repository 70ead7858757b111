"""Reads files that torch dumps, pickle or JSON, plain or gzip. Nothing that a pickle may hold is executed."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

from harness.bounds import LARGEST_NUMBER
from harness.errors import HarnessError
from harness.files import read_plain, refusing, require_plain_input

_WIDTHS = b"|".join(b"\\x%02x.{%d}" % (width, width) for width in range(10))
_INTEGER = rb"(?:K.|M..|J.{4}|\x8a(?:%b))" % _WIDTHS
_REFERENCE = rb"(?:h.|j.{4})"
_PLAIN = re.compile(
    rb"(?:[(\]}aesuN\x88\x89\x94]|[q\x80].|r.{3}[\0-\3]|G.{8}|\x95.{8}|%b{2}\x86(?![qr\x94(])|(%b)"
    rb"|%b\x85|%b{2}\x86|%b{3}\x87|%b){1,1000}" % (_REFERENCE, _REFERENCE, *(4 * (_INTEGER,))),
    re.DOTALL,
)
"""Opcodes of lists, mappings, numbers and references. A tuple holds numbers alone: hashing one of a million
tuples in each other ends the process. The memo is as long as its largest index, which stays below 2**26."""
_PUT = re.compile(rb"q.|r.{3}[\0-\3]|\x94", re.DOTALL)
_TEXTS, _STOP, _PAIR = {0x8C: 1, 0x58: 4}, 0x2E, 0x86
"""Opcodes of texts, with the bytes of their length; of the end; of a tuple of two."""
_KEEPS = b"qr\x94("
"""Opcodes by which a tuple could be put into another: none may follow one of two texts."""


class _PlainUnpickler(pickle.Unpickler):
    """Names no class and no function."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _of_pickle(data: bytes) -> Any:
    """The value of a pickle of lists, mappings, numbers, texts and pairs of texts, as `torch` writes it."""
    at, end, texts = 0, len(data), 0
    while at < end and data[at] != _STOP:
        if found := _PLAIN.match(data, at):
            ends = found.end(1) == found.end()
            texts = (texts + 1 if found.start(1) == at else 1) if ends else 0
            at = found.end()
        elif width := _TEXTS.get(data[at]):
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
            texts += 1
            at = put.end() if (put := _PUT.match(data, at)) else at
        elif data[at] == _PAIR and texts >= 2 and data[at + 1 : at + 2] not in _KEEPS:
            at, texts = at + 1, 0
        elif end - at < 10 and data[-1] != _STOP:
            raise EOFError
        else:
            raise pickle.UnpicklingError(f"it holds something else at byte {at:,}")
    if at >= end:
        raise EOFError
    return _PlainUnpickler(io.BytesIO(data)).load()


def read_values(path: Path, what: str, give: str, most_bytes: int) -> Any:
    """The plain values in a file that torch wrote. `what`: its kind; `give`: what to give instead.

    Raises HarnessError for anything else.
    """
    require_plain_input(path, what)
    if path.is_dir():
        raise HarnessError(f"{what} '{path}' is a folder; give its files")
    with refusing(f"{what} '{path}' cannot be read", f"; give {give}"):
        data = read_plain(path, most_bytes)
    if not data:
        raise HarnessError(f"{what} '{path}' is empty")

    def refused(why: str) -> HarnessError:
        return HarnessError(f"{what} '{path}' {why}; give {give}")

    try:
        if data.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(most_bytes + 1)
            if len(data) > most_bytes:
                raise refused(f"has more than {most_bytes:,} bytes unpacked")
        if data[:1024].lstrip()[:1] in (b"{", b"["):
            return json.loads(data)
        if data.startswith(b"\x80"):
            return _of_pickle(data)
    except EOFError as error:
        raise refused("is cut off") from error
    except pickle.UnpicklingError as error:
        raise refused(f"is not a pickle of plain values: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, OSError, zlib.error) as error:
        raise refused("is neither a pickle of plain values nor JSON, or is damaged") from error
    except (MemoryError, RecursionError) as error:
        raise refused(f"asks for more memory than a {what} needs") from error
    raise refused("is neither a pickle nor JSON")


_BELOW = re.compile(r"/torch/|/harness/rank/(?:observing|probes)/")


def where(frames: Any) -> str:
    """The innermost frame of the user's own code, or of a library above torch."""
    named = [
        (str(frame.get("filename", "")), frame)
        for frame in (frames if isinstance(frames, list | tuple) else ())
        if isinstance(frame, dict) and str(frame.get("filename", "")).endswith(".py")
    ]
    if not named:
        return "n/a"
    own = next((frame for file, frame in named if not _BELOW.search(file)), named[0][1])
    parts = str(own.get("filename", "")).split("/")[-2:]
    return f"{'/'.join(parts)}:{own.get('line', '?')} {own.get('name', '')}"


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_NUMBER


def whole(value: Any) -> int:
    return value if is_size(value) else 0
