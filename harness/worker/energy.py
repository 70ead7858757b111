"""Energy of a rank's GPU and machine while steps are timed; read between steps, never within one."""

from __future__ import annotations

import time

import torch

from harness.forms.flops import is_stub
from harness.record import EnergyPart
from harness.worker.device_energy import DeviceEnergy
from harness.worker.process_memory import nvml
from harness.worker.processor_account import boot
from harness.worker.rapl import RaplMeter

SECONDS_BETWEEN_READINGS = 10.0


class EnergyMeter:
    """What was used between the first `poll`, which begins, and `end`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._host = RaplMeter()
        self._gpu: DeviceEnergy | None = None
        self._began: float | None = None
        self._read_at = 0.0

    def poll(self) -> None:
        """Begin, or read counters that would wrap; most calls do nothing."""
        now = time.perf_counter()
        if self._began is None:
            self._gpu = gpu_energy() if self._device == "cuda" else None
            self._host.begin()
            if self._gpu is not None:
                self._gpu.begin()
            self._began = self._read_at = time.perf_counter()
        elif now - self._read_at >= SECONDS_BETWEEN_READINGS:
            self._host.poll()
            self._read_at = now

    def end(self) -> EnergyPart | None:
        """What was counted since; None: no step was timed."""
        if self._began is None:
            return None
        seconds = time.perf_counter() - self._began
        self._host.poll()
        gpu = self._gpu
        if gpu is not None:
            gpu.read()
        return EnergyPart(
            seconds=seconds,
            device_joules=gpu.joules if gpu else None,
            device_unknown=gpu.unknown if gpu else None,
            device_sampled_watts=gpu.sampled_watts() if gpu else None,
            device_limit_watts=gpu.limit_watts() if gpu else None,
            host_joules=self._host.joules(),
            host_unknown=self._host.unknown,
            boot=boot(),
        )


def gpu_energy() -> DeviceEnergy:
    """The counter of this rank's GPU, or why there is none."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    if is_stub(device.name):
        return DeviceEnergy("a CUDA stub draws no power", "")
    return DeviceEnergy(nvml(), f"GPU-{device.uuid}")
