"""Packs what a check of a GPU machine found, for a bug report: text without secrets."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.record.archive import SUFFIX, write_archive
from harness.record.store import try_writing
from harness.run_directory.rank_state import read_log, shown_text
from harness.safe_text import harmless

FOLDER = "doctor"
TOLD = ("record.json", "*.log", "*.device.json", "request.json")
"""Files of a run that are packed; traces are large and say little more."""
QUESTIONS = {
    "nvidia-smi.txt": ("nvidia-smi",),
    "nvidia-smi-topology.txt": ("nvidia-smi", "topo", "-m"),
}


def check_bundle(path: Path) -> None:
    """Raise HarnessError for a file that could not be written after minutes of runs."""
    if not path.name.endswith(SUFFIX):
        raise HarnessError(f"--bundle was given '{path}'; give a name that ends with {SUFFIX}")
    try:
        try_writing(path)
    except OSError as error:
        raise HarnessError(
            f"--bundle was given '{path}', which cannot be written: {error.strerror}"
        ) from error


def write_bundle(path: Path, folder: Path, document: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Pack the runs in `folder`, the document of `--json`, the lines that were printed, and the topology.

    folder: may lack, where no run was made.
    """
    files = {"doctor.json": json.dumps(document, indent=1), "doctor.txt": "\n".join(lines) + "\n"}
    for pattern in ("*.log", *(f"*/*/{told}" for told in TOLD)):
        for file in sorted(folder.glob(pattern)):
            # Of a log, the end; documents are packed whole, to stay JSON.
            is_log = file.suffix == ".log"
            text = read_log(file) if is_log else file.read_text(encoding="utf-8", errors="replace")
            files[str(file.relative_to(folder))] = text
    files |= {name: _ask(command) for name, command in QUESTIONS.items()}
    safe = {name: shown_text(harmless(text)).encode() for name, text in files.items()}
    write_archive(path, safe, folder=FOLDER)


def _ask(command: tuple[str, ...]) -> str:
    """What a tool of the machine prints, or why it does not."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not on PATH\n"
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}\n"
    return (done.stdout + done.stderr).decode(errors="replace")
