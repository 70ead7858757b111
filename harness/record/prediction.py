"""What was predicted of a run's memory before its ranks started."""

from __future__ import annotations

from typing import Literal

from harness.record.part import Part

Verdict = Literal["fits", "tight", "does not fit"]


class PredictionPart(Part):
    """Predicted memory of the rank that needs most, and the memory that there was."""

    peak_bytes: int
    """Peak of torch's allocator in an ordinary step."""
    moment: str
    """The moment of the step that has it: 'forward/backward', 'gradient reduction' or 'optimizer step'."""
    kinds: dict[str, int]
    """Bytes by kind at that moment; their sum is `peak_bytes`."""
    device_bytes: int
    """The peak and what lies beside the allocator: context, buffers of NCCL."""
    device_limit_bytes: int | None = None
    """Memory of a rank's device, or what `runtime.memory_limit` leaves of it; None: not known."""
    host_bytes: int
    """Of all ranks of a node, at least: each builds the whole model; on CUDA also offloaded states."""
    host_limit_bytes: int | None = None
    """Memory that a node had left for its ranks; None: not known."""
    verdict: Verdict | None = None
    """None: no limit is known."""
    refused: bool = False
    """Whether the run was not started for that reason."""
    made_by: str
    """Version of the harness."""
