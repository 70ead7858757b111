"""Energy and power of one GPU as NVML tells them; knows no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

MILLI = 1e-3


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
        self.joules: float | None = None
        self.unknown: str | None = library if isinstance(library, str) else None

    def begin(self) -> None:
        """Note where the counter stands."""
        if self.unknown is not None:
            return
        try:
            self._handle = self._library.nvmlDeviceGetHandleByUUID(self._uuid)
            self._first = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except (self._library.NVMLError, AttributeError) as error:
            self.unknown = f"NVML has no energy counter for this device: {error}"
        self._since = self._clock()

    def read(self) -> None:
        """Set `joules`."""
        if self.unknown is not None:
            return
        try:
            now = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._library.NVMLError as error:
            self.unknown = f"NVML: {error}"
            return
        if now < self._first:
            self.unknown = "the driver's energy counter went back: the driver was loaded again"
        else:
            self.joules = (now - self._first) * MILLI

    def sampled_watts(self) -> float | None:
        """Mean power of the samples that the driver kept since `begin`; None: it keeps none."""
        if self.unknown is not None:
            return None
        library = self._library
        begin, end = int(self._since * 1e6), int(self._clock() * 1e6)
        try:
            _, samples = library.nvmlDeviceGetSamples(self._handle, library.NVML_TOTAL_POWER_SAMPLES, begin)
        except (library.NVMLError, AttributeError):
            return None
        watts = [s.sampleValue.uiVal * MILLI for s in samples if begin <= s.timeStamp <= end]
        return sum(watts) / len(watts) if watts else None

    def limit_watts(self) -> float | None:
        """The power limit in force; None: not told."""
        if self.unknown is not None:
            return None
        try:
            return float(self._library.nvmlDeviceGetEnforcedPowerLimit(self._handle)) * MILLI
        except (self._library.NVMLError, AttributeError):
            return None
