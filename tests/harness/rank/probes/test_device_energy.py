"""NVML's counter, by a library that answers as NVML does."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.rank.probes.energy import DeviceEnergy

UUID = "uuid"


class Nvml:
    """Answers as pynvml; `energy` holds the millijoules of each further question."""

    NVML_TOTAL_POWER_SAMPLES = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *energy: int | str, samples: dict[float, int] | None = None) -> None:
        self._energy, self._samples = list(energy), samples

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == f"GPU-{UUID}"
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        value = self._energy.pop(0)
        if isinstance(value, str):
            raise self.NVMLError(value)
        return value

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetSamples(self, handle: str, kind: int, since: int) -> tuple[int, list[Any]]:
        if self._samples is None:
            raise self.NVMLError("Not Supported")
        return 1, [
            SimpleNamespace(timeStamp=int(at * 1e6), sampleValue=SimpleNamespace(uiVal=milliwatts))
            for at, milliwatts in self._samples.items()
        ]


def read(library: Any) -> DeviceEnergy:
    """After 10 seconds."""
    times = iter([100.0, 110.0])
    energy = DeviceEnergy(library, UUID, clock=lambda: next(times))
    energy.begin()
    energy.read()
    return energy


def test_energy_is_the_difference_of_the_counter() -> None:
    energy = read(Nvml(5_000_000, 9_500_000))
    assert energy.joules == pytest.approx(4500.0)
    assert energy.limit_watts() == 700.0
    assert energy.unknown is None


def test_only_samples_of_that_time_count() -> None:
    energy = read(Nvml(0, 1, samples={99.0: 900_000, 101.0: 400_000, 109.0: 500_000, 111.0: 900_000}))
    assert energy.sampled_watts() == pytest.approx(450.0)


def test_a_driver_without_samples_tells_none() -> None:
    assert read(Nvml(0, 1)).sampled_watts() is None


@pytest.mark.parametrize(
    ("library", "why"),
    [
        ("nvidia-ml-py is not installed (extra `nvml`)", "nvidia-ml-py is not installed (extra `nvml`)"),
        (Nvml("Not Supported"), "NVML has no energy counter for this device: Not Supported"),
        (Nvml(5, "GPU is lost"), "NVML: GPU is lost"),
        (Nvml(5, 4), "the driver's energy counter went back: the driver was loaded again"),
    ],
    ids=["no library", "no counter", "lost", "reset"],
)
def test_what_is_not_known_has_a_reason(library: Any, why: str) -> None:
    energy = read(library)
    assert (energy.joules, energy.unknown) == (None, why)
    assert (energy.sampled_watts(), energy.limit_watts()) == (None, None)


def test_a_library_without_the_counter_has_a_reason() -> None:
    energy = read(SimpleNamespace(NVMLError=Nvml.NVMLError, nvmlDeviceGetHandleByUUID=lambda uuid: uuid))
    assert energy.joules is None
    assert "no energy counter" in str(energy.unknown)
