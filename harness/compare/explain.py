"""Why a run left its reference, as far as losses, norms and weights of the records tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.compare.distance import estimate, movement, relative
from harness.compare.noise import Limits
from harness.record import Record

SCALE_TOLERANCE = 5e-3
"""Relative. Low precision moves a norm by a few thousandths; scales are small whole numbers apart."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A cause, under the id of the finding that tells it."""

    kind: str
    message: str
    values: dict[str, Any] = field(default_factory=dict)


def explain(reference: Record, record: Record, limits: Limits) -> Explanation:
    """The most specific cause that the first step supports.

    Initial weights and samples of both runs are equal, so a loss that differs at once is the forward
    pass or its normalisation, a norm that differs at once is the gradient, and what differs later only
    is the update.
    """
    left, right = reference.steps[0], record.steps[0]
    if left.loss is None or right.loss is None:
        return Explanation(kind="diverged", message="the loss is not finite from the first step on")
    if abs(left.loss - right.loss) > limits.loss:
        return _forward(record, left.loss, right.loss)
    difference = relative(left.gradient_norm, right.gradient_norm)
    if difference is not None and difference > limits.norm:
        still = _standing_still(reference, record)
        if still is not None:
            return still
        assert left.gradient_norm is not None
        assert right.gradient_norm is not None
        return _gradient(record, right.gradient_norm / left.gradient_norm)
    return _update(reference, record, limits)


def scales(world_size: int, accumulation_steps: int) -> dict[str, float]:
    """What a wrong scale of gradients stands for, by the factor that it multiplies them with."""
    ranks, steps = world_size, accumulation_steps
    known: dict[str, float] = {}
    if ranks > 1:
        known[f"summed over {ranks} ranks instead of averaged"] = ranks
        known[f"divided by the {ranks} ranks again"] = 1 / ranks
    if steps > 1:
        known[f"not divided by the {steps} accumulation steps"] = steps
        known[f"divided by the {steps} accumulation steps again"] = 1 / steps
    if ranks > 1 and steps > 1:
        known[f"summed over {ranks} ranks and {steps} accumulation steps"] = ranks * steps
        known[f"divided by {ranks} ranks and {steps} accumulation steps again"] = 1 / (ranks * steps)
    return known


def name_scale(ratio: float, world_size: int, accumulation_steps: int) -> list[str]:
    """What a ratio of gradients may stand for; several where numbers coincide."""
    return [
        name
        for name, factor in scales(world_size, accumulation_steps).items()
        if abs(ratio / factor - 1) < SCALE_TOLERANCE
    ]


def _forward(record: Record, expected: float, given: float) -> Explanation:
    values = {"reference": expected, "given": given}
    sums = [rank.loss_sums[0] for rank in record.ranks if rank.loss_sums]
    targets = [rank.target_tokens[0] for rank in record.ranks if rank.target_tokens]
    if len(sums) > 1 and None not in sums and sums[0] and not any(sums[1:]):
        return Explanation(
            kind="loss-of-one-rank",
            message="the loss is that of rank 0 only: the other ranks report 0",
            values=values | {"loss_sums": sums},
        )
    whole = sum(targets)
    if len(sums) == len(targets) > 1 and None not in sums and len(set(targets)) > 1:
        # If each rank divided by its own targets, undoing that gives the reference's sum.
        undone = sum(
            total * count * len(targets) / whole for total, count in zip(sums, targets, strict=True) if total
        )
        if abs(undone / whole - expected) < 1e-5 * expected:
            return Explanation(
                kind="loss-normalisation",
                message="the loss is a mean of per-rank means although ranks hold different numbers of "
                "target tokens; the job has the mean over all target tokens",
                values=values | {"target_tokens": targets},
            )
    causes = name_scale(given / expected, record.world.world_size, record.world.accumulation_steps)
    if causes:
        return Explanation(
            kind="loss-scale",
            message=f"losses x {given / expected:.4g} from the first step on: {' or '.join(causes)}",
            values=values,
        )
    return Explanation(
        kind="diverged",
        message=f"the first loss differs ({given:.6g} against {expected:.6g}) from equal weights and "
        "samples: the forward pass computes something else (dtype, attention, masking) or reports another "
        "loss",
        values=values,
    )


def _gradient(record: Record, ratio: float) -> Explanation:
    world = record.world
    told = [rank.gradient_norms[0] for rank in record.ranks if rank.gradient_norms]
    if len(set(told)) > 1:
        return Explanation(
            kind="norm-of-shard",
            message="ranks are told different gradient norms: each clips by the norm of what it holds and "
            "not by the global norm",
            values={"gradient_norms": told},
        )
    causes = name_scale(ratio, world.world_size, world.accumulation_steps)
    if causes:
        return Explanation(
            kind="gradient-scale",
            message=f"all gradients x {ratio:.4g}: {' or '.join(causes)}",
            values={"ratio": ratio},
        )
    targets = {rank.target_tokens[0] for rank in record.ranks if rank.target_tokens}
    hint = ""
    if len(targets) > 1:
        hint = (
            "; ranks hold different numbers of target tokens, so a loss averaged per rank and not per "
            "token would do this"
        )
    elif world.accumulation_steps > 1 or world.world_size > 1:
        hint = "; gradients of a rank, a micro-step or a parameter may be missing"
    return Explanation(
        kind="gradient-differs",
        message=f"the first gradient norm is {ratio:.4g} times the reference's although the loss agrees"
        + hint,
        values={"ratio": ratio},
    )


def _update(reference: Record, record: Record, limits: Limits) -> Explanation:
    still = _standing_still(reference, record)
    if still is not None:
        return still
    parts = []
    step = next(
        (
            a.step
            for a, b in zip(reference.steps, record.steps, strict=False)
            if a.loss is not None and b.loss is not None and abs(a.loss - b.loss) > limits.loss
        ),
        None,
    )
    if step is not None:
        parts.append(f"losses leave the reference at step {step}")
    beyond = _parameters_beyond(reference, record, limits)
    if beyond:
        parts.append(f"weights that end elsewhere: {_some(beyond)}")
    return Explanation(
        kind="update-differs",
        message="the first loss and gradient norm agree, so the update differs: clipping, learning rate, "
        "optimizer constants or dtype of masters" + ("; " + "; ".join(parts) if parts else ""),
        values={"parameters": beyond},
    )


def _standing_still(reference: Record, record: Record) -> Explanation | None:
    moved, other = movement(reference), movement(record)
    still = sorted(name for name, size in moved.items() if size > 0 and other.get(name) == 0)
    if not still or len(still) == len(moved):
        return None
    return Explanation(
        kind="parameters-not-updated",
        message=f"{_some(still)} never moved although the reference moves them",
        values={"parameters": still},
    )


def _parameters_beyond(reference: Record, record: Record, limits: Limits) -> list[str]:
    left = (reference.final_weights.sketch if reference.final_weights else None) or {}
    right = (record.final_weights.sketch if record.final_weights else None) or {}
    moved = movement(reference)
    apart = {
        name: estimate(left[name], right[name]) / moved[name]
        for name in left
        if name in right and moved.get(name)
    }
    beyond = [n for n, value in apart.items() if n in limits.parameters and value > limits.parameters[n]]
    return sorted(beyond, key=lambda name: -apart[name])


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
