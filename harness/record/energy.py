"""Energy that one rank read while steps were timed."""

from __future__ import annotations

from harness.record.part import Part


class EnergyPart(Part):
    """From the first timed step to the end of the training; joules, not rounded."""

    seconds: float
    """How long that is."""
    device_joules: float | None = None
    """Energy of the rank's GPU by the driver's counter; None: no GPU, or see `device_unknown`."""
    device_unknown: str | None = None
    """Why the GPU's energy is not known; None: it is, or there is no GPU."""
    device_sampled_watts: float | None = None
    """Mean of the power samples that the driver kept of that time, independent of its counter; None: none."""
    device_limit_watts: float | None = None
    """Power limit in force on the GPU; None: not told."""
    host_joules: float | None = None
    """Energy of all processor packages and their DRAM on the rank's machine, whichever program used them
    (RAPL); ranks on one machine read the same."""
    host_unknown: str | None = None
    """Why the host's energy is not known; None: it is."""
    boot: str | None = None
    """Equal for ranks on one machine; None: not told."""
