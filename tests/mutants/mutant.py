"""A fault of the source: where it is, what goes wrong there, which guarantee that breaks, which tests notice.

Neither places nor tests name files, so that what moves or is formatted otherwise keeps its faults.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.mutants.faults import Fault, StaleError, definitions, planted

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("harness", "backends", "benchmarks")
DEFINED = re.compile(r"^[ \t]*(?:(?:def|class) (\w+)|(\w+)(?::[^\n=]*)? = )", re.MULTILINE)


class Mutant(NamedTuple):
    """One fault."""

    name: str
    place: str
    """A function, method or constant by its qualified name; where several have that name 'part:name', with a
    folder or file (without ending) above it. Of data the file's name."""
    fault: Fault
    guarantee: str
    tests: str
    """Test functions, separated by spaces; '[id]' picks a case, 'part:test' a folder or file as above."""

    @property
    def file(self) -> str:
        """The file of the place, from the root; StaleError: there is none or there are several."""
        return one(self.place, found(self.place, SOURCES))

    @property
    def nodes(self) -> list[str]:
        """The node ids of its tests."""
        return [_node(test) for test in self.tests.split()]

    @property
    def subsystem(self) -> str:
        """The folder of `harness`, 'backends', or 'harness' for its own modules."""
        top, folder, *below = self.file.split("/")
        return folder if top == "harness" and below else top

    def applied(self, given: str) -> str:
        """The text of its file with the fault; StaleError: the text has no place for it."""
        name = self.place.partition(":")[2] or self.place
        return planted(given, name, self.fault)

    def stale(self) -> str | None:
        """Why the fault cannot be planted and noticed in this tree; None: it can."""
        try:
            given = (ROOT / self.file).read_text(encoding="utf-8")
            self.applied(given)
            self.nodes  # noqa: B018 - it names tests that exist
        except StaleError as error:
            return f"{self.name}: {error}"
        return None


def found(place: str, tops: tuple[str, ...]) -> list[str]:
    """The files that define the place."""
    part, _, name = place.rpartition(":")
    if name.endswith(".toml"):
        return [path for path in _texts(tops) if Path(path).name == name]
    return [
        path for path in _index(tops).get(name.rpartition(".")[2], ())
        if (not part or part in Path(path).with_suffix("").parts) and name in definitions(_texts(tops)[path])
    ]  # fmt: skip


def one(place: str, files: list[str]) -> str:
    if len(files) != 1:
        raise StaleError(f"{place} is in {', '.join(files) or 'no file'}")
    return files[0]


def _node(test: str) -> str:
    place, bracket, case = test.partition("[")
    return f"{one(place, found(place, ('tests',)))}::{place.rpartition(':')[2]}{bracket}{case}"


@cache
def _texts(tops: tuple[str, ...]) -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for top in tops for ending in ("py", "toml") for path in sorted((ROOT / top).rglob(f"*.{ending}"))
    }  # fmt: skip


@cache
def _index(tops: tuple[str, ...]) -> dict[str, list[str]]:
    """Which files may define a name: it begins a line of theirs."""
    index: dict[str, list[str]] = {}
    for path, text in _texts(tops).items():
        if path.endswith(".py"):
            for name in {name for pair in DEFINED.findall(text) for name in pair}:
                index.setdefault(name, []).append(path)
    return index
