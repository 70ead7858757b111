"""What a session has seen of a script beyond its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Seen:
    """Changes while the script runs."""

    autocast: torch.dtype | None = None
    """Dtype that autocast computed in; None: none was at work."""
    clipping: float | None = None
    """Largest norm that gradients were clipped to; None: they were not."""
    accumulation: int = 1
    """Micro-steps of the last step that ended."""
    steps: int = 0
    """Optimizer steps that ended."""
    rates: dict[int, float | None] = field(default_factory=dict)
    """By group, the rate with which its optimizer steps now; None: it has none."""
    group_tensors: dict[int, int] = field(default_factory=dict)
    """By group, the most tensors that it held while its optimizer stepped: ZeRO-3 fills them only then."""
    updated_tensors: int | None = None
    """Most tensors with a gradient that optimizers were given in one of the first steps; None: not looked."""
    frameworks: dict[str, None] = field(default_factory=dict)
    """Libraries that were seen to drive the training, in order."""
