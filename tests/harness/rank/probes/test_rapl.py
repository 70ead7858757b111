"""RAPL on a folder as the kernel lays it out."""

from pathlib import Path

import pytest

from harness.rank.probes.energy import RaplMeter

RANGE = 262_143_328_850
"""Microjoules, of a common package."""


def zone(root: Path, number: str, name: str, energy: int, span: int = RANGE) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{span}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    return folder


class Clock:
    """Seconds, set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_packages_and_dram_count_and_their_parts_do_not(tmp_path: Path) -> None:
    for number, name in (("0", "package-0"), ("0:0", "core"), ("0:1", "dram"), ("1", "psys")):
        zone(tmp_path, number, name, 1_000_000)
    meter = RaplMeter(tmp_path)
    meter.begin()
    for number, name, joules in (
        ("0", "package-0", 50),
        ("0:0", "core", 40),
        ("0:1", "dram", 7),
        ("1", "psys", 90),
    ):
        zone(tmp_path, number, name, 1_000_000 + joules * 1_000_000)
    meter.poll()
    assert meter.joules() == pytest.approx(57.0)
    assert meter.unknown is None


def test_a_counter_that_wrapped_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    zone(tmp_path, "0", "package-0", RANGE - 3_000_000)
    meter = RaplMeter(tmp_path, clock)
    meter.begin()
    for now, energy in ((10.0, 2_000_000), (20.0, 9_000_000)):
        clock.now = now
        zone(tmp_path, "0", "package-0", energy)
        meter.poll()
    assert meter.joules() == pytest.approx(12.0)


def test_a_counter_that_may_have_wrapped_twice_has_no_figure(tmp_path: Path) -> None:
    clock = Clock()
    zone(tmp_path, "0", "package-0", 0)
    meter = RaplMeter(tmp_path, clock)
    meter.begin()
    clock.now = 300.0
    meter.poll()
    assert meter.joules() is None
    assert "intel-rapl:0 went unread for 300 s" in str(meter.unknown)


def test_a_machine_without_rapl_says_so(tmp_path: Path) -> None:
    meter = RaplMeter(tmp_path)
    meter.begin()
    meter.poll()
    assert meter.joules() is None
    assert meter.unknown == f"{tmp_path} has no RAPL zone of a processor package"


def test_a_counter_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = zone(tmp_path, "0", "package-0", 0) / "energy_uj"
    read = Path.read_text

    def refuse(self: Path, *arguments: object) -> str:
        if self == counter:
            raise PermissionError(13, "Permission denied", str(self))
        return read(self)

    monkeypatch.setattr(Path, "read_text", refuse)
    meter = RaplMeter(tmp_path)
    meter.begin()
    assert meter.joules() is None
    assert meter.unknown == f"{counter} may be read by root only; have the administrator allow it"


def test_a_counter_that_is_no_number_has_no_figure(tmp_path: Path) -> None:
    (zone(tmp_path, "0", "package-0", 0) / "energy_uj").write_text("n/a\n")
    meter = RaplMeter(tmp_path)
    meter.begin()
    assert meter.joules() is None
    assert "RAPL cannot be read" in str(meter.unknown)
