"""What a process that answers a launcher's question says meanwhile: what it is doing, and what takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_send: Callable[[Any], None] | None = None


def tell_through(send: Callable[[Any], None]) -> None:
    """Have what is told reach the launcher."""
    global _send
    _send = send


def tell(text: str) -> None:
    """A line for the person who waits; a rank, whose launcher asked nothing, keeps it."""
    if _send is not None:
        _send({"note": text})


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Name code of the user's own while it runs: it may end the process, or never return."""
    if _send is not None:
        _send({"doing": what})
    yield
    if _send is not None:
        _send({"doing": None})
