"""Why a run diverged from its reference, from losses, norms and weights of the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy

from harness.backends.mesh import SPLITTING, Mesh
from harness.judge.distance import estimate, movement, relative
from harness.judge.effective import master_dtypes, optimizer_groups, reduce_dtypes
from harness.judge.noise import Limits
from harness.judge.wording import percent
from harness.record import Record
from harness.record.together import micro_batches
from harness.record.workload import known_strategy

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
        or _read_outside(record, differs, values)
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


def _read_outside(record: Record, differs: str, values: dict[str, Any]) -> Explanation | None:
    """Weights that the loss reads where a rank holds a part of them; None: there are none."""
    names = record.layout.read_outside if record.layout is not None else None
    strategy = known_strategy(record)
    if not names or strategy is None or strategy.facts.stage < 3:
        return None
    return Explanation(
        kind="weights-read-outside",
        text=f"{differs}: the loss reads {_some(names)} outside of the model's forward pass, where a rank "
        "holds its part alone",
        values=values | {"parameters": names},
    )


SCALE_TOLERANCE = 5e-3
"""Relative. Low precision moves a norm by a few thousandths; factors differ by small integers."""


def known_factors(mesh: Mesh, accumulation_steps: int, parts: int = 1) -> dict[str, float]:
    """The factor by which each known mistake multiplies the gradients, by the mistake.

    parts: the micro-batches into which a pipeline cuts the batch of a micro-step.
    """
    ranks, steps = mesh.data_size, accumulation_steps
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
    if parts > 1:
        shown = f"the {parts} micro-batches of the pipeline"
        known[f"divided by {shown} (scale_grads)"] = 1 / parts
        known[f"not divided by {shown}"] = parts
    for name, size in mesh.sizes:
        if name not in SPLITTING and size > 1:
            known[f"added up {size} times over the {size} ranks along '{name}'"] = size
            known[f"divided by the {size} ranks along '{name}', which share samples"] = 1 / size
    return known


def name_scale(ratio: float, mesh: Mesh, accumulation_steps: int, parts: int = 1) -> list[str]:
    """The mistakes that explain a ratio of gradients; several if their factors coincide."""
    return [
        name
        for name, factor in known_factors(mesh, accumulation_steps, parts).items()
        if abs(ratio / factor - 1) < SCALE_TOLERANCE
    ]


TOLERANCE = 1e-6
"""Relative. An engine hands on what was computed; a cast of it to another device or fp32 changes less."""


def sums_of_step(
    record: Record, index: int, which: Literal["loss_sums", "computed_loss_sums"]
) -> list[float]:
    """Each data rank's loss summed over its target tokens; empty where a rank has none."""
    mesh, found = record.world.mesh, [0.0] * record.world.data_size
    for rank in record.ranks:
        if mesh.counts_loss(rank.rank):
            sums = getattr(rank, which)
            value = sums[index] if len(sums) > index else None
            if value is None:
                return []
            found[mesh.data_rank(rank.rank)] += value
    return found if record.ranks else []


def whole_loss(record: Record, index: int) -> float | None:
    """Mean loss per target token as it was computed, nats; None: not known."""
    sums = sums_of_step(record, index, "computed_loss_sums")
    targets = record.steps[index].target_tokens
    return sum(sums) / targets if sums and targets else None


def altered_step(record: Record) -> int | None:
    """Index of the first step in which a rank reported another loss than it computed; None: none."""
    columns = [sums for rank in record.ranks for sums in (rank.loss_sums, rank.computed_loss_sums)]
    count = min((len(sums) for sums in columns), default=0)
    if not count:
        return None
    table = numpy.array([sums[:count] for sums in columns], dtype=float)  # None becomes NaN
    reported, computed = table[::2], table[1::2]
    altered = numpy.abs(reported - computed) > TOLERANCE * numpy.abs(computed)
    steps = numpy.flatnonzero(altered.any(axis=0) & ~numpy.isnan(table).any(axis=0))
    return int(steps[0]) if len(steps) else None


def of_one_rank(record: Record, index: int) -> bool:
    """Whether ranks other than 0 report nothing, or the loss of rank 0 in place of their own."""
    reported = sums_of_step(record, index, "loss_sums")
    if len(reported) < 2 or not reported[0]:
        return False
    if not any(reported[1:]):
        return True
    computed = sums_of_step(record, index, "computed_loss_sums")
    return len(set(reported)) == 1 and bool(computed) and len(set(computed)) > 1


SUDDEN = 0.05
"""Relative. Weights that agree so well that the loss does cannot change the next norm by so much: where the
ratio of norms changes by more from one step to the next, the gradient of that step is wrong and no update
before."""
REDUCTION_ROUNDING = 2.0**-7
"""Relative. Gradients that cross the wire in bf16 are rounded by up to 2^-9 each time they are added."""


def explain(reference: Record, record: Record, limits: Limits, settings: Sequence[str] = ()) -> Explanation:
    """The most specific cause that the first step beyond the limits supports.

    Initial weights and samples of both runs are equal. A loss that differs at once is the forward pass or
    its normalisation, a norm that differs at once is the gradient, and what differs later only is the
    update, unless that step's own figures say otherwise. settings: names of those that differ and change
    the mathematics.
    """
    index = _first_beyond(reference, record, limits)
    if index is None:
        return _update(reference, record, limits, settings, None)
    left, right = reference.steps[index], record.steps[index]
    if left.loss is None or right.loss is None:
        return Explanation(kind="diverged", text=f"the loss is not finite {_from(index)}")
    if abs(left.loss - right.loss) > limits.loss:
        cause = _forward(record, left.loss, right.loss, index, limits)
    else:
        ratio = _norm_ratio(reference, record, index)
        before = _norm_ratio(reference, record, index - 1) if index else 1.0
        cause = _standing_still(reference, record) or _gradient(record, ratio, before, index)
    return cause or _update(reference, record, limits, settings, index)


def _first_beyond(reference: Record, record: Record, limits: Limits) -> int | None:
    """The first step whose loss is missing, or whose loss or norm lies beyond the limits."""
    for index, (left, right) in enumerate(zip(reference.steps, record.steps, strict=False)):
        if left.loss is None or right.loss is None or abs(left.loss - right.loss) > limits.loss:
            return index
        norm = relative(left.gradient_norm, right.gradient_norm)
        if norm is not None and norm > limits.norm:
            return index
    return None


def _norm_ratio(reference: Record, record: Record, index: int) -> float:
    """The gradient norm of a step over the reference's; 1 where one of them is missing."""
    expected, given = reference.steps[index].gradient_norm, record.steps[index].gradient_norm
    return given / expected if given is not None and expected else 1.0


def _step(index: int | None) -> dict[str, Any]:
    """The step in which a cause begins, for the values, unless it is the first."""
    return {"step": index} if index else {}


def _compared(ratio: float) -> str:
    """'is 0.7 times', 'is 0.0086 % below': a ratio in words that do not round it to one."""
    if abs(ratio - 1) >= 0.01:
        return f"is {ratio:.4g} times"
    return f"is {percent(abs(ratio - 1))} {'above' if ratio > 1 else 'below'}"


def _from(index: int) -> str:
    return "from the first step on" if index == 0 else f"from step {index} on"


def _forward(record: Record, expected: float, given: float, index: int, limits: Limits) -> Explanation | None:
    """Why the loss of a step differs; None: a later step, whose own figures do not tell."""
    values: dict[str, Any] = {"reference": expected, "given": given} | _step(index)
    sums = sums_of_step(record, index, "loss_sums")
    if of_one_rank(record, index):
        began = altered_step(record)
        return Explanation(
            kind="loss-of-one-rank",
            text=f"the loss is that of rank 0 only {_from(index if began is None else began)}: the other "
            "ranks report " + ("0" if not any(sums[1:]) else "the same"),
            values=values | {"loss_sums": sums},
        )
    targets = _targets(record, index)
    if len(sums) == len(targets) > 1 and len(set(targets)) > 1:
        # If each rank divided by its own targets, undoing that gives the reference's sum.
        total = sum(targets)
        undone = sum(part * count * len(targets) / total for part, count in zip(sums, targets, strict=True))
        if abs(undone / total - expected) < 1e-5 * expected:
            return Explanation(
                kind="loss-normalisation",
                text="the loss is a mean of per-rank means although ranks hold different numbers of "
                "target tokens; the job asks for the mean over all target tokens",
                values=values | {"target_tokens": targets},
            )
    causes = name_scale(given / expected, record.world.mesh, record.world.accumulation_steps)
    if causes:
        return Explanation(
            kind="loss-scale",
            text=f"losses x {given / expected:.4g} {_from(index)}: {' or '.join(causes)}",
            values=values,
        )
    computed = whole_loss(record, index)
    if computed is not None and abs(computed - expected) <= limits.loss:
        return Explanation(
            kind="loss-altered",
            text=f"the reported loss ({given:.6g}) is not the computed one ({computed:.6g}), which agrees "
            f"with the reference, {_from(index)}",
            values=values | {"computed": computed},
        )
    if index > 0:
        return None
    return first_loss_cause(record, values)


def _gradient(record: Record, ratio: float, before: float, index: int) -> Explanation | None:
    """Why the norm of a step differs although its loss agrees; None: the updates before may explain it.

    ratio: of the norm to the reference's; before: the same a step earlier.
    """
    world = record.world
    norms = [rank.gradient_norms[index] for rank in record.ranks if len(rank.gradient_norms) > index]
    if len(set(norms)) > 1 and replicas_differ(record):
        return Explanation(
            kind="diverged",
            text="ranks see different gradient norms and end with different weights: gradients are not "
            "reduced over ranks",
        )
    if len(set(norms)) > 1:
        return Explanation(
            kind="norm-of-shard",
            text="ranks see different gradient norms: each clips by the norm of its own shard instead of the "
            "global norm",
            values={"gradient_norms": norms},
        )
    causes = name_scale(ratio, world.mesh, world.accumulation_steps, micro_batches(record))
    if causes:
        return Explanation(
            kind="gradient-scale",
            text=f"all gradients x {ratio:.4g}"
            + (f" {_from(index)}" if index else "")
            + f": {' or '.join(causes)}{_remedy(record, ratio)}",
            values={"ratio": ratio} | _step(index),
        )
    if index > 0 and abs(ratio / before - 1) < SUDDEN:
        return None
    targets = set(_targets(record, index))
    reduced = [dtype for dtype in reduce_dtypes(record) or [] if dtype != "float32"]
    hint = ""
    if reduced and abs(ratio - 1) < REDUCTION_ROUNDING:
        hint = f"; gradients are reduced in {', '.join(reduced)}, which rounds by as much"
    elif len(targets) > 1:
        hint = (
            "; ranks hold different numbers of target tokens: a loss averaged per rank instead of per "
            "token would explain it"
        )
    elif world.accumulation_steps > 1 or world.world_size > 1:
        hint = "; gradients of a rank, a micro-step or a parameter may be missing"
    which = "first gradient norm" if index == 0 else f"gradient norm of step {index}"
    return Explanation(
        kind="gradient-differs",
        text=f"the {which} {_compared(ratio)} the reference's although the loss agrees" + hint,
        values={"ratio": ratio} | _step(index),
    )


def _remedy(record: Record, ratio: float) -> str:
    """What to do about a factor that the library is known to leave in gradients."""
    effective = record.backend.effective
    factor = effective.details.get("gradient_factor", 1) if effective else 1
    if factor == 1 or abs(ratio / factor - 1) > SCALE_TOLERANCE:
        return ""
    return (
        "; DeepSpeed's Ulysses averages over data ranks only at stages 1 and 2: "
        f"{record.backend.name}:correct_gradients=true takes the factor out"
    )


def _targets(record: Record, index: int) -> list[int]:
    """Target tokens of each data rank in a step, as far as it wrote them."""
    counted = (rank for rank in record.ranks if record.world.mesh.counts_samples(rank.rank))
    return [rank.target_tokens[index] for rank in counted if len(rank.target_tokens) > index]


def _update(
    reference: Record, record: Record, limits: Limits, settings: Sequence[str], index: int | None
) -> Explanation:
    """What is left when losses and gradients agree at first."""
    if replicas_differ(record):
        return Explanation(kind="diverged", text="ranks hold different weights")
    still = _standing_still(reference, record)
    if still is not None:
        return still
    known = (
        f"settings that differ: {', '.join(settings)}"
        if settings
        else "suspects: clipping, learning rate, optimizer constants, dtype of masters"
    )
    text = f"losses and gradients agree at first, so the update differs; {known}"
    if index is not None:
        left, right = reference.steps[index].loss, record.steps[index].loss
        losses = left is not None and right is not None and abs(left - right) > limits.loss
        text += f"; {'losses' if losses else 'gradient norms'} diverge at step {index}"
    beyond = _parameters_beyond(reference, record, limits)
    if beyond:
        text += f"; final weights that differ: {_some(beyond)}"
    return Explanation(kind="update-differs", text=text, values={"parameters": beyond} | _step(index))


def replicas_differ(record: Record) -> bool:
    """Whether ranks ended with different weights."""
    return len({rank.final_digest for rank in record.ranks if rank.final_digest is not None}) > 1


def _standing_still(reference: Record, record: Record) -> Explanation | None:
    """Parameters that the reference moves and this run does not.

    Adam moves whatever it holds and has a gradient; in a low dtype updates may vanish, which is a finding
    of its own.
    """
    moved, other = movement(reference), movement(record)
    still = sorted(name for name, size in moved.items() if size > 0 and other.get(name) == 0)
    if not still or len(still) == len(moved) or master_dtypes(record) not in (None, ["float32"]):
        return None
    held = optimizer_groups(record)
    if held is not None and all(name in held for name in still):
        return Explanation(
            kind="gradient-differs",
            text=f"no gradient reaches {_some(still)}: in the optimizer, but never moved",
            values={"parameters": still},
        )
    return Explanation(
        kind="parameters-not-updated",
        text=f"{_some(still)} never moved although the reference moves them",
        values={"parameters": still},
    )


def _parameters_beyond(reference: Record, record: Record, limits: Limits) -> list[str]:
    left = (reference.final_weights.sketch if reference.final_weights else None) or {}
    right = (record.final_weights.sketch if record.final_weights else None) or {}
    moved = movement(reference)
    distances = {
        name: estimate(left[name], right[name]) / moved[name]
        for name in left
        if name in right and moved.get(name)
    }
    beyond = [n for n, value in distances.items() if n in limits.parameters and value > limits.parameters[n]]
    return sorted(beyond, key=lambda name: -distances[name])


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
