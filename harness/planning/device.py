"""What a prediction needs to know of a GPU and of the links between GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU (or die) as torch sees it."""

    name: str
    memory_bytes: int
    """What torch.cuda reports as total."""
    context_bytes: int
    """What the CUDA or ROCm context takes of it before the first tensor."""
    memory_bandwidth: float
    """Bytes per second."""
    peak_flops: Mapping[str, float]
    """Dense FLOP/s by dtype: 'float32', 'tf32', 'bfloat16', 'float16', 'float8'."""
    link_bandwidth: float
    """Bytes per second in one direction to the GPUs of the same node together (NVLink, xGMI, PCIe)."""
    link: str
    watts: float | None
    """Board power limit."""
    source: str
    capability: tuple[int, int] | None = None
    """NVIDIA's compute capability; None: AMD's, or not known."""

    @property
    def usable_bytes(self) -> int:
        """What an allocator can serve."""
        return self.memory_bytes - self.context_bytes


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The network between nodes."""

    name: str
    bandwidth_per_gpu: float
    """Bytes per second in one direction for each GPU, when all of a node send."""
    latency_seconds: float
    source: str
