"""Energy of the processors as Linux counts it (RAPL under powercap); knows no torch.

Counters are microjoules that start again at 0 after `max_energy_range_uj`
(https://docs.kernel.org/power/powercap/powercap.html).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
MOST_WATTS = 1000.0
"""Of one zone; decides how long a counter can go unread without wrapping twice."""
JOULES = 1e-6


class RaplMeter:
    """Adds up all packages and their DRAM between `begin` and `end`."""

    def __init__(self, root: Path = POWERCAP, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._zones: list[Path] = []
        self._ranges: dict[Path, int] = {}
        self._last: dict[Path, int] = {}
        self._at = 0.0
        self._microjoules = 0
        self.unknown: str | None = "RAPL was not read"
        """Why there is no figure; None: there is one."""

    def begin(self) -> None:
        """Find the zones and note where they stand."""
        self._zones = counted_zones(self._root)
        self.unknown = None if self._zones else f"{self._root} has no RAPL zone of a processor package"
        try:
            self._ranges = {zone: _number(zone / "max_energy_range_uj") for zone in self._zones}
            self._last = {zone: _number(zone / "energy_uj") for zone in self._zones}
        except (OSError, ValueError) as error:
            self.unknown = _why(error)
        self._at = self._clock()

    def poll(self) -> None:
        """Add what was counted since the last reading."""
        if self.unknown is not None:
            return
        now = self._clock()
        gap, self._at = now - self._at, now
        try:
            for zone in self._zones:
                self._add(zone, _number(zone / "energy_uj"), gap)
        except (OSError, ValueError) as error:
            self.unknown = _why(error)

    def joules(self) -> float | None:
        """All since `begin`, as of the last `poll`."""
        return None if self.unknown is not None else self._microjoules * JOULES

    def _add(self, zone: Path, value: int, gap: float) -> None:
        span = self._ranges[zone]
        if gap * MOST_WATTS > span * JOULES:
            self.unknown = f"{zone.name} went unread for {gap:.0f} s, in which its counter may wrap twice"
        self._microjoules += (value - self._last[zone]) % span if span else value - self._last[zone]
        self._last[zone] = value


def counted_zones(root: Path) -> list[Path]:
    """Packages, and the DRAM next to them; 'core' and 'uncore' are parts of a package, 'psys' contains it."""
    found = []
    for zone in sorted(root.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
        except OSError:
            continue
        if name.startswith("package") or name == "dram":
            found.append(zone)
    return found


def _number(path: Path) -> int:
    return int(path.read_text())


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return f"{error.filename} may be read by root only; have the administrator allow it"
    return f"RAPL cannot be read: {error}"
