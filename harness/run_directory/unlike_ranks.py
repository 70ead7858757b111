"""What a rank has otherwise than rank 0, of all that ranks of one run should have alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from harness.backends.base import Effective
from harness.record import ObservedPart
from harness.run_directory.events import RankEvents, StepEvent, clipped_apart

OF_PROCESS = ("tf32", "deterministic")
OF_MODEL = (
    "parameters_left_out", "optimizer_used", "optimizer_steps", "learning_rates", "master_dtypes",
    "optimizer_state_dtypes", "compute_dtype", "tied_parameters", "frozen_parameters", "frozen_dtypes",
    "attention", "activation_checkpointing", "compiled", "dropout", "evaluating_in_training",
    "training_in_evaluation", "still_buffers",
)  # fmt: skip
"""Fields of `ObservedPart`; the stages of a pipeline need not agree in them."""
IN_FORCE = (
    "strategy", "parameter_dtype", "autocast_dtype", "master_dtype", "gradient_dtype", "reduce_dtype",
    "optimizer", "gradient_clipping", "accumulation_steps", "gradient_synchronisation", "loss_scale",
    "gather_dtype", "accumulation_dtype",
)  # fmt: skip
"""Fields of `Effective`."""
NONE_IS_A_VALUE = ("autocast_dtype", "gradient_clipping", "loss_scale")
"""Of these None says that there is none."""


Changes = Mapping[int, list[dict[str, Any]]]


def otherwise(rank: RankEvents, first: RankEvents, *, whole_model: bool) -> dict[str, list[Any]]:
    """By name, this rank's value and rank 0's; what one of them does not know is passed over.

    whole_model: False: ranks hold different layers.
    """
    found: dict[str, list[Any]] = {}
    if rank is first:
        return found
    found |= _of_first_step(rank, first, "learning rate", _rate, lambda *pair: _unlike(*map(_rate, pair)))
    found |= _of_first_step(rank, first, "norm of the clipped gradient", _clipped_norm, clipped_apart)
    if rank.setup is not None and first.setup is not None and whole_model:
        found |= _fields(rank.setup.effective, first.setup.effective, IN_FORCE)
    if rank.final is None or first.final is None:
        return found
    if _unlike(rank.final.loss_scale, first.final.loss_scale):
        found["loss scale after the training"] = [rank.final.loss_scale, first.final.loss_scale]
    for name in rank.final.in_force.keys() & first.final.in_force.keys():
        pair = [rank.final.in_force[name], first.final.in_force[name]]
        if pair[0] != pair[1] and name.replace("_", " ") not in found and whole_model:
            found[f"{name.replace('_', ' ')} after the training"] = pair
    mine_seen, other_seen = rank.final.observed, first.final.observed
    found |= _fields(mine_seen, other_seen, (*OF_PROCESS, *(OF_MODEL if whole_model else ())))
    return found | (dict(_constants(mine_seen, other_seen)) if whole_model else {})


def _of_first_step(
    rank: RankEvents,
    first: RankEvents,
    name: str,
    read: Callable[[StepEvent], float | None],
    differ: Callable[[StepEvent, StepEvent], bool],
) -> dict[str, list[Any]]:
    """Of the first step in which the two differ."""
    for mine, other in zip(rank.steps, first.steps, strict=False):
        if differ(mine, other):
            return {f"{name} of step {mine.step}": [read(mine), read(other)]}
    return {}


def _rate(row: StepEvent) -> float | None:
    return row.applied_learning_rate


def _clipped_norm(row: StepEvent) -> float | None:
    return row.applied.squares**0.5 if row.applied and row.applied.squares is not None else None


def _unlike(mine: Any, other: Any) -> bool:
    return mine is not None and other is not None and mine != other


def _fields(
    mine: Effective | ObservedPart, other: Effective | ObservedPart, names: tuple[str, ...]
) -> dict[str, list[Any]]:
    """A rank whose part of every weight is empty knows none of their dtypes."""
    pairs = {name: [getattr(mine, name), getattr(other, name)] for name in names}
    return {
        name.replace("_", " "): pair
        for name, pair in pairs.items()
        if (pair[0] != pair[1] if name in NONE_IS_A_VALUE else _unlike(*pair))
        and not (name.endswith("dtypes") and [] in pair)
    }


def _constants(mine: ObservedPart, other: ObservedPart) -> Iterator[tuple[str, list[Any]]]:
    """Constants and parameters of the optimizers' groups."""
    groups, others = mine.optimizer_groups, other.optimizer_groups
    if groups and others and len(groups) != len(others):
        yield "groups of the optimizer", [len(groups), len(others)]
        return
    for index, (group, its_like) in enumerate(zip(groups, others, strict=False)):
        for name in group.keys() & its_like.keys():
            if group[name] != its_like[name]:
                since = _since(_changes(mine), _changes(other), index, name)
                yield f"{name} of optimizer group {index}{since}", list(_beyond(group, its_like, name))


def _changes(seen: ObservedPart) -> Changes:
    return seen.constants_by_step or {0: seen.optimizer_groups}


def _since(mine: Changes, other: Changes, index: int, name: str) -> str:
    """', changed in step 3', of a constant that was the same before."""
    known = sorted(mine.keys() | other.keys())
    alike = [step for step in known if _at(mine, step, index, name) == _at(other, step, index, name)]
    later = [step for step in known if alike and step > alike[-1]]
    return f", changed in step {later[0]}" if later else ""


def _at(changes: Changes, step: int, index: int, name: str) -> Any:
    """A constant in a step, or in the first of which it is known."""
    groups = changes[max((first for first in changes if first <= step), default=min(changes))]
    return groups[index].get(name) if index < len(groups) else None


def _beyond(group: Mapping[str, Any], other: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Of lists of parameters what the other lacks."""
    mine, its = group[name], other[name]
    if name != "parameters":
        return mine, its
    return [one for one in mine if one not in its], [one for one in its if one not in mine]
