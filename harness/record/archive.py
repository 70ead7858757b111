"""A folder packed into one file, NAME.tar.xz: the same files give the same bytes, `tar -xf` unpacks it.

An archive may come from anybody: it is read in memory only, within limits, and whatever a folder of records
cannot hold is refused.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path

from harness.errors import HarnessError
from harness.files import write_atomically

SUFFIX = ".tar.xz"
MOST_BYTES = 2**30
"""Unpacked, of the whole archive."""
MOST_MEMBER_BYTES = 2**26
MOST_MEMBERS = 100_000
"""Files and folders."""
MOST_DECODER_BYTES = 2**27
"""Of the dictionary with which it was compressed; `xz -9` needs half of it."""
BLOCK_BYTES = 2**20
ADVICE = "pack the records again with `harness report RUNS -o FILE --archive`"


def archive_of(path: Path) -> Path | None:
    """The archive that a path names or lies in, whether it exists or not; None for any other path."""
    places = (place for place in (path, *path.parents) if place.name.endswith(SUFFIX))
    return next((place for place in places if not place.is_dir()), None)


def write_archive(path: Path, files: Mapping[str, bytes], *, folder: str) -> None:
    """Pack files by name into `folder`, without times and owners; readers see all of it or nothing."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))
    write_atomically(path, lzma.compress(packed.getbuffer(), preset=9 | lzma.PRESET_EXTREME))


def read_archive(path: Path, *, named: str) -> dict[str, bytes]:
    """The files of this name at any depth, by their paths in the archive.

    Raises HarnessError if the archive is missing, damaged or truncated, holds anything but files and
    folders, a name twice or one that leads out of it, or more than the limits above.
    """
    unpacked = _unpack(path)
    try:
        with tarfile.open(fileobj=unpacked, mode="r:") as tar:
            files = _read_members(path, tar, unpacked, named)
            end = tar.offset
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise _refusal(path, f"holds no readable tar archive ({error})") from error
    unpacked.seek(end)
    rest = unpacked.read()
    if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise _refusal(path, "is damaged after its last readable file")
    return files


def _unpack(path: Path) -> io.BytesIO:
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MOST_DECODER_BYTES)
    unpacked = io.BytesIO()
    try:
        if not path.is_file():
            raise HarnessError(f"archive '{path}' is missing or no file; put it back, or {ADVICE}")
        with path.open("rb") as file:
            while not decoder.eof:
                block = file.read(BLOCK_BYTES) if decoder.needs_input else b""
                if decoder.needs_input and not block:
                    raise _refusal(path, "is truncated")
                unpacked.write(decoder.decompress(block, max_length=BLOCK_BYTES))
                if unpacked.tell() > MOST_BYTES:
                    raise _refusal(path, f"unpacks to more than {MOST_BYTES:,} bytes, the most allowed")
            if decoder.unused_data or file.read(1):
                raise _refusal(path, "goes on after its end")
    except (OSError, lzma.LZMAError) as error:
        raise _refusal(path, f"cannot be unpacked ({error})") from error
    unpacked.seek(0)
    return unpacked


def _read_members(path: Path, tar: tarfile.TarFile, unpacked: io.BytesIO, named: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    seen: set[str] = set()
    offset = -1
    for member in tar:
        if member.offset <= offset:
            raise tarfile.ReadError("a member begins before the one in front of it")
        offset = member.offset
        name = _safe_name(path, member)
        if name in seen:
            raise _refusal(path, f"holds '{name}' twice")
        seen.add(name)
        if len(seen) > MOST_MEMBERS:
            raise _refusal(path, f"holds more than {MOST_MEMBERS:,} files, the most allowed")
        if member.isfile() and name.rpartition("/")[2] == named:
            files[name] = unpacked.getbuffer()[member.offset_data :][: member.size].tobytes()
    return files


def _safe_name(path: Path, member: tarfile.TarInfo) -> str:
    """The member's name without './'. Raises HarnessError for what a folder of records cannot hold."""
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or not member.name.isprintable():
        raise _refusal(path, f"holds {member.name!r}, which leads out of it or is no plain name")
    if not (member.isdir() or member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)) or member.issparse():
        raise _refusal(path, f"holds '{member.name}', which is neither a plain file nor a folder")
    if not 0 <= member.size <= MOST_MEMBER_BYTES:
        allowed = f"from 0 to {MOST_MEMBER_BYTES:,} are allowed"
        raise _refusal(path, f"holds '{member.name}' of {member.size:,} bytes; {allowed}")
    return "/".join(part for part in parts if part not in ("", "."))


def _refusal(path: Path, what: str) -> HarnessError:
    return HarnessError(f"archive '{path}' {what}; copy it again, or {ADVICE}")
