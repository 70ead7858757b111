"""The most memory that this process had of its own while it was watched."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

STATUS = Path("/proc/self/status")
INTERVAL_SECONDS = 0.005


def anonymous_bytes() -> int | None:
    """Resident memory that is not backed by a file; None where the system does not tell.

    Mapped pages of a file of weights are left out: they are the system's cache, once for all ranks.
    """
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("RssAnon:")), None)
    return None if kib is None else int(kib) * 1024


class HostPeak:
    """Samples `anonymous_bytes` from a thread; a peak shorter than the interval may be missed."""

    def __init__(self) -> None:
        self.before_bytes = anonymous_bytes()
        self.peak_bytes = self.before_bytes
        self.after_bytes: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> HostPeak:
        if self.before_bytes is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self.before_bytes is not None:
            self._thread.join()
            self._note()
        self.after_bytes = anonymous_bytes()

    def _sample(self) -> None:
        while not self._end.wait(INTERVAL_SECONDS):
            self._note()

    def _note(self) -> None:
        self.peak_bytes = max(self.peak_bytes or 0, anonymous_bytes() or 0)
