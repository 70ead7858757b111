"""What models return."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harness.errors import JobError


def logits_of(output: Any) -> Tensor:
    """What a model returned, or the `logits` of it. Raises JobError where there are none."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, dict):
        logits = output.get("logits")
    if not isinstance(logits, Tensor):
        raise JobError(
            f"the model returned a {type(output).__name__} without logits; return logits or an object with "
            "`.logits`, or give loss.factory"
        )
    return logits
