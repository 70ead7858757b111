"""Command lines without the absolute paths of configuration files, which are nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

OPTION = "--config"


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
