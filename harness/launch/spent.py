"""Processor time that this process and all that it started have used, dead ones included."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds since some beginning."""

    processor_seconds: float
    """User and system time of all processes; other programs hardly change it, unlike the time on the wall."""
    wall_seconds: float

    @classmethod
    def so_far(cls) -> Spent:
        """Up to now. A process that ended counts once its parent has waited for it."""
        this = psutil.Process()
        total = 0.0
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])
        return cls(processor_seconds=total, wall_seconds=time.monotonic())

    def __sub__(self, earlier: Spent) -> Spent:
        return Spent(
            processor_seconds=self.processor_seconds - earlier.processor_seconds,
            wall_seconds=self.wall_seconds - earlier.wall_seconds,
        )

    def __str__(self) -> str:
        return f"{self.processor_seconds:.0f} s of processor time, {self.wall_seconds:.0f} s"
