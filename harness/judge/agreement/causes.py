"""Why a run left its reference: hypotheses, each held against every fact of both records that it predicts.

A fact is true, false, or None where the records do not show it. A hypothesis is named only if all its signs
are true, nothing that it predicts is false and nothing that refutes it is true. Of those left the most
specific is named, then the one that most facts support. `HYPOTHESES` is the table of them all;
`judge/findings.toml` has their sentences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, Literal, TypeAlias

import numpy

from harness.backends.mesh import SPLITTING, Mesh
from harness.judge.agreement.noise import NormShift, Tolerance, least_loss
from harness.judge.catalogue import sentence
from harness.judge.distance import estimate, movement, relative, sketch_distances
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
from harness.judge.quantities import WithoutGradient, idle_on_some_ranks
from harness.judge.wording import a_few
from harness.record import OddUpdatePart, Record
from harness.record.workload import known_strategy, micro_batches

Fact = bool | None
Question: TypeAlias = "str | Callable[[Pair], Fact]"

UNDIVIDED = ("eager",)
"""Kernels that neither torch's `context_parallel` nor DeepSpeed's Ulysses divides among ranks."""
SCALE_TOLERANCE = 5e-3
"""Relative, at most: no factor is named where rounding leaves more open. It decides no verdict."""
TOLERANCE = 1e-6
"""Relative. An engine hands on what was computed; a cast of it to another device or fp32 changes less."""
SUDDEN = 0.05
"""Relative. Weights that agree so well that the loss does cannot change the next norm by so much: where the
ratio of norms changes by more from one step to the next, the gradient of that step is wrong and no update
before."""
REDUCTION_ROUNDING = 2.0**-7
"""Relative. Gradients that cross the wire in bf16 are rounded by up to 2^-9 each time they are added."""
UNSEEN = 0.1
"""Of the effect in the step that differs: less in an earlier step is none."""
MOST_BY_WEIGHTS = 10.0
"""Times the error of the ranks' weights: no mean over ranks changes a norm by more."""
APART = 0.05
"""Relative. Gradients that differ by less are not told from those that rounding moved."""
ALIKE = 0.1 * APART
"""The same of those that are said to agree: half of all."""
FAR = 3.0
"""Times. A parameter that ends so much farther from the reference's than any other is named."""
SKETCH_ROUNDING = 2.0**-20
"""Relative to a parameter's norm: sums of fp32 weights, taken at two moments, agree far better."""
DECAY_TOLERANCE = 0.01
"""Relative to how far decay alone moves a weight; rounding of fp32 weights is far below it."""
FLAT_GRADIENTS = ("fsdp1", "zero0", "zero12", "zero3")
"""Families whose gradients lie in one buffer: a parameter without a gradient has zeros there."""
FLAT_STATES = ("zero12", "zero3")
"""Families that hand the optimizer flat parts. Stage 0 keeps parameters whole (DeepSpeed 0.19): it flattens
those of its own fused Adam alone."""
PARTS_ROUNDING = 1e-4
"""Of `update_of_part`: an optimizer that updates each element on its own may round to fp32 in every step."""
OF_GRADIENTS = (
    "norm that clips", "frozen parameters", "dtype of computation", "dtype of reduction",
    "dtype of gradients", "dtype of accumulation", "attention kernel", "dropout", "TF32", "settings of NCCL",
    "compiled", "loss scale",
)  # fmt: skip
"""Settings that change gradients alone: an update that is Adam's of its gradient is not theirs."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A cause, under the id of the finding that reports it."""

    kind: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)


def explain_divergence(
    reference: Record,
    record: Record,
    limits: Tolerance,
    settings: Sequence[str] = (),
    shift: NormShift | None = None,
) -> Explanation:
    """The best supported cause that no fact contradicts, else what is known.

    Initial weights and samples of both runs are equal. settings: names of those that differ and change the
    mathematics. shift: of all norms, which no single one shows.
    """
    pair = Pair(reference, record, limits, settings, shift)
    return standing(pair)[0].told(pair)


def standing(pair: Pair) -> list[Hypothesis]:
    """Hypotheses that nothing contradicts, the most specific and best supported first; never empty."""
    held = [(found, found.support(pair)) for found in HYPOTHESES]
    left = [(found, support) for found, support in held if support is not None]
    return [found for found, _ in sorted(left, key=lambda one: (-one[0].specific, -one[1]))]


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A mistake, and what the records show if it was made."""

    name: str
    """Of its sentence in `findings.toml`."""
    kind: str
    """Id of the finding that reports it."""
    specific: int
    """4: recorded as such; 3: names tensors, ranks or a figure that fits; 2: a mechanism; 1: one of a few; 0:
    what is known."""
    signs: tuple[Question, ...] = ()
    """Facts without which it is not thought of."""
    predicts: tuple[Question, ...] = ()
    """Facts that support it where they hold and contradict it where they do not."""
    refuted_by: tuple[Question, ...] = ()
    """The other way round."""
    values: Callable[[Pair], dict[str, Any]] = lambda pair: pair.step_value

    def support(self, pair: Pair) -> int | None:
        """How many facts support it; None: one contradicts it, or a sign is missing."""
        signs = [_fact(pair, asked) for asked in self.signs]
        if not all(signs):
            return None
        wanted = [_fact(pair, asked) for asked in self.predicts]
        unwanted = [_fact(pair, asked) for asked in self.refuted_by]
        if False in wanted or True in unwanted:
            return None
        return len(signs) + wanted.count(True)

    def told(self, pair: Pair) -> Explanation:
        values = self.values(pair)
        text = sentence(self.kind, self.name, **{"pair": pair, "shift": pair.shift, **values})
        return Explanation(kind=self.kind, text=text, values=values)


def _fact(pair: Pair, asked: Question) -> Fact:
    """A property of the pair, by its name, or what a function makes of it."""
    found = getattr(pair, asked) if isinstance(asked, str) else asked(pair)
    return None if found is None else bool(found)


class Pair:
    """A run and its reference: what their records show, each looked at once."""

    def __init__(
        self,
        reference: Record,
        record: Record,
        limits: Tolerance,
        settings: Sequence[str] = (),
        shift: NormShift | None = None,
    ) -> None:
        self.reference, self.record = reference, record
        least = least_loss(record)
        self.limits = limits if least is None else replace(limits, norm=min(limits.norm, least.norm))
        self.settings, self.shift = list(settings), shift

    # The first step that differs.

    @cached_property
    def index(self) -> int | None:
        """Of the first step whose loss is missing, or whose loss or norm lies beyond the limits."""
        for index in range(min(len(self.reference.steps), len(self.record.steps))):
            if self.loss_apart(index) or self.norm_apart(index):
                return index
        return None

    def loss_apart(self, index: int) -> bool:
        left, right = self.reference.steps[index].loss, self.record.steps[index].loss
        return left is None or right is None or abs(left - right) > self.limits.loss

    def norm_apart(self, index: int) -> bool:
        norm = relative(self.reference.steps[index].gradient_norm, self.record.steps[index].gradient_norm)
        return norm is not None and norm > self.limits.norm

    @cached_property
    def at(self) -> int:
        """The same; the last step where none differs."""
        return len(self.record.steps) - 1 if self.index is None else self.index

    @property
    def number(self) -> int:
        """Of that step in the training."""
        return self.record.steps[self.at].step

    @property
    def step_value(self) -> dict[str, Any]:
        """The step in which a cause begins, unless it is the first of all."""
        number = self.number if self.index is not None else 0
        return {"step": number} if number else {}

    @property
    def since(self) -> str:
        """Whether it lasts: 'from step 3 on', or 'in step 3' where the next step agrees or there is none."""
        if self.at == 0 and self.record.resumed is not None:
            return f"from step {self.number} on, the first after its checkpoint"
        after = self.at + 1
        common = min(len(self.reference.steps), len(self.record.steps))
        lasts = after < common and (self.loss_apart(after) or self.norm_apart(after))
        if self.at == 0:
            return "from the first step on" if lasts or after == common else "in the first step"
        return f"from step {self.number} on" if lasts else f"in step {self.number}"

    @property
    def losses(self) -> tuple[float | None, float | None]:
        """Of that step, the reference's first."""
        return self.reference.steps[self.at].loss, self.record.steps[self.at].loss

    @property
    def loss_values(self) -> dict[str, Any]:
        reference, given = self.losses
        return {"reference": reference, "given": given} | self.step_value

    def norm_ratio(self, index: int) -> float:
        """The gradient norm of a step over the reference's; 1 where one of them is missing."""
        expected, given = self.reference.steps[index].gradient_norm, self.record.steps[index].gradient_norm
        return given / expected if given is not None and expected else 1.0

    def norms_known(self, index: int) -> bool:
        return bool(self.reference.steps[index].gradient_norm and self.record.steps[index].gradient_norm)

    @property
    def ratio(self) -> float:
        return self.norm_ratio(self.at)

    @property
    def ratio_values(self) -> dict[str, Any]:
        return {"ratio": self.ratio} | self.step_value

    @property
    def agreed(self) -> int:
        """Steps before the first that differs."""
        return len(self.record.steps) if self.index is None else self.index

    @property
    def norms_compared(self) -> bool:
        """Whether these have gradient norms."""
        pairs = zip(self.reference.steps[: self.agreed], self.record.steps[: self.agreed], strict=False)
        return any(a.gradient_norm is not None and b.gradient_norm is not None for a, b in pairs)

    # Of losses.

    @cached_property
    def sums(self) -> list[float]:
        return sums_of_step(self.record, self.at, "loss_sums")

    @property
    def others_report_nothing(self) -> bool:
        return not any(self.sums[1:])

    @property
    def computed_loss(self) -> float | None:
        """Mean loss per target token as it was computed, nats; None: not known."""
        sums = sums_of_step(self.record, self.at, "computed_loss_sums")
        targets = self.record.steps[self.at].target_tokens
        return sum(sums) / targets if sums and targets else None

    def targets(self, index: int) -> list[int]:
        """Target tokens of each data rank in a step, as far as it wrote them."""
        counted = (r for r in self.record.ranks if self.record.world.mesh.counts_samples(r.rank))
        return [rank.target_tokens[index] for rank in counted if len(rank.target_tokens) > index]

    def unevenness(self, index: int) -> float:
        """By how much equal weights of ranks are wrong: the sum over ranks of what each gets too much."""
        targets = self.targets(index)
        total = sum(targets)
        return sum(abs(1 / len(targets) - own / total) for own in targets) if total else 0.0

    @cached_property
    def loss_scales(self) -> list[str]:
        (expected, given), world = self.losses, self.record.world
        if not expected or given is None:
            return []
        rounding = self.limits.loss / abs(expected)
        return name_scale(given / expected, world.mesh, world.accumulation_steps, rounding=rounding)

    @property
    def loss_ratio(self) -> float:
        expected, given = self.losses
        return given / expected if expected and given is not None else 0.0

    # Of gradients.

    @cached_property
    def rank_norms(self) -> list[float | None]:
        ranks = self.record.ranks
        return [rank.gradient_norms[self.at] for rank in ranks if len(rank.gradient_norms) > self.at]

    @cached_property
    def gradient_scales(self) -> list[str]:
        world, parts = self.record.world, micro_batches(self.record)
        rounding = self.limits.norm
        return name_scale(self.ratio, world.mesh, world.accumulation_steps, parts, rounding=rounding)

    @property
    def remedy(self) -> str | None:
        """A backend whose library is known to leave this factor in gradients."""
        effective = self.record.backend.effective
        factor = effective.details.get("gradient_factor", 1) if effective else 1
        return (
            None
            if factor == 1 or abs(self.ratio / factor - 1) > SCALE_TOLERANCE
            else self.record.backend.name
        )

    @property
    def low_reductions(self) -> list[str]:
        return [dtype for dtype in reduce_dtypes(self.record) or [] if dtype != "float32"]

    @cached_property
    def one_norm(self) -> float | None:
        """The norm that every step from this one on has, where the reference's differ; None: norms differ."""
        norms = [step.gradient_norm for step in self.record.steps[self.at :]]
        others = [s.gradient_norm for s in self.reference.steps[self.at : len(self.record.steps)]]
        known, varied = [n for n in norms if n], [n for n in others if n]
        if len(known) < max(2, len(norms)) or len(varied) < 2:
            return None
        alike = max(known) - min(known) <= ONE_NORM * max(known)
        return known[0] if alike and max(varied) - min(varied) > SUDDEN * max(varied) else None

    @cached_property
    def idle(self) -> WithoutGradient | None:
        """Parameters that first get no gradient on some ranks alone, in this step or before."""
        found = [one for one in idle_on_some_ranks(self.record) if one.step <= self.number]
        return max(found, key=lambda one: one.step, default=None)

    @property
    def idle_names(self) -> str:
        return where(self.record, self.idle.names) if self.idle is not None else ""

    @cached_property
    def apart(self) -> tuple[list[str], float, float] | None:
        return gradients_apart(self.reference, self.record)

    @property
    def apart_names(self) -> str:
        return where(self.reference, self.apart[0]) if self.apart is not None else ""

    @cached_property
    def far(self) -> tuple[str, float, float] | None:
        """A parameter beyond its limit that ends far beyond all others."""
        found = farthest(self.reference, self.record)
        return found if found is not None and found[0] in self.beyond else None

    @cached_property
    def lost(self) -> list[str]:
        """What may be missing from the gradient by the size of its norm, as 'one of 2 ranks'.

        Without a share s of it a norm is 1 - s of what it was where all parts point the same way, and the
        root of that where none points along another.
        """
        world = self.record.world
        ranks, steps, targets = world.mesh.data_size, world.accumulation_steps, self.targets(self.at)
        uneven = bool(self.unevenness(self.at))
        shares = [own / sum(targets) for own in targets] if sum(targets) else [1 / ranks]
        less, more = (0.5, 2.0) if uneven else (1.0, 1.0)  # micro-steps: their tokens are not recorded
        may: dict[str, tuple[float, float]] = {}
        if ranks > 1:
            may[f"one of {ranks} ranks"] = min(shares), max(shares)
        if steps > 1:
            may[f"one of {steps} micro-steps"] = less / steps, min(1.0, more / steps)
        if ranks > 1 and steps > 1:
            both = ranks * steps
            may[f"one of {steps} micro-steps of one of {ranks} ranks"] = less / both, min(1.0, more / both)
        return [
            name
            for name, (least, most) in may.items()
            if (1 - most) * (1 - SUDDEN) <= self.ratio <= math.sqrt(1 - least) * (1 + ALIKE)
        ]

    # Of weights.

    @cached_property
    def moved(self) -> tuple[dict[str, float], dict[str, float]]:
        return movement(self.reference), movement(self.record)

    @cached_property
    def still(self) -> list[str]:
        """Parameters that the reference moves and this run does not.

        Adam moves whatever it holds and has a gradient; in a low dtype updates may vanish, which is a finding
        of its own.
        """
        if master_dtypes(self.record) not in (None, ["float32"]):
            return []
        moved, other = self.moved
        return sorted(name for name, size in moved.items() if size > 0 and other.get(name) == 0)

    @property
    def still_names(self) -> str:
        return where(self.reference, self.still)

    def moved_of(self, names: Iterable[str]) -> list[str]:
        """Those of these parameters that moved here, however little, and not in the reference."""
        left, right = self.moved
        weights = self.record.initial_weights
        sketch = (weights.sketch if weights else None) or {}
        return sorted(
            name
            for name in names
            if left.get(name) == 0 and name in right and right[name] > SKETCH_ROUNDING * sketch[name][0]
        )

    @cached_property
    def frozen(self) -> list[str]:
        return self.moved_of(self.reference.layout.frozen) if self.reference.layout is not None else []

    @property
    def frozen_names(self) -> str:
        return where(self.record, self.frozen)

    @cached_property
    def unreached(self) -> list[str]:
        layout = self.reference.layout
        return self.moved_of(layout.unreached or ()) if layout is not None else []

    @property
    def shrunk(self) -> float | None:
        """How far weight decay alone shrinks these, where that is all that moved them."""
        found, due = kept(self.record, self.unreached[0]), 1.0
        for step in self.record.steps:
            due *= 1.0 - step.learning_rate * self.record.job.optimizer.weight_decay
        if found is None or due >= 1.0 or abs(found - due) > DECAY_TOLERANCE * (1.0 - due):
            return None
        return 1.0 - due

    @cached_property
    def beyond(self) -> list[str]:
        return parameters_beyond(self.reference, self.record, self.limits)

    @property
    def beyond_values(self) -> dict[str, Any]:
        return {"parameters": self.beyond} | self.step_value

    @property
    def ends(self) -> str:
        """Which parameters end with other values, farthest first; empty where none is known to."""
        beyond, layout = self.beyond, self.reference.layout
        if len(beyond) > 1 and len(beyond) == len(self.moved[0]):
            return f"all {len(beyond)} parameters"
        if len(beyond) > 1 and layout is not None and set(beyond) == set(layout.decaying):
            return f"the {len(beyond)} parameters with weight decay, and no others"
        return where(self.reference, beyond)

    @cached_property
    def skipped(self) -> tuple[list[str], int]:
        """Parameters that end elsewhere and had no gradient in a step of the reference, and that step."""
        strategy = known_strategy(self.record)
        if strategy is None or strategy.family not in FLAT_GRADIENTS:
            return [], 0
        idle = {
            name: step
            for rank in self.reference.ranks[:1]
            for step, missing in sorted(rank.without_gradient.items(), reverse=True)
            for name in missing or ()
        }
        names = [name for name in self.beyond if name in idle]
        return names, idle[names[0]] if names else 0

    @cached_property
    def changed_in_passes(self) -> list[str]:
        """Weights that passes write to, where ranks pass through copies of what they update."""
        strategy, layout = known_strategy(self.record), self.record.layout
        if layout is None or strategy is None or not strategy.facts.stage or strategy.facts.cuts_layers:
            return []
        return layout.changed_in_passes or []

    @property
    def buffers(self) -> list[str]:
        """Buffers that differ before the first step."""
        if self.record.resumed is not None:
            return []
        sides = (self.record.observed, self.reference.observed)
        mine, other = (seen.buffers if seen else {} for seen in sides)
        return sorted(name for name in mine.keys() & other.keys() if mine[name] != other[name])

    # Of updates.

    @cached_property
    def altered(self) -> tuple[int, float, float] | None:
        return altered_gradients(self.record)

    @property
    def limit(self) -> float | None:
        effective = self.record.backend.effective
        return effective.gradient_clipping if effective else None

    @property
    def added_decay(self) -> float | None:
        """Norm of weight decay x weights where adding that explains gradients that were altered."""
        return decay_norm(self.record) if decay_explains(self.record, self.limit) else None

    @property
    def clipped_norm(self) -> float:
        return max(step.applied_gradient_norm or 0.0 for step in self.record.steps)

    @property
    def clipped_parts(self) -> int:
        return round((self.clipped_norm / (self.limit or math.inf)) ** 2)

    @cached_property
    def odd_updates(self) -> dict[int, OddUpdatePart]:
        return altered_updates(self.reference, self.record)

    @property
    def optimizer(self) -> str:
        effective = self.record.backend.effective
        return effective.optimizer.rpartition(".")[2] if effective else ""


def _in_the_first_step(pair: Pair) -> Fact:
    return pair.index == 0


def _first_of_all(pair: Pair) -> Fact:
    """No update came before it, not even in the run that this one continues."""
    return pair.index == 0 and pair.record.resumed is None


def _loss_lost(pair: Pair) -> Fact:
    return pair.index is not None and None in pair.losses


def _loss_differs(pair: Pair) -> Fact:
    return pair.index is not None and None not in pair.losses and pair.loss_apart(pair.index)


def _first_loss_differs(pair: Pair) -> Fact:
    """Before any update."""
    return pair.index == 0 and (None in pair.losses or pair.loss_apart(0))


def _norm_differs(pair: Pair) -> Fact:
    """Although the loss of its step agrees."""
    return pair.index is not None and None not in pair.losses and not pair.loss_apart(pair.index)


def _norm_differs_at_once(pair: Pair) -> Fact:
    """By more than weights can explain that agreed in the step before."""
    if not _norm_differs(pair):
        return False
    return pair.at == 0 or abs(pair.ratio / pair.norm_ratio(pair.at - 1) - 1) >= SUDDEN


def _resumed(pair: Pair) -> Fact:
    return pair.record.resumed is not None


def _loss_of_rank_0(pair: Pair) -> Fact:
    return of_one_rank(pair.record, pair.at)


def _means_undone(pair: Pair) -> Fact:
    """If each rank divided by its own targets, undoing that gives the reference's loss."""
    targets, sums, expected = pair.targets(pair.at), pair.sums, pair.losses[0]
    if not len(sums) == len(targets) > 1 or len(set(targets)) == 1 or expected is None:
        return None
    total = sum(targets)
    undone = sum(part * count * len(targets) / total for part, count in zip(sums, targets, strict=True))
    return abs(undone / total - expected) <= pair.limits.loss


def _computed_loss_agrees(pair: Pair) -> Fact:
    computed, expected = pair.computed_loss, pair.losses[0]
    return None if computed is None or expected is None else abs(computed - expected) <= pair.limits.loss


def _attention_undivided(pair: Pair) -> Fact:
    seen, parts = pair.record.observed, pair.record.world.mesh.size("sequence")
    return parts > 1 and seen is not None and seen.attention in UNDIVIDED


def _weights_in_use_stale(pair: Pair) -> Fact:
    weights = pair.record.initial_weights
    return None if weights is None else bool(weights.stale_elements)


def _loss_reads_cut_weights(pair: Pair) -> Fact:
    return bool(read_outside(pair.record))


def _rank_norms_differ(pair: Pair) -> Fact:
    return len(set(pair.rank_norms)) > 1


def _gradients_reduced_over_ranks(pair: Pair) -> Fact:
    """Whether the mesh has ranks with samples of their own, so that gradients must be added up."""
    return pair.record.world.mesh.data_size > 1


def _data_ranks_see_other_norms(pair: Pair) -> Fact:
    """Of ranks that have the same place in all other dimensions."""
    ranks, norms, mesh = pair.record.ranks, pair.rank_norms, pair.record.world.mesh
    if len(norms) < len(ranks) or mesh.data_size == 1:
        return None
    places: dict[tuple[Any, ...], set[float | None]] = {}
    for rank, norm in zip(ranks, norms, strict=True):
        place = tuple(at for name, at in mesh.coordinates(rank.rank).items() if name not in SPLITTING)
        places.setdefault(place, set()).add(norm)
    return any(len(of_place) > 1 for of_place in places.values())


def _rank_norms_are_parts(pair: Pair) -> Fact:
    """Whether norms of parts that ranks hold make up the reference's, or more where parts are held twice."""
    norms, whole = [n for n in pair.rank_norms if n is not None], pair.reference.steps[pair.at].gradient_norm
    if not norms or not whole:
        return None
    parts: list[float] = []
    for norm in sorted(norms):  # ranks that hold the same part see the same norm
        if not parts or norm > parts[-1] * (1 + 10 * TOLERANCE):
            parts.append(norm)
    mesh = pair.record.world.mesh
    twice = math.sqrt(mesh.size("tensor") * mesh.size("sequence"))
    return parts[-1] <= whole * (1 + SUDDEN) and math.hypot(*parts) <= whole * (1 + SUDDEN) * twice


def _ranks_end_apart(pair: Pair) -> Fact:
    digests = [rank.final_digest for rank in pair.record.ranks]
    return None if None in digests or len(digests) < 2 else len(set(digests)) > 1


def _tensors_have_factors(pair: Pair) -> Fact:
    """Whether some second moments lie apart from all others."""
    known = pair.record.moment_norms and pair.reference.moment_norms
    return pair.apart is not None if known else None


def _wire_rounds_as_much(pair: Pair) -> Fact:
    return bool(pair.low_reductions) and abs(pair.ratio - 1) < REDUCTION_ROUNDING


def _norm_of_the_step_before(pair: Pair) -> Fact:
    before = pair.record.steps[pair.at - 1].gradient_norm if pair.at else None
    given = pair.record.steps[pair.at].gradient_norm
    return bool(before) and given is not None and abs(given / (before or 1.0) - 1) <= TOLERANCE


def _ranks_hold_uneven_targets(pair: Pair) -> Fact:
    return len(set(pair.targets(pair.at))) > 1


def _every_uneven_step_differs(pair: Pair) -> Fact:
    """False: a step before was as uneven, and its norm agrees far better."""
    effect = abs(pair.ratio - 1) / (pair.unevenness(pair.at) or math.inf)
    before = [index for index in range(pair.at) if pair.unevenness(index) and pair.norms_known(index)]
    unseen = [
        index
        for index in before
        if abs(pair.norm_ratio(index) - 1) < UNSEEN * effect * pair.unevenness(index)
    ]
    return None if not before else not unseen


def _size_fits_uneven_targets(pair: Pair) -> Fact:
    if pair.record.world.accumulation_steps > 1:
        return None  # how many targets a micro-step has is not recorded
    return abs(pair.ratio - 1) <= MOST_BY_WEIGHTS * pair.unevenness(pair.at)


def _some_ranks_idle(pair: Pair) -> Fact:
    return pair.idle is not None and pair.ratio < 1


def _every_idle_step_differs(pair: Pair) -> Fact:
    """False: the same ranks lacked this gradient in a step whose norm agrees far better."""
    if pair.idle is None:
        return None
    before = [
        index for index in range(pair.at)
        if pair.record.steps[index].step >= pair.idle.step and pair.norms_known(index)
    ]  # fmt: skip
    unseen = [i for i in before if abs(pair.norm_ratio(i) - 1) < UNSEEN * abs(pair.ratio - 1)]
    return None if not before else not unseen


def _final_weights_agree(pair: Pair) -> Fact:
    compared = pair.limits.parameters.keys() & pair.moved[1]
    return not pair.beyond if compared else None


def _settings_of_updates_differ(pair: Pair) -> Fact:
    """None: settings differ that change gradients alone, while updates were not all computed again."""
    if not pair.settings:
        return False
    if set(pair.settings) - set(OF_GRADIENTS):
        return True
    return False if _updates_are_adams(pair) else None


def _nothing_moved(pair: Pair) -> Fact:
    return bool(pair.still) and not any(pair.moved[1].values())


def _still_ones_are_in_the_optimizer(pair: Pair) -> Fact:
    held = optimizer_groups(pair.record)
    return None if held is None else all(name in held for name in pair.still)


def _first_norm_denies_a_missing_gradient(pair: Pair) -> Fact:
    """One parameter's gradient may be too small to show in the norm, several hardly are."""
    return len(pair.still) > 1 and pair.index != 0 and pair.record.steps[0].gradient_norm is not None


def _clipped_by_part(pair: Pair) -> Fact:
    return pair.limit is not None and pair.altered is not None and clips_by_part(pair.record, pair.limit)


def _reference_skipped_it(pair: Pair) -> Fact:
    return bool(pair.skipped[0])


def _optimizer_depends_on_parts(pair: Pair) -> Fact:
    """Whether it updates a part of a parameter in another way, and is handed flat parts."""
    record = pair.record
    strategy, apart = known_strategy(record), record.update_of_part
    if strategy is None or apart is None or apart <= PARTS_ROUNDING:
        return False
    cut = strategy.family == "fsdp1" and strategy.sharding != "none" and record.world.world_size > 1
    return cut or strategy.family in FLAT_STATES


def _changed_ones_end_apart(pair: Pair) -> Fact:
    return bool(set(pair.changed_in_passes) & set(pair.beyond)) if pair.beyond else None


def _changes_show_then(pair: Pair) -> Fact:
    """In the first step passes change both alike, but for a backward pass that gathers weights again."""
    strategy = known_strategy(pair.record)
    again = strategy is not None and strategy.facts.reshards
    return not _in_the_first_step(pair) or (again and bool(_norm_differs(pair)))


def _updates_are_adams(pair: Pair) -> Fact:
    """Those of all steps but the first were computed again on every rank, with the same result."""
    due, ranks = len(pair.record.steps) - 1, pair.record.ranks
    if any(rank.odd_update is not None for rank in ranks):
        return False
    # Each is computed with the constants of its own rank.
    audited = all((rank.audited_updates or 0) >= due > 0 for rank in ranks)
    return True if audited and not any(rank.otherwise for rank in ranks) else None


def _altered_before(pair: Pair) -> Fact:
    """Whether an update that is not Adam's came before the first step that differs."""
    steps = [part.step for part in pair.odd_updates.values()]
    return None if pair.index is None or not steps else min(steps) < pair.number


HYPOTHESES = (
    # Of losses.
    Hypothesis(name="not-finite", kind="diverged", specific=4, signs=(_loss_lost,), values=lambda pair: {}),
    Hypothesis(
        name="one-rank", kind="loss-of-one-rank", specific=3, signs=(_loss_differs, _loss_of_rank_0),
        values=lambda p: p.loss_values | {"loss_sums": p.sums},
    ),
    Hypothesis(
        name="mean-of-means", kind="loss-normalisation", specific=3, signs=(_loss_differs, _means_undone),
        values=lambda p: p.loss_values | {"target_tokens": p.targets(p.at)},
    ),
    Hypothesis(
        name="factor", kind="loss-scale", specific=3, signs=(_loss_differs, "loss_scales"),
        values=lambda p: p.loss_values,
    ),
    Hypothesis(
        name="altered", kind="loss-altered", specific=3, signs=(_loss_differs, _computed_loss_agrees),
        values=lambda p: p.loss_values | {"computed": p.computed_loss},
    ),
    Hypothesis(
        name="undivided", kind="attention-within-part", specific=3,
        signs=(_loss_differs, _first_of_all, _attention_undivided),
        values=lambda p: p.loss_values | {"attention": p.record.observed and p.record.observed.attention},
    ),
    Hypothesis(
        name="stale-weights", kind="diverged", specific=3,
        signs=(_loss_differs, _first_of_all, _weights_in_use_stale), values=lambda p: p.loss_values,
    ),
    Hypothesis(
        name="read-outside", kind="weights-read-outside", specific=3,
        signs=(_loss_differs, _first_of_all, _loss_reads_cut_weights),
        values=lambda p: p.loss_values | {"parameters": read_outside(p.record)},
    ),
    Hypothesis(
        name="buffers", kind="diverged", specific=2, signs=(_loss_differs, _first_of_all, "buffers"),
        values=lambda p: p.loss_values,
    ),
    Hypothesis(
        name="restored", kind="diverged", specific=1, signs=(_loss_differs, _in_the_first_step, _resumed),
        values=lambda p: p.loss_values,
    ),
    # Of weights that should be equal, should move, or should not.
    Hypothesis(
        name="ranks-apart", kind="diverged", specific=4, signs=(_ranks_end_apart,),
        refuted_by=(_loss_lost, _norm_differs_at_once, _in_the_first_step, _rank_norms_differ),
        values=lambda pair: {},
    ),
    Hypothesis(
        name="nothing-moved", kind="parameters-not-updated", specific=4, signs=(_nothing_moved,),
        refuted_by=(_first_loss_differs,), values=lambda p: {"parameters": p.still},
    ),
    Hypothesis(
        name="no-gradient", kind="gradient-differs", specific=4,
        signs=("still", _still_ones_are_in_the_optimizer),
        refuted_by=(_first_norm_denies_a_missing_gradient, _nothing_moved, _first_loss_differs),
        values=lambda p: {"parameters": p.still},
    ),
    Hypothesis(
        name="still", kind="parameters-not-updated", specific=4, signs=("still",),
        refuted_by=(_nothing_moved, _first_loss_differs), values=lambda p: {"parameters": p.still},
    ),
    Hypothesis(
        name="moved", kind="frozen-weights-moved", specific=4, signs=("frozen",),
        refuted_by=(_first_loss_differs,), values=lambda p: {"parameters": p.frozen},
    ),
    Hypothesis(
        name="unreached", kind="decay-without-gradient", specific=4, signs=("unreached",),
        refuted_by=(_first_loss_differs,), values=lambda p: {
            "parameters": p.unreached, "kept": {name: kept(p.record, name) for name in p.unreached}
        },
    ),
    # Of gradients.
    Hypothesis(
        name="not-reduced", kind="diverged", specific=3,
        signs=(_norm_differs, _rank_norms_differ, _gradients_reduced_over_ranks),
        predicts=(_data_ranks_see_other_norms, _ranks_end_apart), refuted_by=(_rank_norms_are_parts,),
        values=lambda pair: {},
    ),
    Hypothesis(
        name="weights-averaged", kind="gradient-differs", specific=3,
        signs=(_norm_differs, _rank_norms_differ, _gradients_reduced_over_ranks),
        predicts=(_data_ranks_see_other_norms,), refuted_by=(_ranks_end_apart, _rank_norms_are_parts),
        values=lambda p: {"gradient_norms": p.rank_norms} | p.step_value,
    ),
    Hypothesis(
        name="own-norms", kind="norm-of-shard", specific=3, signs=(_norm_differs, _rank_norms_differ),
        predicts=(_rank_norms_are_parts,), values=lambda p: {"gradient_norms": p.rank_norms},
    ),
    Hypothesis(
        name="factor", kind="gradient-scale", specific=3, signs=(_norm_differs, "gradient_scales"),
        refuted_by=(_rank_norms_differ, _tensors_have_factors), values=lambda p: p.ratio_values,
    ),
    Hypothesis(
        name="clipped-before", kind="gradient-differs", specific=3,
        signs=(_norm_differs_at_once, "one_norm"), refuted_by=(_rank_norms_differ,),
        values=lambda p: p.ratio_values,
    ),
    Hypothesis(
        name="step-late", kind="gradient-differs", specific=3,
        signs=(_norm_differs_at_once, _norm_of_the_step_before),
        refuted_by=(_rank_norms_differ, "one_norm"), values=lambda p: p.ratio_values,
    ),
    Hypothesis(
        name="idle", kind="gradient-differs", specific=3, signs=(_norm_differs_at_once, _some_ranks_idle),
        predicts=(_every_idle_step_differs,), refuted_by=(_rank_norms_differ,),
        values=lambda p: p.ratio_values,
    ),
    Hypothesis(
        name="tensors", kind="gradient-differs", specific=3,
        signs=(_norm_differs_at_once, _tensors_have_factors),
        refuted_by=(_rank_norms_differ,), values=lambda p: p.ratio_values,
    ),
    Hypothesis(
        name="wire", kind="gradient-differs", specific=3, signs=(_norm_differs_at_once, _wire_rounds_as_much),
        refuted_by=(_rank_norms_differ, _tensors_have_factors), values=lambda p: p.ratio_values,
    ),
    Hypothesis(
        name="mean-of-means", kind="gradient-differs", specific=2,
        signs=(_norm_differs_at_once, _ranks_hold_uneven_targets),
        predicts=(_every_uneven_step_differs, _size_fits_uneven_targets),
        refuted_by=(_rank_norms_differ, _tensors_have_factors), values=lambda p: p.ratio_values,
    ),
    Hypothesis(
        name="norm-alone", kind="gradient-differs", specific=2,
        signs=(_norm_differs_at_once, _first_of_all, _final_weights_agree), refuted_by=(_rank_norms_differ,),
        values=lambda p: p.ratio_values,
    ),
    Hypothesis(
        name="farthest", kind="gradient-differs", specific=2,
        signs=(_norm_differs_at_once, "far"), refuted_by=(_rank_norms_differ,),
        values=lambda p: p.ratio_values,
    ),
    Hypothesis(
        name="part-lost", kind="gradient-differs", specific=1,
        signs=(_norm_differs_at_once, "lost"),
        refuted_by=(_rank_norms_differ, _tensors_have_factors, _final_weights_agree),
        values=lambda p: p.ratio_values,
    ),
    Hypothesis(
        name="shifted", kind="gradient-differs", specific=1, signs=("shift",),
        refuted_by=(_loss_lost, _loss_differs, "settings", _norm_differs_at_once),
        values=lambda p: {"ratio": 1 + p.shift.mean if p.shift else None},
    ),
    # Of updates: what a run does after its first gradient.
    Hypothesis(
        name="by-part", kind="norm-of-shard", specific=3, signs=(_clipped_by_part,),
        refuted_by=(_norm_differs_at_once, _in_the_first_step),
        values=lambda p: {"applied_gradient_norm": p.clipped_norm, "gradient_clipping": p.limit},
    ),
    Hypothesis(
        name="skipped", kind="decay-without-gradient", specific=3, signs=(_reference_skipped_it,),
        refuted_by=(_norm_differs_at_once, _in_the_first_step),
        values=lambda p: {
            "parameters": p.skipped[0], "kept": {name: kept(p.record, name) for name in p.skipped[0]},
            "step": p.skipped[1],
        },
    ),
    Hypothesis(
        name="parts", kind="update-of-parts", specific=3, signs=(_optimizer_depends_on_parts,),
        refuted_by=(_norm_differs_at_once, _in_the_first_step),
        values=lambda p: {"update_of_part": p.record.update_of_part},
    ),
    Hypothesis(
        name="in-place", kind="weights-changed-in-passes", specific=3, signs=("changed_in_passes",),
        predicts=(_changes_show_then, _changed_ones_end_apart),
        values=lambda p: {"parameters": p.changed_in_passes} | p.step_value,
    ),
    Hypothesis(
        name="altered-gradients", kind="update-differs", specific=2,
        signs=("altered",),
        refuted_by=(_loss_lost, _norm_differs_at_once, _in_the_first_step), values=lambda p: p.beyond_values,
    ),
    Hypothesis(
        name="buffers", kind="update-differs", specific=2, signs=("buffers",),
        refuted_by=(_loss_lost, _norm_differs_at_once, _in_the_first_step), values=lambda p: p.beyond_values,
    ),
    Hypothesis(
        name="altered-updates", kind="update-differs", specific=2, signs=("odd_updates",),
        predicts=(_altered_before,), refuted_by=(_loss_lost, _norm_differs_at_once, _in_the_first_step),
        values=lambda p: p.beyond_values,
    ),
    Hypothesis(
        name="settings", kind="update-differs", specific=2, signs=("settings",),
        predicts=(_settings_of_updates_differ,),
        refuted_by=(_loss_lost, _norm_differs_at_once, _in_the_first_step), values=lambda p: p.beyond_values,
    ),
    Hypothesis(
        name="restored", kind="update-differs", specific=1, signs=(_resumed,),
        refuted_by=(_loss_lost, _norm_differs_at_once), values=lambda p: p.beyond_values,
    ),
    Hypothesis(
        name="before-updates", kind="gradient-differs", specific=1, signs=(_updates_are_adams,),
        refuted_by=(
            _loss_lost, _in_the_first_step, _norm_differs_at_once, _settings_of_updates_differ,
            "altered", _resumed,
        ),
        values=lambda p: p.beyond_values,
    ),
    # What is known where nothing else stands.
    Hypothesis(
        name="unknown", kind="diverged", specific=0, signs=(_loss_differs, _in_the_first_step),
        values=lambda p: p.loss_values,
    ),
    Hypothesis(
        name="unknown", kind="gradient-differs", specific=0, signs=(_norm_differs_at_once,),
        values=lambda p: p.ratio_values,
    ),
    Hypothesis(name="unknown", kind="update-differs", specific=0, values=lambda p: p.beyond_values),
)  # fmt: skip


def moved_alone(reference: Record, record: Record) -> Explanation | None:
    """Parameters that the reference leaves where they are, and this run moves, however little."""
    pair = Pair(reference, record, Tolerance(loss=math.inf, norm=math.inf, update=math.inf, weights=math.inf))
    named = (one for one in HYPOTHESES if one.kind in ("frozen-weights-moved", "decay-without-gradient"))
    found = (one for one in named if one.name != "skipped" and one.support(pair) is not None)
    return next((one.told(pair) for one in found), None)


def shifted(shift: NormShift | None) -> str | None:
    """A factor on gradients that no single step shows, in words."""
    return None if shift is None else sentence("gradient-differs", "shifted", shift=shift)


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


def read_outside(record: Record) -> list[str]:
    """Weights that the loss reads where a rank holds a part of them."""
    strategy = known_strategy(record)
    cut = strategy is not None and strategy.facts.stage >= 3
    return (record.layout.read_outside or []) if cut and record.layout is not None else []


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


def gradients_apart(reference: Record, record: Record) -> tuple[list[str], float, float] | None:
    """Parameters whose gradients lie far from the reference's while most do not; least and largest factor.

    By second moments, over the change that most have in common: clipping passes one parameter's on to all.
    """
    mine, others = record.moment_norms, reference.moment_norms
    ratios = {n: mine[n][1] / others[n][1] for n in mine.keys() & others.keys() if others[n][1] > 0}
    common = median(ratios.values()) if ratios else 0.0
    if not common:
        return None
    apart = sorted(((abs(ratio / common - 1), name) for name, ratio in ratios.items()), reverse=True)
    usual = median(distance for distance, _ in apart)
    named = [name for distance, name in apart if distance > max(APART, FAR * usual)]
    if not named or usual > ALIKE or len(named) > len(apart) // 2:
        return None
    factors = [ratios[name] / common for name in named]
    return named, min(factors), max(factors)


def farthest(reference: Record, record: Record) -> tuple[str, float, float] | None:
    """The parameter that ends far beyond all others, its distance and the next, each in movements; None: no
    single one does."""
    moved = movement(reference)
    apart = sketch_distances(reference.final_weights, record.final_weights)
    shares = sorted(((apart[name] / moved[name], name) for name in apart if moved.get(name)), reverse=True)
    if len(shares) < 2 or shares[0][0] <= FAR * shares[1][0] or not shares[1][0]:
        return None
    return shares[0][1], shares[0][0], shares[1][0]


def where(reference: Record, names: Sequence[str]) -> str:
    """These parameters in words: a block's name stands for all that it trains."""
    layout, rest, shown = reference.layout, list(names), []
    for block in layout.blocks if layout is not None else []:
        trained = {name for name in movement(reference) if name.startswith(f"{block}.")}
        if trained and trained <= set(rest):
            rest = [name for name in rest if name not in trained]
            shown.append(f"block {block}")
    return a_few([*shown, *rest])


def kept(record: Record, name: str) -> float | None:
    """The norm of a parameter at the end over that at the beginning; None: not known, or it was zero."""
    first, last = (
        w.sketch if w is not None else None for w in (record.initial_weights, record.final_weights)
    )
    if not first or not last or name not in last or not first.get(name) or not first[name][0]:
        return None
    return last[name][0] / first[name][0]


def parameters_beyond(reference: Record, record: Record, limits: Tolerance) -> list[str]:
    """Those that end farther from the reference's than the limits allow, farthest first."""
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
