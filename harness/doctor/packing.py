"""Packs a comparison or a check of a GPU machine for somebody else: without names, secrets and folders."""

from __future__ import annotations

import getpass
import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil

from harness.errors import HarnessError
from harness.files import refusing, try_writing
from harness.judge.comparison import Comparison
from harness.nested import mapped
from harness.record import Record
from harness.record.store import (
    ARCHIVE_NAME,
    RECORD_NAME,
    SUFFIX,
    archive_runs,
    as_name,
    read_runs,
    record_text,
    write_archive,
)
from harness.run_directory.rank_state import read_log, shown_text
from harness.safe_text import harmless
from harness.snapshots.account import accounts, read_snapshot
from harness.tell.document import Document
from harness.tell.dumps import snapshot_document
from harness.tell.report import write_document, write_report
from harness.tell.terminal import finding_lines, terminal_table
from harness.tell.traces import trace_document
from harness.traces.analysis import read_traces, skew_of
from harness.traces.strategy import likeness_of

# From a slash that begins a path to the last but one; behind -I, -L and an escaped line break too.
_FOLDERS = re.compile(r"""(?:(?<=-[IL])|(?<=\\[nt])|(?<![\w./<~-]))~?/(?:[^\s/"'<>|:;,()\[\]{}\\]+/)+""")
_UUIDS = re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b")
"""Of GPUs: what stands in their place tells them apart, and not which they are."""
_KERNEL = re.compile(r"(?<=Linux-)(\d+(?:\.\d+)+)\S*?(?=-(?:x86_64|aarch64))")
"""Of the machine: what follows its version, sites choose."""
_COMMON = frozenset(
    (
        "admin", "cluster", "compute", "cpu", "cuda", "default", "docker", "gpu", "host", "job", "local",
        "localhost", "login", "main", "model", "node", "none", "python", "rank", "root", "server", "test",
        "train", "ubuntu", "user", "vm", "worker",
    )
)  # fmt: skip
"""Names that tell nothing, and stand in records for other things."""
LEAST_LETTERS = 3


def anonymous(text: str) -> str:
    """The text without secrets, folders, and the names and addresses of this machine and its user."""
    return _nameless(shown_text(harmless(text)))


def anonymous_document(value: Any) -> Any:
    """A JSON document without the same; its keys lose their folders only."""
    return nameless_document(json.loads(shown_text(harmless(json.dumps(value)))))


def nameless_document(value: Any) -> Any:
    """The document without names and folders alone, where it holds no secrets: megabytes take a second."""
    return mapped(
        value,
        leaf=lambda leaf: _nameless(leaf) if isinstance(leaf, str) else leaf,
        key=lambda name: _FOLDERS.sub("", str(name)),
    )


@lru_cache(maxsize=10_000)
def _nameless(text: str) -> str:
    for folder in _own_folders():
        text = text.replace(folder, "")
    text = _KERNEL.sub(r"\1", text)
    text = _UUIDS.sub(lambda found: sha256(found[0].encode()).hexdigest()[:8], _FOLDERS.sub("", text))
    hosts, users = _own_names()
    if hosts is not None:
        text = hosts.sub("host", text)
    return text if users is None else users.sub("user", text)


def forget_names() -> None:
    """Ask for the names of machine and user again."""
    for kept in (_nameless, _own_folders, _own_names):
        kept.cache_clear()


@lru_cache
def _own_folders() -> tuple[str, ...]:
    """Folders of this user and installation, each with its slash, the innermost first."""
    found = {
        Path.home(),
        Path.cwd(),
        Path(tempfile.gettempdir()),
        Path(sys.prefix),
        Path(__file__).parents[3],
    }
    found |= {folder.resolve() for folder in found}
    return tuple(sorted((f"{folder}/" for folder in found if len(folder.parts) > 1), key=len, reverse=True))


@lru_cache
def _own_names() -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """Patterns of the machine's names and addresses, and of the user's names."""
    variables = (os.environ.get(name, "") for name in ("HOSTNAME", "SLURMD_NODENAME"))
    hosts = {socket.gethostname(), os.uname().nodename, *variables}
    hosts |= {host.partition(".")[0] for host in hosts}
    addresses = {
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6, psutil.AF_LINK)
    } - {"127.0.0.1", "::1", "00:00:00:00:00:00"}
    users = {Path.home().name, os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    with suppress(KeyError, OSError):  # a container's number without a name
        users.add(getpass.getuser())
    named = {*filter(_tells, hosts), *addresses}
    return _any_of(named, r"(?:\.[A-Za-z][\w-]*)*"), _any_of(filter(_tells, users))


def _tells(name: str) -> bool:
    return len(name) >= LEAST_LETTERS and name.lower() not in _COMMON


def _any_of(names: Iterable[str], after: str = "") -> re.Pattern[str] | None:
    listed = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"(?<![A-Za-z0-9])(?:{listed}){after}(?![A-Za-z0-9])") if listed else None


MOST_RAW_BYTES = 2**24
"""Of the traces and snapshots themselves in a comparison, the smallest files first."""
RAW = "raw"
"""Folder of what a reader needs only to look closer."""
Runs = Sequence[tuple[Path, Record]]


def pack_matrix(runs: Runs, folder: Path) -> list[str]:
    """Write what a comparison found into a new folder; returns the lines that a person reads of it."""
    (folder / RAW).mkdir(parents=True)
    with tempfile.TemporaryDirectory() as place:
        for _, record in runs:
            own = Path(place, record.run_id, RECORD_NAME)
            own.parent.mkdir()
            own.write_text(json.dumps(nameless_document(json.loads(record_text(record)))), encoding="utf-8")
        named, problems = read_runs([Path(place)])
        packed = archive_runs(named, folder / ARCHIVE_NAME)
    write_report(packed, folder / "report.md", folders=[folder / ARCHIVE_NAME])
    for path, record in runs:
        for kind, tell in TELLERS.items():
            files = [path.parent / part.path for part in record.artifacts if part.kind == kind]
            if files:
                output = folder / f"{_name(record)}.{as_name(kind)}.md"
                problems += _tried(_write, tell, files, output)
    problems += _pack_raw(runs, folder / RAW)
    comparison = Comparison(record for _, record in packed)
    return [terminal_table(comparison), *finding_lines(comparison), *problems]


def _told_traces(files: Sequence[Path]) -> Document:
    ranks = read_traces(files)
    return trace_document(ranks, skew_of(ranks), [likeness_of(rank) for rank in ranks])


TELLERS: dict[str, Callable[[Sequence[Path]], Document]] = {
    "trace": _told_traces,
    "memory snapshot": lambda files: snapshot_document([(f.name, accounts(read_snapshot(f))) for f in files]),
}
"""What reads the files that ranks leave next to their records, by kind."""


def _write(tell: Callable[[Sequence[Path]], Document], files: Sequence[Path], output: Path) -> None:
    write_document(tell(files), output, "harness doctor")


def _pack_raw(runs: Runs, folder: Path) -> list[str]:
    """Copy traces and snapshots without names as far as there is room; a line for those left out."""
    files = [
        (path.parent / part.path, f"{_name(record)}-{part.path}")
        for path, record in runs
        for part in record.artifacts
        if part.kind in TELLERS
    ]
    left, problems, omitted = MOST_RAW_BYTES, list[str](), 0
    for file, name in sorted(files, key=lambda found: found[0].stat().st_size):
        left -= file.stat().st_size
        if left < 0:
            omitted += 1
        else:
            problems += _tried(_copy, file, folder / name)
    return [*problems, *([f"{omitted} traces and snapshots are too large for the bundle"] if omitted else [])]


def kept_trace(file: Path) -> dict[str, Any]:
    """The events of a trace that a run kept (`request.trace_file`)."""
    document: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    return document


def _copy(file: Path, output: Path) -> None:
    if output.suffix == ".gz":
        document = nameless_document(kept_trace(file))
        output.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
    else:
        document = nameless_document(read_snapshot(file))
        output.with_suffix(".json").write_text(json.dumps(document), encoding="utf-8")


def _tried(write: Callable[..., None], *given: Any) -> list[str]:
    """What went wrong: one file that cannot be read costs no other."""
    try:
        write(*given)
    except (HarnessError, OSError, ValueError, EOFError) as error:
        return [f"not packed: {error}"]
    return []


def _name(record: Record) -> str:
    return as_name(f"{record.backend.label}-{record.world.world_size}-{record.repeat}")


FOLDER, CHECKS = "doctor", "checks"
TOLD = ("record.json", "*.log", "*.device.json", "request.json")
"""Files of a check's run that are packed; traces are large and say little more."""
PACKED = "packed"
"""Folder of comparisons that are packed as they are."""
QUESTIONS = {"nvidia-smi.txt": ("nvidia-smi",), "nvidia-smi-topology.txt": ("nvidia-smi", "topo", "-m")}


def check_bundle(path: Path) -> None:
    """Raise HarnessError for a file that could not be written after minutes of runs."""
    if not path.name.endswith(SUFFIX):
        raise HarnessError(f"--bundle was given '{path}'; give a name that ends with {SUFFIX}")
    with refusing(f"--bundle was given '{path}', which cannot be written"):
        try_writing(path)


def write_bundle(path: Path, folder: Path, document: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Pack the runs in `folder`, the document of `--json`, the lines that were printed, and the topology.

    folder: may be empty, where no run was made.
    """
    texts = {"doctor.txt": "\n".join(lines) + "\n"}
    documents: dict[str, Any] = {"doctor.json": document}
    for pattern in ("*.log", *(f"*/*/{told}" for told in TOLD)):
        for file in sorted(folder.glob(pattern)):
            name = f"{CHECKS}/{file.relative_to(folder)}"
            if file.suffix == ".log":
                texts[name] = read_log(file)  # its end
                continue
            text = file.read_text(encoding="utf-8", errors="replace")
            try:
                documents[name] = json.loads(text)
            except ValueError:  # the rank was killed while it wrote
                texts[name] = text
    texts |= {name: _ask(command) for name, command in QUESTIONS.items()}
    packed = folder / PACKED
    files = {str(file.relative_to(packed)): file.read_bytes() for file in packed.rglob("*") if file.is_file()}
    files |= {name: anonymous(text).encode() for name, text in texts.items()}
    files |= {name: json.dumps(anonymous_document(d), indent=1).encode() for name, d in documents.items()}
    write_archive(path, files, folder=FOLDER)


def _ask(command: tuple[str, ...]) -> str:
    """What a tool of the machine prints, or why it does not."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not on PATH\n"
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}\n"
    return (done.stdout + done.stderr).decode(errors="replace")
