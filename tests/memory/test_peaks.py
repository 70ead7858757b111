"""The allocator's figures against methods that share nothing with it."""

from typing import Any

import pytest

from tests.contract.ranks import on_ranks
from tests.representatives import first

pytestmark = pytest.mark.long(seconds=20)

ALONE = ("single", 1)
TOLERANCE = 0.02


@pytest.fixture
def on(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a function of `peaks.py` returns on each rank of a backend."""
    return lambda function, name, ranks: on_ranks(
        f"tests.memory.peaks:{function}", name, ranks, tmp_path_factory.mktemp(function)
    )


@pytest.mark.parametrize(("name", "ranks"), first([ALONE], [ALONE, ("ddp", 2)]))
def test_the_allocators_peak_is_that_of_torchs_own_profiler(name: str, ranks: int, on) -> None:
    for ours, theirs in zip(on("counted_peaks", name, ranks), on("profiled_peaks", name, ranks), strict=True):
        assert _least_rise(ours) == pytest.approx(_least_rise(theirs), rel=TOLERANCE)
        if ranks == 1:
            assert _least_peak(ours) == pytest.approx(_least_peak(theirs), rel=TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "ranks"), [ALONE, ("zero2", 2), ("zero3", 2), ("fsdp", 2)])
def test_the_allocators_peak_is_that_of_the_memory_tracker(name: str, ranks: int, on) -> None:
    for ours, theirs in on("tracked_peak", name, ranks):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.parametrize(("name", "ranks"), first([("fsdp", 2)], [ALONE, ("fsdp", 2)]))
@pytest.mark.costly
def test_watching_does_not_change_the_peak(name: str, ranks: int, on) -> None:
    for ours, theirs in zip(on("counted_peaks", name, ranks), on("watched_peaks", name, ranks), strict=True):
        assert _least_peak(ours) == pytest.approx(min(theirs), rel=1e-3)


@pytest.mark.parametrize(("name", "ranks"), first([("fsdp", 2)], [ALONE, ("ddp", 2), ("fsdp", 2)]))
def test_activations_are_what_autograd_saved(name: str, ranks: int, on) -> None:
    for told, walked in on("activations", name, ranks):
        assert told == walked


def _least_rise(steps: list[tuple[int, int]]) -> int:
    return min(peak - before for before, peak in steps)


def _least_peak(steps: list[tuple[int, int]]) -> int:
    return min(peak for _, peak in steps)
