"""Packages of `harness doctor --gpu --full` that users sent: what the gallery says, and what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from harness.record.store import ARCHIVE_NAME, read_runs
from harness.tell.verify import verify

FOLDER = "gpu"
NONE = (
    "No figure of a GPU exists until somebody has sent one: `harness doctor --gpu --full --bundle FILE` "
    "makes a package in ten minutes at most."
)


def sent(reports: Path) -> list[Path]:
    """The folders of packages."""
    return sorted(path for path in (reports / FOLDER).glob("*") if path.is_dir())


def section(reports: Path) -> str:
    """What the gallery says: each package with its machine, or that there is none."""
    lines = [_line(reports, package) for package in sent(reports)]
    return "\n".join([f"### [Measured on GPUs]({FOLDER}/README.md)", "", *(lines or [NONE])])


def problems(package: Path) -> list[str]:
    """Why a package cannot be published; none for one that can."""
    document = _document(package)
    devices = set(document.get("devices", ()))
    found = [] if devices and not document.get("is_stub") else ["doctor.json names no GPU"]
    reports = sorted(package.rglob("report.md"))
    found += [] if reports else ["no report is in it"]
    for report in reports:
        found += [f"{report.parent.name}: {problem}" for problem in verify(report).problems]
        for _, record in read_runs([report.with_name(ARCHIVE_NAME)])[0]:
            other = {rank.device_name for rank in record.ranks} - devices
            if other:
                found.append(f"{record.run_id} ran on {', '.join(map(str, other))}, doctor.json names others")
    return found


def _document(package: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((package / "doctor.json").read_text(encoding="utf-8"))
    return document


def _line(reports: Path, package: Path) -> str:
    document = _document(package)
    machine = " and ".join(f"{count} x {name}" for name, count in Counter(document["devices"]).items())
    failed = ", ".join(document["failed"])
    checks = f"failed: {failed}" if failed else "no check failed"
    found = sorted(package.rglob("report.md"))
    links = ", ".join(f"[{path.parent.name}]({path.relative_to(reports).as_posix()})" for path in found)
    return f"- {machine}, {document['torch']}: {checks}; {links}"
