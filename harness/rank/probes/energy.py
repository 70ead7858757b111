"""Energy of a rank's GPU while steps are timed; read between steps, never within one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from harness.forms.textbook import is_stub
from harness.rank.probes.memory import device_handle, nvml
from harness.record import EnergyPart

MILLI = 1e-3
LEAST_SECONDS = 1.0
"""In which the counter is read to a tenth: it moves in steps of some 100 ms (seen: H200)."""


class DeviceEnergy:
    """The driver's energy counter since this was made.

    library: pynvml after `nvmlInit`, or a sentence why there is none. The counter is millijoules since the
    driver was loaded (Volta and later, `nvmlDeviceGetTotalEnergyConsumption`).
    """

    def __init__(self, library: Any, device_uuid: str, clock: Callable[[], float] = time.time) -> None:
        self._library, self._clock = library, clock
        self._handle: Any = None
        self._first = 0
        self._unknown: str | None = library if isinstance(library, str) else None
        if self._unknown is None:
            try:
                self._handle = device_handle(library, device_uuid)
                self._first = library.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            except (library.NVMLError, AttributeError) as error:
                self._unknown = f"NVML has no energy counter for this device: {error}"
        self._since, self._began = clock(), time.perf_counter()

    @classmethod
    def of_this_rank(cls) -> DeviceEnergy:
        """Of the GPU that the rank computes on."""
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls("a CUDA stub draws no power" if is_stub(device.name) else nvml(), str(device.uuid))

    def read(self) -> EnergyPart:
        """Joules and power so far, or why they are not known."""
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
        return EnergyPart(
            seconds=time.perf_counter() - self._began,
            device_joules=(now - self._first) * MILLI if self._unknown is None else None,
            device_unknown=self._unknown,
            device_sampled_watts=sum(watts) / len(watts) if watts else None,
            device_limit_watts=None if limit is None else float(limit) * MILLI,
        )

    def _asked(self, function: str, *arguments: Any) -> Any:
        """None: the driver does not say."""
        try:
            return getattr(self._library, function)(self._handle, *arguments)
        except (self._library.NVMLError, AttributeError):
            return None
