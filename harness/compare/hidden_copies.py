"""Memory that a third party's backend holds without listing it among its model states.

Only of backends that claim a strategy or bring closed forms: nothing is known of what others should hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.compare.states import all_kinds, rank_states
from harness.record import RankPart, Record

SMALLEST_COPY = 0.25
"""Of the weights that a rank should hold. A copy of fp32 weights in half precision is half of them; batches,
losses and scalars of the harness itself are a few kilobytes."""
LASTING = ("after_backward", "after_step")


@dataclass(frozen=True, kw_only=True)
class HiddenCopy:
    """Bytes of one rank as large as a copy of its weights."""

    rank: int
    kind: str
    """'other': the backend lists them nowhere; 'gathered': as weights of other ranks."""
    measured_bytes: int
    expected_bytes: int
    """Of 'other', what the reference holds."""


def hidden_copies(record: Record, reference: Record | None) -> list[HiddenCopy]:
    """At most one per rank and kind. 'other' is judged against the reference on the same sort of device."""
    if record.backend.claim is None and record.backend.own_forms is None:
        return []
    base = _least_unlisted(reference.ranks[0]) if reference is not None and reference.ranks else None
    parts = {part.rank: part for part in record.ranks}
    found = []
    for states in rank_states(record):
        if states.expected is None:
            continue
        form = states.expected.kinds()
        kinds = [("gathered", states.measured.get("gathered", 0), form.get("gathered", 0))]
        unlisted = _least_unlisted(parts[states.rank])
        if unlisted is not None and base is not None:
            kinds.append(("other", unlisted, base))
        found += [
            HiddenCopy(rank=states.rank, kind=kind, measured_bytes=measured, expected_bytes=expected)
            for kind, measured, expected in kinds
            if measured - expected > SMALLEST_COPY * form.get("weights", 0) > 0
        ]
    return found


def _least_unlisted(part: RankPart) -> int | None:
    """What lasts: a transport may hold a buffer for a while, and the first step has no optimizer states."""
    found = [
        kinds["other"]
        for moment in part.memory
        if moment.step > 0 and moment.moment in LASTING and "other" in (kinds := all_kinds(moment))
    ]
    return min(found, default=None)
