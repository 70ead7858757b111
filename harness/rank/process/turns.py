"""Waits for this cell's turn while the ranks of others take timed steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from harness.run_directory.events import TurnEvent


class Turns:
    """Those that the launcher gives this rank."""

    def __init__(self, launcher: Connection) -> None:
        self._launcher = launcher
        self._left = 0
        self.before_first: Callable[[], None] = lambda: None
        """Writes what was measured, which then outlives a rank that is killed in a turn."""

    @property
    def is_over(self) -> bool:
        """Whether the next timed step belongs to another turn."""
        return self._left == 0

    def count(self) -> None:
        """A step of the turn begins."""
        self._left -= 1

    def wait(self) -> TurnEvent:
        """Tell the launcher that this rank waits, and sleep in `read` until it answers."""
        self.before_first()
        self.before_first = lambda: None
        begin, used = time.perf_counter(), time.process_time()
        self._launcher.send_bytes(b"")
        turn = TurnEvent.model_validate_json(self._launcher.recv_bytes())
        self._left = turn.steps
        return turn.model_copy(
            update={
                "waited_seconds": round(time.perf_counter() - begin, 9),
                "waited_process_seconds": round(time.process_time() - used, 9),
            }
        )
