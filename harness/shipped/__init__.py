"""Files that every installation brings: example configurations and sites, named '@default', '@ibex'.

`configs` and `sites` are links to the folders of the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from harness.backends.refusals import available
from harness.errors import HarnessError

MARK = "@"
Kind = Literal["configs", "sites"]


def names(kind: Kind) -> list[str]:
    """The names of a kind, each with the mark in front."""
    files = (path.relative_to(_folder(kind)) for path in _folder(kind).rglob("*.yaml"))
    return sorted(f"{MARK}{path.with_suffix('').as_posix()}" for path in files)


def resolve(given: Path, kind: Kind) -> Path:
    """The file that '@default' names; any other path as it is. Raises HarnessError for an unknown name."""
    name = str(given)
    if not name.startswith(MARK) or given.exists():
        return given
    if name not in names(kind):
        what = "configuration" if kind == "configs" else "site"
        raise HarnessError(f"{what} '{name}' is not shipped. {available(name, names(kind))}")
    return _folder(kind) / f"{name.removeprefix(MARK)}.yaml"


def _folder(kind: Kind) -> Path:
    return Path(__file__).parent / kind
