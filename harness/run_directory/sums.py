"""Steps and evaluations summed over ranks; what ranks share counts once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.backends.mesh import Mesh
from harness.record import EvaluationPart, StepPart
from harness.run_directory.events import StepEvent
from harness.run_directory.rank_events import RankEvents

Events = Mapping[int, RankEvents]


def steps_of(events: Events, mesh: Mesh | None = None) -> list[StepPart]:
    """Steps that every rank finished, summed over the ranks; what ranks share counts once."""
    mesh = mesh or Mesh.data_parallel(len(events))
    return [_step(rows, mesh) for rows in zip(*(of_rank.steps for of_rank in events.values()), strict=False)]


def _step(rows: Sequence[StepEvent], mesh: Mesh) -> StepPart:
    first = rows[0]
    once = [row for rank, row in enumerate(rows) if mesh.counts_samples(rank)]
    losses = [row.loss_sum for rank, row in enumerate(rows) if mesh.counts_loss(rank)]
    return StepPart(
        step=first.step,
        window=first.window,
        loss=_mean(losses, _loss_weight(rows)),
        gradient_norm=_norm(rows),
        learning_rate=first.learning_rate,
        applied_learning_rate=_applied_learning_rate(rows),
        applied_gradient_norm=_applied_gradient_norm(rows),
        tokens=_total([row.tokens for row in once]),
        target_tokens=_total([row.target_tokens for row in once]),
        samples=_total([row.samples for row in once]),
        seconds=max(row.seconds for row in rows),
        sample_hashes=_hash_sum([row.sample_hashes for row in once]),
    )


def _norm(rows: Sequence[StepEvent]) -> float | None:
    """As rank 0 was told it; of parts on all ranks the norm of the whole."""
    if not rows[0].norm_is_partial:
        return rows[0].gradient_norm
    known = [row.gradient_norm for row in rows if row.gradient_norm is not None]
    return math.hypot(*known) if len(known) == len(rows) else None


def _loss_weight(rows: Sequence[StepEvent]) -> float:
    """What the summed losses of all ranks are divided by: target tokens, or what an observed script has."""
    targets = rows[0].global_target_tokens
    return sum(row.loss_weight or 0.0 for row in rows) if targets is None else targets


def _total(values: Sequence[int | None]) -> int | None:
    """Sum over the ranks; None where one does not know its part."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _hash_sum(hashes: Sequence[str | None]) -> str | None:
    known = [int(value, 16) for value in hashes if value is not None]
    return f"{sum(known) % 2**64:016x}" if len(known) == len(hashes) else None


def _mean(sums: Sequence[float | None], targets: float) -> float | None:
    """Mean over target tokens; None where a rank's sum is not finite, or without targets."""
    known = [value for value in sums if value is not None]
    return sum(known) / targets if len(known) == len(sums) and targets else None


def _applied_learning_rate(rows: Sequence[StepEvent]) -> float | None:
    asked = rows[0].learning_rate
    applied = [row.applied_learning_rate for row in rows if row.applied_learning_rate is not None]
    return max(applied, key=lambda rate: abs(rate - asked), default=None)


def _applied_gradient_norm(rows: Sequence[StepEvent]) -> float | None:
    """Ranks hold disjoint parts of the gradient, or all of it each; the sum of their shares decides."""
    applied = [
        (row.applied.squares, row.applied.share)
        for row in rows
        if row.applied and row.applied.squares is not None
    ]
    if len(applied) < len(rows):
        return None
    copies = max(1, round(sum(share for _, share in applied)))
    return float((sum(squares for squares, _ in applied) / copies) ** 0.5)


def evaluations_of(events: Events, mesh: Mesh) -> list[EvaluationPart]:
    return [
        EvaluationPart(
            step=rows[0].step,
            loss=_mean([row.loss_sum for rank, row in enumerate(rows) if mesh.counts_loss(rank)], targets),
            target_tokens=targets,
            samples=rows[0].samples,
            seconds=max(row.seconds for row in rows),
        )
        for rows in zip(*(of_rank.evaluations for of_rank in events.values()), strict=False)
        for targets in (sum(row.target_tokens for rank, row in enumerate(rows) if mesh.counts_samples(rank)),)
    ]
