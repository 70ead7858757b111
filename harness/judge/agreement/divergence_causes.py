"""Why a run diverged from its reference, from losses, norms and weights of the records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy

from harness.backends.mesh import SPLITTING, Mesh
from harness.judge.agreement.noise import NormShift, Tolerance
from harness.judge.agreement.parameters import farthest, gradients_apart, kept, parameters_beyond, where
from harness.judge.distance import movement, relative
from harness.judge.effective import (
    ONE_NORM,
    altered_gradients,
    clips_by_part,
    decay_explains,
    decay_norm,
    master_dtypes,
    optimizer_groups,
    reduce_dtypes,
)
from harness.judge.quantities.measures import idle_on_some_ranks
from harness.judge.wording import a_few, numbered, percent
from harness.record import OddUpdatePart, Record
from harness.record.workload import known_strategy, micro_batches

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
    after = f" after its checkpoint of step {record.resumed.step}" if record.resumed else ""
    differs = f"the first loss{after} differs ({values['given']:.6g} against {values['reference']:.6g})"
    if record.resumed:
        text = f"{differs}: suspect what it loaded, or the steps that the checkpoint holds"
        return Explanation(kind="diverged", text=text, values=values)
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
        "so each sees only its own part",
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


def read_outside(record: Record) -> list[str]:
    """Weights that the loss reads where a rank holds a part of them."""
    strategy = known_strategy(record)
    cut = strategy is not None and strategy.facts.stage >= 3
    return (record.layout.read_outside or []) if cut and record.layout is not None else []


def _read_outside(record: Record, differs: str, values: dict[str, Any]) -> Explanation | None:
    if not (names := read_outside(record)):
        return None
    return Explanation(
        kind="weights-read-outside",
        text=f"{differs}: the loss reads {a_few(names)} outside of the model's forward pass, where a rank "
        "holds only its part",
        values=values | {"parameters": names},
    )


SCALE_TOLERANCE = 5e-3
"""Relative, at most: no factor is named where rounding leaves more open. It decides no verdict."""


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


def name_scale(
    ratio: float, mesh: Mesh, accumulation_steps: int, parts: int = 1, *, rounding: float = SCALE_TOLERANCE
) -> list[str]:
    """The mistakes that explain a ratio of gradients; several if their factors coincide.

    rounding: how far it moves the ratio, relative. A rank that adds no gradient may halve a norm, but not
    as exactly as a factor does.
    """
    return [
        name
        for name, factor in known_factors(mesh, accumulation_steps, parts).items()
        if abs(ratio / factor - 1) <= min(rounding, SCALE_TOLERANCE)
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
    if len(set(reported)) > 1 or not computed or len(set(computed)) == 1:
        return False
    # Losses of all ranks that are rounded to one value are none of rank 0.
    return abs(reported[0] - computed[0]) <= TOLERANCE * abs(computed[0])


SUDDEN = 0.05
"""Relative. Weights that agree so well that the loss does cannot change the next norm by so much: where the
ratio of norms changes by more from one step to the next, the gradient of that step is wrong and no update
before."""
REDUCTION_ROUNDING = 2.0**-7
"""Relative. Gradients that cross the wire in bf16 are rounded by up to 2^-9 each time they are added."""


def explain_divergence(
    reference: Record,
    record: Record,
    limits: Tolerance,
    settings: Sequence[str] = (),
    shift: NormShift | None = None,
) -> Explanation:
    """The most specific cause that the first step beyond the limits supports.

    Initial weights and samples of both runs are equal. A loss that differs at once is the forward pass or
    its normalisation, a norm that differs at once is the gradient, and what differs later only is the
    update, unless that step's own figures say otherwise. settings: names of those that differ and change
    the mathematics. shift: of all norms, which no single one shows.
    """
    index = _first_beyond(reference, record, limits)
    if index is None:
        unnamed = shifted(shift) if not settings else None
        found = unnamed or _update(reference, record, limits, settings, None)
        return _changed_in_passes(reference, record, limits, None, found)
    left, right = reference.steps[index], record.steps[index]
    if left.loss is None or right.loss is None:
        return Explanation(kind="diverged", text=f"the loss is not finite {_from(record, index)}")
    if abs(left.loss - right.loss) > limits.loss:
        cause = _forward(record, left.loss, right.loss, index, limits)
        if cause is not None and cause.kind == "diverged":
            cause = replace(cause, text=cause.text + other_buffers(reference, record))
    else:
        ratio = _norm_ratio(reference, record, index)
        before = _norm_ratio(reference, record, index - 1) if index else 1.0
        cause = (
            _standing_still(reference, record, index)
            or moved_alone(reference, record)
            or _gradient(reference, record, ratio, before, index, limits)
            or shifted(shift)
        )
    cause = cause or _update(reference, record, limits, settings, index)
    return _changed_in_passes(reference, record, limits, index, cause)


WITHOUT_CAUSE = ("gradient-differs", "update-differs", "diverged")
"""Kinds of explanations that may name no setting, factor or rank."""


def _changed_in_passes(
    reference: Record, record: Record, limits: Tolerance, index: int | None, found: Explanation
) -> Explanation:
    """Weights that passes write to, where ranks pass through copies of what they update; else `found`."""
    strategy, layout = known_strategy(record), record.layout
    names = (layout.changed_in_passes or []) if layout is not None else []
    if not names or strategy is None or not strategy.facts.stage or strategy.facts.cuts_layers:
        return found
    # In the first step passes change both alike, but for a backward pass that gathers weights again.
    kinds = WITHOUT_CAUSE if index != 0 else WITHOUT_CAUSE[:1] if strategy.facts.reshards else ()
    if found.kind not in kinds:
        return found
    beyond = parameters_beyond(reference, record, limits)
    if beyond and not set(names) & set(beyond):
        return found
    differ = "final weights differ" if index is None else "losses or gradient norms differ"
    since = "" if index is None else f" {_from(record, index)}"
    return Explanation(
        kind="weights-changed-in-passes",
        text=f"{differ}{since}: forward passes change {a_few(names)} in place, and {record.backend.label} "
        "makes them with copies, whose changes no update keeps",
        values={"parameters": names} | _step(record, index),
    )


def _first_beyond(reference: Record, record: Record, limits: Tolerance) -> int | None:
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


def _step(record: Record, index: int | None) -> dict[str, Any]:
    """The step in which a cause begins, for the values, unless it is the first of all."""
    number = record.steps[index].step if index is not None else 0
    return {"step": number} if number else {}


def _compared(ratio: float) -> str:
    """'is 0.7 times', 'is 0.0086 % below': a ratio in words that do not round it to one."""
    if abs(ratio - 1) >= 0.01:
        return f"is {ratio:.4g} times"
    return f"is {percent(abs(ratio - 1))} {'above' if ratio > 1 else 'below'}"


def _from(record: Record, index: int) -> str:
    number = record.steps[index].step
    if index == 0 and record.resumed is not None:
        return f"from step {number} on, the first after its checkpoint"
    return "from the first step on" if index == 0 else f"from step {number} on"


def _forward(
    record: Record, expected: float, given: float, index: int, limits: Tolerance
) -> Explanation | None:
    """Why the loss of a step differs; None: a later step, whose own figures do not tell."""
    values: dict[str, Any] = {"reference": expected, "given": given} | _step(record, index)
    sums = sums_of_step(record, index, "loss_sums")
    if of_one_rank(record, index):
        began = altered_step(record)
        return Explanation(
            kind="loss-of-one-rank",
            text=f"the loss is that of rank 0 only {_from(record, index if began is None else began)}: the "
            "other ranks report " + ("0" if not any(sums[1:]) else "the same"),
            values=values | {"loss_sums": sums},
        )
    targets = _targets(record, index)
    if len(sums) == len(targets) > 1 and len(set(targets)) > 1:
        # If each rank divided by its own targets, undoing that gives the reference's sum.
        total = sum(targets)
        undone = sum(part * count * len(targets) / total for part, count in zip(sums, targets, strict=True))
        if abs(undone / total - expected) <= limits.loss:
            return Explanation(
                kind="loss-normalisation",
                text="the loss is a mean of per-rank means although ranks hold different numbers of "
                "target tokens; the job asks for the mean over all target tokens",
                values=values | {"target_tokens": targets},
            )
    world, ratio = record.world, given / expected if expected else 0.0
    rounding = limits.loss / abs(expected) if expected else 0.0
    causes = name_scale(ratio, world.mesh, world.accumulation_steps, rounding=rounding)
    if causes:
        return Explanation(
            kind="loss-scale",
            text=f"losses x {ratio:.4g} {_from(record, index)}: {' or '.join(causes)}",
            values=values,
        )
    computed = whole_loss(record, index)
    if computed is not None and abs(computed - expected) <= limits.loss:
        return Explanation(
            kind="loss-altered",
            text=f"the reported loss ({given:.6g}) is not the computed one ({computed:.6g}), which agrees "
            f"with the reference, {_from(record, index)}",
            values=values | {"computed": computed},
        )
    if index > 0:
        return None
    return first_loss_cause(record, values)


def _ranks_apart(record: Record, norms: Sequence[float | None], ratio: float, index: int) -> Explanation:
    """Why ranks see different norms of one step. ratio: of the run's norm to the reference's."""
    if replicas_differ(record):
        return Explanation(
            kind="diverged",
            text="ranks see different gradient norms and end with different weights: gradients are not "
            "reduced over ranks",
        )
    # Ranks that hold the same part see the same norm.
    parts = {norm for norm in norms if norm is not None}
    together = math.hypot(*parts) * ratio / (record.steps[index].gradient_norm or math.inf)
    if together > 1 + SUDDEN:
        return Explanation(
            kind="gradient-differs",
            text="ranks see different gradient norms, which are no parts of the reference's: gradients are "
            f"not reduced over ranks {_from(record, index)}, although weights end equal, as if averaged "
            "instead",
            values={"gradient_norms": norms} | _step(record, index),
        )
    return Explanation(
        kind="norm-of-shard",
        text="ranks see different gradient norms: each clips by the norm of its own shard instead of the "
        "global norm",
        values={"gradient_norms": norms},
    )


def _by_part(record: Record) -> Explanation | None:
    """Ranks that were told one norm and clip each its own part."""
    limit = record.backend.effective.gradient_clipping if record.backend.effective else None
    if limit is None or altered_gradients(record) is None or not clips_by_part(record, limit):
        return None
    norm = max(step.applied_gradient_norm or 0.0 for step in record.steps)
    return Explanation(
        kind="norm-of-shard",
        text=f"the optimizer was given gradients of norm {norm:.4g}, as {round((norm / limit) ** 2)} parts "
        f"of norm {limit:g} have: each rank clips by the norm of its own shard instead of the global norm",
        values={"applied_gradient_norm": norm, "gradient_clipping": limit},
    )


def _gradient(
    reference: Record, record: Record, ratio: float, before: float, index: int, limits: Tolerance
) -> Explanation | None:
    """Why the norm of a step differs although its loss agrees; None: the updates before may explain it.

    ratio: of the norm to the reference's; before: the same a step earlier.
    """
    world = record.world
    norms = [rank.gradient_norms[index] for rank in record.ranks if len(rank.gradient_norms) > index]
    if len(set(norms)) > 1:
        return _ranks_apart(record, norms, ratio, index)
    parts = micro_batches(record)
    causes = name_scale(ratio, world.mesh, world.accumulation_steps, parts, rounding=limits.norm)
    if causes:
        return Explanation(
            kind="gradient-scale",
            text=f"all gradients x {ratio:.4g}"
            + (f" {_from(record, index)}" if index else "")
            + f": {' or '.join(causes)}{_remedy(record, ratio)}",
            values={"ratio": ratio} | _step(record, index),
        )
    if index > 0 and abs(ratio / before - 1) < SUDDEN:
        return None
    first = index == 0 and record.resumed is None
    which = "first gradient norm" if first else f"gradient norm of step {record.steps[index].step}"
    return Explanation(
        kind="gradient-differs",
        text=f"the {which} {_compared(ratio)} the reference's although the loss agrees"
        + _why_gradient(reference, record, ratio, index, limits),
        values={"ratio": ratio} | _step(record, index),
    )


def _why_gradient(reference: Record, record: Record, ratio: float, index: int, limits: Tolerance) -> str:
    """What else a record says of a norm that differs though the loss agrees, as the end of a text."""
    world, idle = record.world, idle_on_some_ranks(record)
    reduced = [dtype for dtype in reduce_dtypes(record) or [] if dtype != "float32"]
    few = world.accumulation_steps == 1 and world.world_size == 1
    if reduced and abs(ratio - 1) < REDUCTION_ROUNDING:
        return f"; gradients are reduced in {', '.join(reduced)}, which rounds by as much"
    if (norm := _one_norm(reference, record, index)) is not None:
        return f"; it is {norm:.4g} in every step: gradients are clipped before their norm is taken"
    before = record.steps[index - 1].gradient_norm if index else None
    if before and abs((record.steps[index].gradient_norm or 0.0) / before - 1) <= TOLERANCE:
        return "; it is that of the step before: gradients come a step late"
    if len(set(_targets(record, index))) > 1:
        return (
            "; ranks hold different numbers of target tokens: a loss averaged per rank or micro-step instead "
            "of per token would explain it"
        )
    if ratio < 1 and idle and idle[0].step <= record.steps[index].step:
        return f"; no gradient reaches {where(record, idle[0].names)} on {numbered('rank', idle[0].ranks)}"
    if (apart := gradients_apart(reference, record)) is not None:
        return apart
    beyond = parameters_beyond(reference, record, limits)
    if limits.parameters.keys() & movement(record) and not beyond and index == 0:
        return (
            "; final weights agree: the norm is computed otherwise, or all gradients have a factor that "
            "clipping or Adam takes out"
        )
    far = farthest(reference, record)
    if far is not None and far[0] in beyond:
        name, own, other = far
        return (
            f"; {name} ends farthest from the reference's, by {percent(own)} of its movement, any other by "
            f"{percent(other)} at most"
        )
    if few:
        return ""
    whose = "; gradients of a rank, a micro-step or a parameter may"
    if abs(ratio - 1) < REDUCTION_ROUNDING:
        return f"{whose} be rounded or have a factor"
    return f"{whose} be missing, or have a factor" if ratio < 1 else f"{whose} have a factor"


def _one_norm(reference: Record, record: Record, index: int) -> float | None:
    """The norm that every step from this one on has, where the reference's differ; None: norms differ."""
    norms = [step.gradient_norm for step in record.steps[index:]]
    others = [step.gradient_norm for step in reference.steps[index : len(record.steps)]]
    known, varied = [n for n in norms if n], [n for n in others if n]
    if len(known) < max(2, len(norms)) or len(varied) < 2:
        return None
    alike = max(known) - min(known) <= ONE_NORM * max(known)
    return known[0] if alike and max(varied) - min(varied) > SUDDEN * max(varied) else None


def shifted(shift: NormShift | None) -> Explanation | None:
    """A factor on gradients that no single step shows."""
    if shift is None:
        return None
    return Explanation(
        kind="gradient-differs",
        text=f"the gradient norm {_compared(1 + shift.mean)} that of {shift.label}, the nearest repetition, "
        f"on average over {shift.steps} steps, although losses agree; rounding explains "
        f"{percent(shift.allowed)}: gradients of a rank, a micro-step or a parameter may have a factor",
        values={"ratio": 1 + shift.mean},
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
    reference: Record, record: Record, limits: Tolerance, settings: Sequence[str], index: int | None
) -> Explanation:
    """What is left when losses and gradients agree at first."""
    if replicas_differ(record):
        return Explanation(kind="diverged", text="ranks hold different weights")
    cause = _standing_still(reference, record, index) or moved_alone(reference, record) or _by_part(record)
    if cause is not None:
        return cause
    beyond = parameters_beyond(reference, record, limits)
    cause = _skipped_by_reference(reference, record, beyond) or _updated_in_parts(record, settings)
    if cause is not None:
        return cause
    ends = _ends(reference, beyond)
    agreed = _agreed(reference, record, index)
    if index is None:
        text = f"{ends or 'final weights differ'} although {agreed}"
    else:
        left, right = reference.steps[index].loss, record.steps[index].loss
        losses = left is not None and right is not None and abs(left - right) > limits.loss
        parts = f"{'losses' if losses else 'gradient norms'} first differ at step {record.steps[index].step}"
        text = f"{parts}{f' and {ends}' if ends else ''}, although {agreed}"
    buffers = other_buffers(reference, record)
    altered = _altered(record)
    if not (buffers or altered or settings or record.resumed or index == 0) and _updates_are_adams(record):
        return Explanation(
            kind="gradient-differs",
            text=f"{text}: gradients differ, or passes use other weights than updates leave; every update "
            "that was looked at is what Adam makes of its gradient"
            + (gradients_apart(reference, record) or ""),
            values={"parameters": beyond} | _step(record, index),
        )
    if index != 0 and not buffers:
        odd = altered_updates(reference, record)
        text += ": the update differs" + (", see update-altered" if odd else "")
        if index and not (odd or altered or settings or record.resumed):
            text += ", or passes use other weights than it leaves"
    text += buffers + altered
    if record.resumed is not None:
        text += f"; suspect what it restored from its checkpoint of step {record.resumed.step}"
    if settings:
        text += f"; settings that differ: {', '.join(settings)}"
    return Explanation(kind="update-differs", text=text, values={"parameters": beyond} | _step(record, index))


def altered_updates(reference: Record, record: Record) -> dict[int, OddUpdatePart]:
    """By rank, its first update that is not what Adam makes of its gradient.

    None where the reference has some too, as of weights that passes change, and where updates were made
    outside of their step, whose samples are of other moments.
    """
    made = record.observed.updates_by_phase if record.observed is not None else {}
    elsewhere = any(count for phase, count in made.items() if phase != "step")
    if elsewhere or any(part.odd_update for part in reference.ranks):
        return {}
    return {part.rank: part.odd_update for part in record.ranks if part.odd_update is not None}


def _updates_are_adams(record: Record) -> bool:
    """Whether those of all steps but the first were computed again on every rank, with the same result."""
    due = len(record.steps) - 1
    audited = all(r.odd_update is None and (r.audited_updates or 0) >= due > 0 for r in record.ranks)
    # Each is computed with the constants of its own rank.
    return audited and not any(r.otherwise for r in record.ranks)


def _altered(record: Record) -> str:
    """What happens to gradients between clipping and update, as the end of a text; empty: nothing."""
    if (altered := altered_gradients(record)) is None:
        return ""
    step, given, due = altered
    limit = record.backend.effective.gradient_clipping if record.backend.effective else None
    what = "something changes them in between"
    if decay_explains(record, limit):
        what += (
            f", as adding weight decay x weights does, of norm {decay_norm(record):.3g} (AdamW takes that "
            "from the weights)"
        )
    return (
        f"; in step {step} the optimizer was given gradients of norm {given:.4g}, clipping leaves {due:.4g}: "
        f"{what}"
    )


def other_buffers(reference: Record, record: Record) -> str:
    """'; buffer a.b differs before the first step', as the end of a text; empty where none is known to."""
    mine, other = (side.observed.buffers if side.observed else {} for side in (record, reference))
    names = [name for name in mine.keys() & other.keys() if mine[name] != other[name]]
    if not names or record.resumed is not None:
        return ""
    noun, verb = ("buffer", "differs") if len(names) == 1 else ("buffers", "differ")
    return f"; {noun} {a_few(sorted(names))} {verb} before the first step, as after a cast to another dtype"


def _ends(reference: Record, beyond: Sequence[str]) -> str:
    """'a.weight ends with other values', farthest first; empty where no parameter is known to."""
    if len(beyond) > 1 and len(beyond) == len(movement(reference)):
        return f"all {len(beyond)} parameters end with other values"
    decaying = reference.layout.decaying if reference.layout is not None else []
    if len(beyond) > 1 and set(beyond) == set(decaying):
        return f"the {len(beyond)} parameters with weight decay, and no others, end with other values"
    return (
        f"{where(reference, beyond)} {'ends' if len(beyond) == 1 else 'end'} with other values"
        if beyond
        else ""
    )


def _agreed(reference: Record, record: Record, index: int | None) -> str:
    """What was compared in the steps before and agrees: 'losses and gradient norms agree in all 8 steps'."""
    steps = list(zip(reference.steps, record.steps, strict=False))[:index]
    norms = [a.gradient_norm is not None and b.gradient_norm is not None for a, b in steps]
    what = "losses and gradient norms agree" if any(norms) else "losses agree"
    if index is None:
        found = f"{what} in all {len(steps)} steps"
    elif index == 1:
        found = f"{what} in the step before"
    else:
        found = f"{what} in the {index} steps before"
    return found if any(norms) else f"{found}; gradient norms were not compared"


def moved_alone(reference: Record, record: Record) -> Explanation | None:
    """Parameters that the reference leaves where they are, and this run moves, however little."""
    layout = reference.layout
    if layout is None:
        return None
    if frozen := _moved_of(layout.frozen, reference, record):
        return Explanation(
            kind="frozen-weights-moved",
            text=f"{where(record, frozen)} moved, although the job freezes that",
            values={"parameters": frozen},
        )
    idle = _moved_of(layout.unreached or (), reference, record)
    if not idle:
        return None
    return Explanation(
        kind="decay-without-gradient",
        text=f"no gradient reaches {a_few(idle)}: zeros with weight decay here, skipped in the reference"
        + _shrunk(record, idle),
        values={"parameters": idle, "kept": {name: kept(record, name) for name in idle}},
    )


SKETCH_ROUNDING = 2.0**-20
"""Relative to a parameter's norm: sums of fp32 weights, taken at two moments, agree far better."""


def _moved_of(names: Iterable[str], reference: Record, record: Record) -> list[str]:
    """Those of these parameters that moved here and not in the reference."""
    left, right = movement(reference), movement(record)
    sketch = (record.initial_weights.sketch if record.initial_weights else None) or {}
    return sorted(
        name
        for name in names
        if left.get(name) == 0 and name in right and right[name] > SKETCH_ROUNDING * sketch[name][0]
    )


FLAT_GRADIENTS = ("fsdp1", "zero0", "zero12", "zero3")
"""Families whose gradients lie in one buffer: a parameter without a gradient has zeros there."""


def _skipped_by_reference(reference: Record, record: Record, beyond: Sequence[str]) -> Explanation | None:
    """Parameters that end elsewhere, and had no gradient in a step of the reference."""
    strategy = known_strategy(record)
    if strategy is None or strategy.family not in FLAT_GRADIENTS:
        return None
    idle = {
        name: step
        for rank in reference.ranks[:1]
        for step, missing in sorted(rank.without_gradient.items(), reverse=True)
        for name in missing or ()
    }
    names = [name for name in beyond if name in idle]
    if not names:
        return None
    step = idle[names[0]]
    return Explanation(
        kind="decay-without-gradient",
        text=f"no gradient reaches {a_few(names)} in step {step}: zeros here, an update by weight decay and "
        "moments; the reference skips it",
        values={"parameters": names, "kept": {name: kept(record, name) for name in names}} | {"step": step},
    )


FLAT_STATES = ("zero12", "zero3")
"""Families that hand the optimizer flat parts. Stage 0 keeps parameters whole (DeepSpeed 0.19): it flattens
those of its own fused Adam alone."""
PARTS_ROUNDING = 1e-4
"""Of `update_of_part`: an optimizer that updates each element on its own may round to fp32 in every step."""


def updates_parts_otherwise(record: Record) -> bool:
    """Whether the optimizer updates a part of a parameter in another way, and is handed flat parts."""
    strategy, apart = known_strategy(record), record.update_of_part
    if strategy is None or apart is None or apart <= PARTS_ROUNDING:
        return False
    cut = strategy.family == "fsdp1" and strategy.sharding != "none" and record.world.world_size > 1
    return cut or strategy.family in FLAT_STATES


def _updated_in_parts(record: Record, settings: Sequence[str]) -> Explanation | None:
    """An optimizer that looks at more than one element, under a strategy that hands it flat parts."""
    if not updates_parts_otherwise(record):
        return None
    apart = record.update_of_part or 0.0
    name = record.backend.effective.optimizer.rpartition(".")[2] if record.backend.effective else ""
    text = (
        f"the update of {name or 'the optimizer'} depends on the shape or the norm of a parameter (half a "
        f"matrix, flattened, moves otherwise by {percent(apart)}), and {record.backend.label} hands it flat "
        "parts: another computation"
    )
    if settings:
        text += f"; settings that differ besides: {', '.join(settings)}"
    return Explanation(kind="update-of-parts", text=text, values={"update_of_part": apart})


def _shrunk(record: Record, names: Sequence[str]) -> str:
    """'; it shrinks by 0.048 %, the product of ...', where weight decay is all that moved them."""
    found = kept(record, names[0])
    due = 1.0
    for step in record.steps:
        due *= 1.0 - step.learning_rate * record.job.optimizer.weight_decay
    if found is None or due >= 1.0 or abs(found - due) > DECAY_TOLERANCE * (1.0 - due):
        return ""
    which = "it shrinks" if len(names) == 1 else "they shrink"
    return f"; {which} by {percent(1.0 - due)}, the product of 1 - learning rate x weight decay"


DECAY_TOLERANCE = 0.01
"""Relative to how far decay alone moves a weight; rounding of fp32 weights is far below it."""


def replicas_differ(record: Record) -> bool:
    """Whether ranks ended with different weights."""
    return len({rank.final_digest for rank in record.ranks if rank.final_digest is not None}) > 1


UNDONE = "updates are undone or rounded away, or gradients too small to show in the norm are cut"


def _standing_still(reference: Record, record: Record, index: int | None) -> Explanation | None:
    """Parameters that the reference moves and this run does not.

    Adam moves whatever it holds and has a gradient; in a low dtype updates may vanish, which is a finding
    of its own. index: the first step whose loss or norm differs; None: none does.
    """
    moved, other = movement(reference), movement(record)
    still = sorted(name for name, size in moved.items() if size > 0 and other.get(name) == 0)
    if not still or master_dtypes(record) not in (None, ["float32"]):
        return None
    values = {"parameters": still}
    if not any(other.values()):
        return Explanation(
            kind="parameters-not-updated",
            text="no parameter moved: the optimizer updates nothing",
            values=values,
        )
    held = optimizer_groups(record)
    # One parameter's gradient may be too small to show in the norm, several hardly are.
    agrees = len(still) > 1 and index != 0 and record.steps[0].gradient_norm is not None
    if held is not None and all(name in held for name in still) and not agrees:
        return Explanation(
            kind="gradient-differs",
            text=f"no gradient reaches {where(reference, still)}: in the optimizer, but never moved",
            values=values,
        )
    return Explanation(
        kind="parameters-not-updated",
        text=f"{where(reference, still)} never moved although the reference moves them"
        + (f" and the first gradient norm agrees: {UNDONE}" if agrees else ""),
        values=values,
    )
