"""Folders that a session of tests leaves to the next, each under a fingerprint of all that it depends on."""

import hashlib
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.made_once import MadeOnce

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".kept-by-tests"
UNUSED_SECONDS = 2 * 3600.0
"""A session of tests that uses a folder is over within these."""
OF_RECORDS_ALONE = (
    "api", "cli", "diagnose", "doctor", "exported", "fabric", "judge", "labs", "plan", "slurm", "tell",
)  # fmt: skip
"""Packages of the harness that neither ranks nor their launcher may import (`lint-imports`)."""
SOURCES = (".py", ".cpp", ".toml", ".yaml", ".json", ".jinja", ".xz")


def caches() -> Path:
    """What libraries and the harness keep for a user; all sources of the harness decide about it."""
    return _folder("caches", [ROOT / "harness", ROOT / "backends"])


@cache
def runs() -> MadeOnce:
    """What ranks left: neither what reads their records nor the tests' own modules decide about it."""
    packages = [path for path in sorted((ROOT / "harness").iterdir()) if path.name not in OF_RECORDS_ALONE]
    return MadeOnce(_folder("runs", [*packages, ROOT / "backends", ROOT / "tests"]))


def _folder(purpose: str, places: list[Path]) -> Path:
    """The folder of this purpose, sources, interpreter, libraries and machine; older ones are removed."""
    digest = hashlib.sha256("\n".join(_installed()).encode())
    for file in (file for place in places for file in _sources(place)):
        digest.update(f"\0{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    folder = KEPT / f"{purpose}-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in KEPT.glob(f"{purpose}-*"):
        with suppress(FileNotFoundError):  # another worker was first
            if other.stat().st_mtime < time.time() - UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def _sources(place: Path) -> Iterator[Path]:
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    return (f for f in files if f.suffix in SOURCES and f.is_file() and not f.name.startswith("test_"))


def _installed() -> list[str]:
    packages = sorted(path.name for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))
    return [sys.version, platform.node(), str(os.cpu_count()), *packages]
