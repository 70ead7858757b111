"""What is computed once for a record or a row, however many sections of a report ask for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import finalize

Source = TypeVar("Source")
Figure = TypeVar("Figure")


def once(measure: Callable[[Source], Figure]) -> Callable[[Source], Figure]:
    """The measure, taken once of each record or row, which never change; forgotten when they are."""
    known: dict[int, Figure] = {}

    @wraps(measure)
    def remembered(source: Source) -> Figure:
        key = id(source)
        if key not in known:
            known[key] = measure(source)
            finalize(source, known.pop, key).atexit = False
        return known[key]

    return remembered
