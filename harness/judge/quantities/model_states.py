"""Model states that were measured, those that closed forms expect, and the textbook's."""

from __future__ import annotations

from dataclasses import dataclass

from harness.forms.terms import STATE_KINDS, ModelStates
from harness.forms.textbook import textbook_states
from harness.judge.quantities.expected import expected_states
from harness.record import MemoryPart, RankPart, Record
from harness.record.workload import closed_form_layout, known_strategy


@dataclass(frozen=True, kw_only=True)
class RankStates:
    """One rank's bytes by kind after the backward pass of its last probed step."""

    rank: int
    step: int
    measured: dict[str, int]
    expected: ModelStates | None
    """None: no closed form is known, no layout in the record, or the first step, before Adam's states."""

    @property
    def measured_bytes(self) -> int:
        return sum(self.measured.get(kind, 0) for kind in STATE_KINDS)


def rank_states(record: Record) -> list[RankStates]:
    """Every rank that measured kinds after a backward pass with optimizer states, in order."""
    found = []
    for part in record.ranks:
        moment = after_backward(part)
        if moment is not None:
            found.append(
                RankStates(
                    rank=part.rank,
                    step=moment.step,
                    measured=all_kinds(moment),
                    expected=expected_states(record, part.rank) if moment.step > 0 else None,
                )
            )
    return found


def after_backward(part: RankPart) -> MemoryPart | None:
    """The last probed backward pass; None where none was probed or the backend names no tensors."""
    moments = [m for m in part.memory if m.moment == "after_backward" and m.kinds is not None]
    return moments[-1] if moments else None


def all_kinds(moment: MemoryPart) -> dict[str, int]:
    """Bytes by kind on the device and outside of its allocator together."""
    kinds = dict(moment.kinds or {})
    for kind, size in (moment.outside_kinds or {}).items():
        kinds[kind] = kinds.get(kind, 0) + size
    return kinds


def largest(states: list[RankStates]) -> RankStates | None:
    """The rank that holds most model states."""
    return max(states, key=lambda of_rank: of_rank.measured_bytes, default=None)


def expected_model_state_bytes(record: Record) -> int | None:
    """The largest rank's closed form; None where there is none."""
    sizes = [
        states.model_state_bytes
        for rank in range(record.world.world_size)
        if (states := expected_states(record, rank)) is not None
    ]
    return max(sizes) if sizes else None


def textbook(record: Record) -> dict[str, float] | None:
    """What the ZeRO paper counts per kind; None for an unknown strategy, size or optimizer."""
    effective, strategy = record.backend.effective, known_strategy(record)
    precision = record.job.training.held_precision
    if effective is None or strategy is None or record.world.dimensions or precision is None:
        return None
    if record.job.optimizer.kind == "own":
        return None
    parts = record.world.mesh.model_parts
    shards = parts if parts > 1 else record.backend.shard_size or record.world.world_size
    trained = (
        closed_form_layout(record.layout).trained_count if record.layout and record.layout.frozen else None
    )
    return textbook_states(
        strategy.stage, effective.parameter_count, shards, precision, trained=trained,
        moments=record.job.optimizer.moments,
    )  # fmt: skip
