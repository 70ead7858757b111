"""What the checks of a GPU machine look at: tiny runs, notes of their ranks, the network's speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.fabric.result import FabricResult
from harness.forms.flops import is_stub
from harness.gpus.found import Gpus
from harness.record import Record
from harness.run_directory.rank_state import DeviceNote

SINGLE, AGAIN, ON_CPU, ZERO, FULL, SHARDED = "single", "again", "cpu", "zero2", "out of memory", "fsdp"
FABRIC = "fabric"
RUNS = (ON_CPU, SINGLE, AGAIN, ZERO, FULL, SHARDED)

Kernels = Mapping[int, Mapping[int, int]]
"""Kernels of NCCL by rank and traced step."""


@dataclass(kw_only=True)
class Evidence:
    """Everything that was measured; what is missing has its reason in `missing`."""

    gpus: Gpus
    ranks: int
    """Of the runs on several GPUs."""
    records: dict[str, Record] = field(default_factory=dict)
    """By the names above."""
    notes: dict[str, tuple[DeviceNote, ...]] = field(default_factory=dict)
    """Of each run's ranks, in order."""
    kernels: dict[str, Kernels] = field(default_factory=dict)
    """Of runs whose traces were kept."""
    fabric: FabricResult | None = None
    seconds_to_notice: float | None = None
    """From the planted lack of memory to the record that says so."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why a run, or the measurement of the network, was not made."""
    is_interrupted: bool = False
    """The user ended it: what was measured until then is there."""

    @property
    def is_stub(self) -> bool:
        """Whether any of the devices is no GPU."""
        return any(is_stub(gpu.name) for gpu in self.gpus.devices)
