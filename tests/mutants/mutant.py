"""A fault of the source: what changes where, which guarantee that breaks, and which tests must notice it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Mutant(NamedTuple):
    """One fault: a text of a file that becomes another."""

    name: str
    file: str
    before: str
    after: str
    guarantee: str
    tests: str
    """Functions by their node ids below `tests`, separated by spaces."""

    @property
    def nodes(self) -> list[str]:
        return [f"tests/{test}" for test in self.tests.split()]

    @property
    def subsystem(self) -> str:
        """The folder of `harness`, 'backends', or 'harness' for its own modules."""
        top, folder, *below = self.file.split("/")
        return folder if top == "harness" and below else top

    def stale(self, given: str) -> str | None:
        """Why the file is another than the one that this fault was made for; None: it is that one."""
        count = given.count(self.before)
        return None if count == 1 else f"{self.before!r} stands {count} times in {self.file}"

    def applied(self, given: str) -> str:
        return given.replace(self.before, self.after)
