"""Like for like no step of DeepSpeed waits for the device in order to time itself; left alone it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.device_waits import ACCUMULATION_STEPS
from tests.contract.ranks import on_ranks
from tests.representatives import first


@pytest.mark.parametrize("name", first(["zero1", "accelerate-zero3"], ["zero1", "zero3", "accelerate-zero3"]))
def test_only_library_defaults_time_their_micro_steps(name: str, tmp_path: Path) -> None:
    # Accelerate ends a step of DeepSpeed, and with it the timer, in the last micro-step only.
    stops = 1 if name.startswith("accelerate") else ACCUMULATION_STEPS
    for per_preset in on_ranks("tests.contract.device_waits:device_waits", name, 2, tmp_path):
        (counted, waits), (counted_by_default, waits_by_default) = per_preset
        assert (waits, waits_by_default) == (False, True)
        # Stage 3 waits as it reduces, too, whatever the preset.
        assert counted_by_default - counted == ACCUMULATION_STEPS + stops
