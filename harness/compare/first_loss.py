"""Why the first loss of a run differs from its reference's although weights and samples are equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.record import Record

UNDIVIDED = ("eager",)
"""Kernels that neither torch's `context_parallel` nor DeepSpeed's Ulysses divides among ranks."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A cause, under the id of the finding that reports it."""

    kind: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)


def first_loss_cause(record: Record, values: dict[str, Any]) -> Explanation:
    """values: the first loss that was 'given' and that of the 'reference'."""
    differs = f"the first loss differs ({values['given']:.6g} against {values['reference']:.6g})"
    return (
        _undivided_attention(record, differs, values)
        or _stale_weights(record, differs, values)
        or Explanation(
            kind="diverged",
            text=f"{differs} from equal weights and samples: the forward pass computes something else "
            "(dtype, attention, masking), uses other weights than the masters that were digested, or reports "
            "another loss",
            values=values,
        )
    )


def _undivided_attention(record: Record, differs: str, values: dict[str, Any]) -> Explanation | None:
    """Attention that knows nothing of the ranks which share its samples; None: it does, or there are none."""
    parts, kernel = record.world.mesh.size("sequence"), record.observed and record.observed.attention
    if parts == 1 or kernel not in UNDIVIDED:
        return None
    return Explanation(
        kind="attention-within-part",
        text=f"{differs}: attention '{kernel}' is not divided among the {parts} ranks that share samples, "
        "each sees its own part only",
        values=values | {"attention": kernel},
    )


def _stale_weights(record: Record, differs: str, values: dict[str, Any]) -> Explanation | None:
    """Weights in use that are not the masters; None: they are, or the backend does not show them."""
    if record.initial_weights is None or not record.initial_weights.stale_elements:
        return None
    return Explanation(
        kind="diverged",
        text=f"{differs}: forward passes use other weights than the masters, see weights-in-use-stale",
        values=values,
    )
