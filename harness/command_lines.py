"""Command lines to keep: without passwords, and absolute paths of configuration files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from harness.secret_patterns import REDACTED

OPTION = "--config"
PASSWORD_OPTION = "-p"
NO_PASSWORD = re.compile(r"[\d.,:/-]+")
"""Ports and their mappings."""
PARTITION = ("srun", "sbatch", "salloc")
"""Programs whose -p is a partition."""


def without_passwords(words: Sequence[str]) -> list[str]:
    """The words without those after -p, which is a password of many programs."""
    kept = list(words)
    for index in range(1, len(kept)):
        is_of_slurm = any(Path(word).name in PARTITION for word in words[: index - 1])
        if (
            words[index - 1] == PASSWORD_OPTION
            and not is_of_slurm
            and not NO_PASSWORD.fullmatch(words[index])
        ):
            kept[index] = REDACTED
    return kept


KeptCommand = Annotated[list[str], AfterValidator(without_passwords)]
"""The words of a command in a file that is kept."""


def inside(folder: Path, words: Sequence[str]) -> list[str]:
    """Absolute configuration files in a folder as they are called from there."""
    return _changed(
        words, lambda path: str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
    )


def by_name(words: Sequence[str]) -> list[str]:
    """Absolute configuration files by their names."""
    return _changed(words, lambda path: path.name)


def _changed(words: Sequence[str], change: Callable[[Path], str]) -> list[str]:
    changed = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        if before == OPTION and Path(word).is_absolute():
            word = change(Path(word))
        elif option == OPTION and equals and Path(value).is_absolute():
            word = f"{OPTION}={change(Path(value))}"
        changed.append(word)
    return changed
