"""Whether the libraries are there that ranks load; the launcher itself, reports and estimates need none."""

from __future__ import annotations

from harness.backends.library_facts import absent
from harness.errors import HarnessError

EVERY_RANK = ("torch", "transformers")
"""Distributions that each rank imports, whatever its backend."""
EXTRA = "pip install 'sharding-harness[train]'"


def require_libraries(what: str, packages: tuple[str, ...] = EVERY_RANK) -> None:
    """Raise HarnessError where one of these distributions is not installed. what: who needs them, plural."""
    if missing := absent(packages):
        are = "is" if len(missing) == 1 else "are"
        raise HarnessError(f"{' and '.join(missing)} {are} not installed, which {what} need: {EXTRA}")
