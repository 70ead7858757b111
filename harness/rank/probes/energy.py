"""Energy of a rank's GPU and machine while steps are timed; read between steps, never within one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from harness.forms.textbook import is_stub
from harness.rank.probes.memory import device_handle, nvml
from harness.rank.probes.time import boot
from harness.record import EnergyPart

MILLI = 1e-3
LEAST_SECONDS = 1.0
"""In which the counter is read to a tenth: it moves in steps of some 100 ms (seen: H200)."""


class DeviceEnergy:
    """The driver's energy counter between `begin` and `read`.

    library: pynvml after `nvmlInit`, or a sentence why there is none. The counter is millijoules since the
    driver was loaded (Volta and later, `nvmlDeviceGetTotalEnergyConsumption`).
    """

    def __init__(self, library: Any, device_uuid: str, clock: Callable[[], float] = time.time) -> None:
        self._library, self._uuid, self._clock = library, device_uuid, clock
        self._handle: Any = None
        self._first = 0
        self._since = 0.0
        self._unknown: str | None = library if isinstance(library, str) else None

    def begin(self) -> None:
        """Note where the counter stands."""
        if self._unknown is not None:
            return
        try:
            self._handle = device_handle(self._library, self._uuid)
            self._first = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except (self._library.NVMLError, AttributeError) as error:
            self._unknown = f"NVML has no energy counter for this device: {error}"
        self._since = self._clock()

    def read(self) -> dict[str, Any]:
        """Fields of `record.EnergyPart`: joules and power since `begin`, or why they are not known."""
        now, watts, at = 0, list[float](), self._clock()
        limit: float | None = None
        if self._unknown is None:
            try:
                now = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            except self._library.NVMLError as error:
                self._unknown = f"NVML: {error}"
            else:
                seconds = at - self._since
                if now < self._first:
                    self._unknown = "the driver's energy counter went back: the driver was loaded again"
                elif seconds < LEAST_SECONDS:
                    self._unknown = f"timed for {seconds:.2g} s: the counter needs {LEAST_SECONDS:g} s"
        if self._unknown is None:
            # Of the samples that the driver kept since then; it may keep none.
            begin, end = int(self._since * 1e6), int(at * 1e6)
            kind = getattr(self._library, "NVML_TOTAL_POWER_SAMPLES", None)
            _, samples = self._asked("nvmlDeviceGetSamples", kind, begin) or (0, [])
            watts = [s.sampleValue.uiVal * MILLI for s in samples if begin <= s.timeStamp <= end]
            limit = self._asked("nvmlDeviceGetEnforcedPowerLimit")
        return {
            "device_joules": (now - self._first) * MILLI if self._unknown is None else None,
            "device_unknown": self._unknown,
            "device_sampled_watts": sum(watts) / len(watts) if watts else None,
            "device_limit_watts": None if limit is None else float(limit) * MILLI,
        }

    def _asked(self, function: str, *arguments: Any) -> Any:
        """None: the driver does not say."""
        try:
            return getattr(self._library, function)(self._handle, *arguments)
        except (self._library.NVMLError, AttributeError):
            return None


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
        """Find the zones and note where they stand: packages, and the DRAM next to them.

        'core' and 'uncore' are parts of a package, 'psys' contains it.
        """
        self._zones = []
        for zone in sorted(self._root.glob("intel-rapl:*")):
            with suppress(OSError):
                name = (zone / "name").read_text().strip()
                self._zones += [zone] if name.startswith("package") or name == "dram" else []
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
                value, span = _number(zone / "energy_uj"), self._ranges[zone]
                if gap * MOST_WATTS > span * JOULES:
                    self.unknown = (
                        f"{zone.name} went unread for {gap:.0f} s, in which its counter may wrap twice"
                    )
                added = value - self._last[zone]
                self._microjoules += added % span if span else added
                self._last[zone] = value
        except (OSError, ValueError) as error:
            self.unknown = _why(error)

    def joules(self) -> float | None:
        """All since `begin`, as of the last `poll`."""
        return None if self.unknown is not None else self._microjoules * JOULES


def _number(path: Path) -> int:
    return int(path.read_text())


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return f"{error.filename} may be read by root only; have the administrator allow it"
    return f"RAPL cannot be read: {error}"


SECONDS_BETWEEN_READINGS = 10.0


class EnergyMeter:
    """What was used between each `poll` that begins, the first one or after a `rest`, and `rest` or `end`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._host = RaplMeter()
        self._gpu: DeviceEnergy | None = None
        self._has_begun = False
        self._since: float | None = None
        self._seconds = 0.0
        self._read_at = 0.0

    def poll(self) -> None:
        """Begin, or read counters that would wrap; most calls do nothing."""
        now = time.perf_counter()
        if self._since is not None:
            if now - self._read_at >= SECONDS_BETWEEN_READINGS:
                self._host.poll()
                self._read_at = now
            return
        if not self._has_begun or self._host.unknown is None:
            self._host.begin()
        if not self._has_begun and self._device == "cuda":
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            library = "a CUDA stub draws no power" if is_stub(device.name) else nvml()
            self._gpu = DeviceEnergy(library, str(device.uuid))
            self._gpu.begin()
        self._has_begun = True
        self._since = self._read_at = time.perf_counter()

    def rest(self) -> None:
        """Count no further until the next `poll`; a GPU's counter goes on."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None
            self._host.poll()

    def end(self) -> EnergyPart | None:
        """What was counted; None: no step was timed."""
        if not self._has_begun:
            return None
        self.rest()
        return EnergyPart(
            seconds=self._seconds,
            **(self._gpu.read() if self._gpu is not None else {}),
            host_joules=self._host.joules(),
            host_unknown=self._host.unknown,
            boot=boot(),
        )
