"""What a backend's name stands for: closed forms, presets and reports derive from it, and parse no name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sharding = Literal["single", "none", "grad-op", "full-shard", "hybrid"]
"""What is divided among ranks: there is one rank; nothing; optimizer states and gradients; weights too;
weights too, within groups of ranks that replicate one another."""
Route = Literal["native", "accelerate"]
TEXTBOOK_STAGES: dict[Sharding, int] = {"single": 0, "none": 0, "grad-op": 2, "full-shard": 3, "hybrid": 3}


@dataclass(frozen=True, kw_only=True)
class StrategyKind:
    """One strategy of one library."""

    family: str
    """Whose closed forms hold: the name of a module in `harness/theory`, such as 'fsdp2'."""
    sharding: Sharding = "none"
    zero_stage: int | None = None
    """The stage asked of DeepSpeed; None: another library."""
    route: Route = "native"
    """'accelerate': through Hugging Face Accelerate."""

    @property
    def stage(self) -> int:
        """The stage that the ZeRO paper would give it, whatever the library."""
        return TEXTBOOK_STAGES[self.sharding] if self.zero_stage is None else self.zero_stage
