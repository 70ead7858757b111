"""Whether predicted memory fits a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Answer = Literal["fits", "tight", "does not fit"]
TIGHT_SHARE = 0.9
"""Of a device's memory: above it fragmentation and the error of a prediction may decide."""
BARELY_SHARE = 0.98
"""Of a device's memory: above it the next allocation of another size may fail."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rank needs of its device, beside what the device has."""

    needed_bytes: int
    """As nvidia-smi would show it: the allocator's peak, context and NCCL's buffers."""
    device_bytes: int

    @property
    def margin_bytes(self) -> int:
        """Negative: so much is missing."""
        return self.device_bytes - self.needed_bytes

    @property
    def answer(self) -> Answer:
        if self.margin_bytes < 0:
            return "does not fit"
        return "tight" if self.needed_bytes > TIGHT_SHARE * self.device_bytes else "fits"

    @property
    def fits(self) -> bool:
        """Whether it fits at all, if only tightly."""
        return self.margin_bytes >= 0

    @property
    def barely_fits(self) -> bool:
        """Whether it fits with so little left that it is no recommendation."""
        return self.fits and self.needed_bytes > BARELY_SHARE * self.device_bytes

    @property
    def text(self) -> str:
        """'fits, 12.3 GB left', 'tight, 1.2 GB left' or 'cannot fit: 131 GB of 80'."""
        if not self.fits:
            return f"cannot fit: {_gigabytes(self.needed_bytes)} GB of {_gigabytes(self.device_bytes)}"
        return f"{self.answer}, {_gigabytes(self.margin_bytes)} GB left"


def _gigabytes(count: int) -> str:
    value = count / 1e9
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
