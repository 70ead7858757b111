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


def read_later(library: Any, seconds: float = 10.0) -> tuple[Any, ...]:
    """Joules, sampled watts, the limit in watts, and why they are not known."""
    times = iter([100.0, 100.0 + seconds])
    found = DeviceEnergy(library, UUID, clock=lambda: next(times)).read()
    names = ("joules", "sampled_watts", "limit_watts", "unknown")
    return tuple(getattr(found, f"device_{name}") for name in names)


def test_energy_is_the_difference_of_the_counter() -> None:
    """A driver may keep no samples; of those that it keeps, the ones of that time count."""
    assert read_later(Nvml(5_000_000, 9_500_000)) == (pytest.approx(4500.0), None, 700.0, None)
    samples = {99.0: 900_000, 101.0: 400_000, 109.0: 500_000, 111.0: 900_000}
    assert read_later(Nvml(0, 1, samples=samples))[1] == pytest.approx(450.0)


def test_a_counter_that_had_no_time_to_move_gives_no_figure() -> None:
    why = "timed for 0.043 s: the counter needs 1 s"
    assert read_later(Nvml(5_000, 5_000, samples={100.01: 126_000}), 0.043) == (None, None, None, why)


@pytest.mark.parametrize(
    ("library", "why"),
    [
        ("nvidia-ml-py is not installed (extra `nvml`)", "nvidia-ml-py is not installed (extra `nvml`)"),
        (Nvml("Not Supported"), "NVML has no energy counter for this device: Not Supported"),
        (Nvml(5, "GPU is lost"), "NVML: GPU is lost"),
        (Nvml(5, 4), "the driver's energy counter went back: the driver was loaded again"),
        (
            SimpleNamespace(NVMLError=Nvml.NVMLError, nvmlDeviceGetHandleByUUID=str),
            "NVML has no energy counter for this device: 'types.SimpleNamespace' object has no attribute "
            "'nvmlDeviceGetTotalEnergyConsumption'",
        ),
    ],
    ids=["no library", "no counter", "lost", "reset", "old library"],
)
def test_what_is_not_known_has_a_reason(library: Any, why: str) -> None:
    assert read_later(library) == (None, None, None, why)
