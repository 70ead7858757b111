"""NVML's counter, by a library that answers as NVML does; RAPL on a folder as the kernel lays it out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.rank.probes.energy import DeviceEnergy, RaplMeter

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
    energy = DeviceEnergy(library, UUID, clock=lambda: next(times))
    energy.begin()
    found = energy.read()
    names = ("joules", "sampled_watts", "limit_watts", "unknown")
    return tuple(found.pop(f"device_{name}") for name in names)


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


RANGE = 262_143_328_850
"""Microjoules, of a common package."""


def zone(root: Path, number: str, name: str, energy: int, span: int = RANGE) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{span}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    return folder


class Metered:
    """A meter whose seconds are set by hand, and what it says after readings."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.meter = RaplMeter(folder, lambda: self.now)
        self.meter.begin()

    def read(self, now: float = 1.0) -> tuple[float | None, str | None]:
        self.now = now
        self.meter.poll()
        return self.meter.joules(), self.meter.unknown


def test_packages_and_dram_count_and_their_parts_do_not(tmp_path: Path) -> None:
    zones = (("0", "package-0", 50), ("0:0", "core", 40), ("0:1", "dram", 7), ("1", "psys", 90))
    for number, name, _ in zones:
        zone(tmp_path, number, name, 1_000_000)
    metered = Metered(tmp_path)
    for number, name, joules in zones:
        zone(tmp_path, number, name, 1_000_000 + joules * 1_000_000)
    assert metered.read() == (pytest.approx(57.0), None)


def test_a_counter_that_wrapped_goes_on(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", RANGE - 3_000_000)
    metered = Metered(tmp_path)
    zone(tmp_path, "0", "package-0", 2_000_000)
    assert metered.read(10.0) == (pytest.approx(5.0), None)
    zone(tmp_path, "0", "package-0", 9_000_000)
    assert metered.read(20.0) == (pytest.approx(12.0), None)


def test_a_counter_that_may_have_wrapped_twice_has_no_figure(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 0)
    joules, why = Metered(tmp_path).read(300.0)
    assert joules is None
    assert "intel-rapl:0 went unread for 300 s" in str(why)


def test_a_machine_without_rapl_says_so(tmp_path: Path) -> None:
    assert Metered(tmp_path).read() == (None, f"{tmp_path} has no RAPL zone of a processor package")


def test_a_counter_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = zone(tmp_path, "0", "package-0", 0) / "energy_uj"
    read = Path.read_text

    def refuse(self: Path, *arguments: object) -> str:
        if self == counter:
            raise PermissionError(13, "Permission denied", str(self))
        return read(self)

    monkeypatch.setattr(Path, "read_text", refuse)
    why = f"{counter} may be read by root only; have the administrator allow it"
    assert Metered(tmp_path).read() == (None, why)


def test_a_counter_that_is_no_number_has_no_figure(tmp_path: Path) -> None:
    (zone(tmp_path, "0", "package-0", 0) / "energy_uj").write_text("n/a\n")
    joules, why = Metered(tmp_path).read()
    assert joules is None
    assert "RAPL cannot be read" in str(why)
