"""Packs what a check of a GPU machine found, to be sent: text without secrets, hosts, users and folders."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.doctor.gpu.anonymous import anonymous, anonymous_document
from harness.errors import HarnessError
from harness.record.archive import SUFFIX, write_archive
from harness.record.store import try_writing
from harness.run_directory.rank_state import read_log

FOLDER, CHECKS = "doctor", "checks"
TOLD = ("record.json", "*.log", "*.device.json", "request.json")
"""Files of a check's run that are packed; traces are large and say little more."""
PACKED = "packed"
"""Folder of comparisons that are packed as they are."""
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
