"""Why a run left its reference: hypotheses, each held against every fact of both records that it predicts.

A fact is true, false, or None where the records do not show it. A hypothesis is named only if all its signs
are true, nothing that it predicts is false and nothing that refutes it is true. Of those left the most
specific is named, then the one that most facts support. `causes.toml` is the table of them all;
`judge/findings.toml` has their sentences.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.resources import files
from itertools import accumulate
from operator import attrgetter
from statistics import median
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from harness.backends.mesh import SPLITTING, Mesh
from harness.judge.agreement.parity import APART, NormShift, Tolerance, least_loss
from harness.judge.distance import (
    StepPairs,
    distance,
    moment_factors,
    movement,
    sketch_distances,
    standing_out,
    step_pairs,
)
from harness.judge.effective import (
    ALL_BUT_THE_LAST,
    ONE_NORM,
    altered_gradients,
    clips_by_part,
    counted_synchronisation,
    decay_explains,
    decay_norm,
    halved_by_scale,
    left_by_parts,
    loss_scale,
    low_reductions,
    master_dtypes,
    optimizer_groups,
    own_norms,
)
from harness.judge.quantities import WithoutGradient, idle_on_some_ranks
from harness.judge.wording import a_few, numbered, sentence
from harness.record import OddUpdatePart, Record, WeightsPart
from harness.record.workload import known_strategy, micro_batches

Fact = bool | None
PARTS = ("signs", "predicts", "refuted_by", "values")

SCORED = re.compile(r"\b(q|k|query|key)(?:_(?:proj|norm|layernorm|lin))?\.(?:weight|bias)$")
"""Names of weights that queries or keys are computed with."""
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
UNSEEN = 0.1
"""Of the effect in the step that differs: less in an earlier step is none."""
MOST_BY_WEIGHTS = 10.0
"""Times the error of the ranks' weights: no mean over ranks changes a norm by more."""
ALIKE = 0.1 * APART
"""The same of those that are said to agree: half of all."""
FAR = 3.0
"""Times. A parameter that ends so much farther from the reference's than any other is named."""
OPPOSITE = -0.9
"""Cosine of the angle of two movements. Of the tensors of other runs that diverged one in 800 has less."""
LOW_SPACING = 2.0**-8
"""Relative, of bfloat16."""
TIMES_CUT = 3.0
"""Numbers m x 2^n of any size whose bits are cut off lose half a spacing each. A norm then loses the sum of
m / 2 over that of m^2 of a spacing: a third, where log m is spread evenly from 1 to 2."""
LEAST_SCATTERED = 4
SKETCH_ROUNDING = 2.0**-20
"""Relative to a parameter's norm: sums of fp32 weights, taken at two moments, agree far better."""
DECAY_TOLERANCE = 0.01
"""Relative to how far decay alone moves a weight; rounding of fp32 weights is far below it."""
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


def explain_divergence(pair: Pair) -> Explanation:
    """The best supported cause that no fact contradicts, else what is known."""
    return standing(pair)[0].told(pair)


def standing(pair: Pair) -> list[Hypothesis]:
    """Hypotheses that nothing contradicts, the most specific and best supported first; never empty."""
    held = [(found, found.support(pair)) for found in HYPOTHESES]
    left = [(found, support) for found, support in held if support is not None]
    return [found for found, _ in sorted(left, key=lambda one: (-one[0].specific, -one[1]))]


def weighed(pair: Pair) -> dict[str, dict[str, Any]]:
    """What speaks against each hypothesis, by name; those that stand first, then those with the fewest facts
    against them; {}: one stands, or is more specific than the others that do."""
    stand = [one for one in standing(pair) if one.specific]
    if [one.specific == stand[0].specific for one in stand].count(True) == 1:
        return {}
    held = [(one, one.against(pair)) for one in HYPOTHESES if one.specific]
    held.sort(key=lambda row: (len(row[1]), row[0].specific if row[1] else stand.index(row[0])))
    return {f"{one.kind}/{one.name}": against for one, against in held}


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A mistake, and what the records show if it was made: facts by their names in `FACTS` or `Pair`."""

    kind: str
    """Id of the finding that reports it."""
    name: str
    """Of its sentence in `findings.toml`."""
    specific: int
    signs: Sequence[str] = ()
    predicts: Sequence[str] = ()
    refuted_by: Sequence[str] = ()
    values: Sequence[str] = ()

    def support(self, pair: Pair) -> int | None:
        """How many facts support it; None: one contradicts it, or a sign is missing."""
        if any(self._wrong(pair)):
            return None
        return len(self.signs) + sum(pair.fact(name) is True for name in self.predicts)

    def _wrong(self, pair: Pair) -> Iterator[str]:
        """Signs that are missing, then facts that contradict it."""
        yield from (name for name in self.signs if not pair.fact(name))
        yield from (name for name in self.predicts if pair.fact(name) is False)
        yield from (name for name in self.refuted_by if pair.fact(name))

    def against(self, pair: Pair) -> dict[str, Any]:
        """What is wrong with it, as true, false, a number or names; None: not seen."""
        values = {name: pair.look(name) for name in self._wrong(pair)}
        return {k: v if isinstance(v, (float, list)) else pair.fact(k) for k, v in values.items()}

    def told(self, pair: Pair) -> Explanation:
        named = [(value.split(" = ")[0], value.split(" = ")[-1]) for value in self.values]
        values = {key: value for key, name in named if (value := pair.look(name)) is not None}
        about = {"pair": pair, "look": pair.look, "where": partial(where, pair.reference)}
        text = sentence(self.kind, self.name, **about | {"shift": pair.shift} | values)
        return Explanation(kind=self.kind, text=text, values=values)


_TABLE = tomllib.loads(files(__package__).joinpath("causes.toml").read_text(encoding="utf-8"))
HYPOTHESES = [
    Hypothesis(
        kind=kind, name=name, specific=(group | entry)["specific"],
        **{part: [*group.get(part, ()), *entry.get(part, ())] for part in PARTS},
    )
    for group in _TABLE.values()
    for place, entry in group["hypotheses"].items()
    for kind, _, name in [place.partition("/")]
]  # fmt: skip


@dataclass(eq=False)
class Pair:
    """A run and its reference, begun alike: what their records show, each looked at once."""

    reference: Record
    record: Record
    limits: Tolerance
    settings: Sequence[str] = ()
    """Names of those that differ and change the mathematics."""
    shift: NormShift | None = None
    """Of all norms, which no single one shows."""

    def __post_init__(self) -> None:
        if (least := least_loss(self.record)) is not None:
            self.limits = replace(self.limits, norm=min(self.limits.norm, least.norm))

    def look(self, name: str) -> Any:
        """What `FACTS` or this class has under a name."""
        return FACTS[name](self) if name in FACTS else attrgetter(name)(self)

    def fact(self, name: str) -> Fact:
        found = self.look(name)
        return None if found is None else bool(found)

    # The first step that differs.

    @cached_property
    def both(self) -> StepPairs:
        return step_pairs(self.reference, self.record)

    @cached_property
    def loss_apart(self) -> NDArray[numpy.bool_]:
        """Of each step, whether its loss is missing or lies beyond the limit."""
        return ~(self.both.loss_differences <= self.limits.loss)

    @cached_property
    def differs(self) -> NDArray[numpy.bool_]:
        """Of each step, whether its loss or its norm does."""
        return self.loss_apart | (self.both.norm_differences > self.limits.norm)

    @cached_property
    def index(self) -> int | None:
        """Index of the first step that differs."""
        return next(map(int, numpy.flatnonzero(self.differs)), None)

    @cached_property
    def at(self) -> int:
        """`index`, or that of the last step where none differs."""
        return len(self.record.steps) - 1 if self.index is None else self.index

    @property
    def number(self) -> int:
        """Number, in the training, of the step at `at`."""
        return self.record.steps[self.at].step

    @property
    def since(self) -> str:
        """Whether it lasts: 'from step 3 on', or 'in step 3' where the next step agrees or there is none; all
        steps whose norms have one factor."""
        if self.at == 0 and self.record.resumed is not None:
            return f"from step {self.number} on, the first after its checkpoint"
        after, common = self.at + 1, len(self.differs)
        lasts = after < common and self.differs[after]
        if lasts and not self.loss_apart[self.at]:
            lasts = abs(self.ratios[after] - 1) > UNSEEN * abs(self.ratio - 1)
        if self.at == 0:
            return "from the first step on" if lasts or after == common else "in the first step"
        if lasts:
            return f"from step {self.number} on"
        steps = [self.record.steps[n].step for n in self.alike]
        steps = steps if abs(self.ratio - 1) > 2 * SUDDEN else []
        return f"in {numbered('step', steps or [self.number])}"

    @property
    def alike(self) -> list[int]:
        """Indices of the steps, from this one on, whose norms have its factor."""
        has = numpy.abs(self.ratios[self.at :] / self.ratio - 1) <= SUDDEN
        return [self.at + int(n) for n in numpy.flatnonzero(has)]

    @property
    def expected_loss(self) -> float | None:
        return self.reference.steps[self.at].loss

    @property
    def given_loss(self) -> float | None:
        return self.record.steps[self.at].loss

    @cached_property
    def ratios(self) -> NDArray[numpy.float64]:
        """Gradient norms over the reference's; 1 where one of them is missing."""
        expected, given = self.both.norms
        ratios = given / numpy.where(expected == 0, numpy.nan, expected)
        return numpy.where(numpy.isnan(ratios), 1.0, ratios)

    @property
    def ratio(self) -> float:
        return float(self.ratios[self.at])

    @property
    def norms_compared(self) -> bool:
        """Of steps before the first that differs."""
        return not bool(numpy.isnan(numpy.add(*self.both.norms)[: self.index]).all())

    # Of losses.

    @cached_property
    def sums(self) -> list[float]:
        return sums_of_step(self.record, self.at, "loss_sums")

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
        """Error of weighting ranks equally: how far each rank's weight is from its due, summed."""
        targets = self.targets(index)
        total = sum(targets)
        return sum(abs(1 / len(targets) - own / total) for own in targets) if total else 0.0

    @cached_property
    def loss_scales(self) -> list[str]:
        expected, given, world = self.expected_loss, self.given_loss, self.record.world
        if not expected or given is None:
            return []
        rounding = self.limits.loss / abs(expected)
        return name_scale(given / expected, world.mesh, world.accumulation_steps, rounding=rounding)

    # Of gradients.

    @property
    def within_steps(self) -> bool:
        """Whether some rank's factor is not that of all its micro-steps."""
        at, factors = self.loss_factors or (0, {})
        ends = [self.loss_gradients[at][rank] for rank in factors]
        return any(max(of) - min(of) > SCALE_TOLERANCE * max(map(abs, of)) for of in ends)

    @property
    def divided_within(self) -> bool:
        """Whether micro-steps may have divided by their own targets: that loses no gradient, and unlike
        numbers show in the first step that has them."""
        at, factors = self.loss_factors or (0, {0: 0.0})
        uneven = self.within_steps and bool(self.unevenness(at))
        return uneven and min(factors.values()) > 0 and not any(map(self.unevenness, range(at)))

    @cached_property
    def rank_norms(self) -> list[float | None]:
        ranks = self.record.ranks
        return [rank.gradient_norms[self.at] for rank in ranks if len(rank.gradient_norms) > self.at]

    @cached_property
    def gradient_scales(self) -> list[str]:
        world, parts = self.record.world, micro_batches(self.record)
        rounding, scale = self.limits.norm, loss_scale(self.record)
        scaled = scale if isinstance(scale, float) else 1.0
        return name_scale(
            self.ratio, world.mesh, world.accumulation_steps, parts, rounding=rounding, loss_scale=scaled
        )

    @cached_property
    def loss_factors(self) -> tuple[int, dict[int, float]] | None:
        """The first step in which data ranks go back from unlike multiples of their summed losses, and those
        beside the one that most have; of two ranks beside the one that explains the norm.

        Rank of a micro-step that is unlike: its factor. None: all are alike, or not known.
        """
        job = self.record.job
        sums = job.task == "causal-lm" or job.loss.reduction == "sum"
        for at, ends in enumerate(self.loss_gradients[: self.at + 1]):
            if not sums and (self.unevenness(at) or self.record.world.accumulation_steps > 1):
                continue  # means are weighted by what they are of
            known = [one for of in ends.values() for one in of]
            if not known or max(known) - min(known) <= SCALE_TOLERANCE * max(map(abs, known)):
                continue
            up = 1 if self.ratios[at] >= 1 else -1
            base = min((one for one in known if one), key=lambda one: (-known.count(one), up * one))
            factors = {rank: max(of, key=lambda one: abs(one - base)) / base for rank, of in ends.items()}
            return at, {rank: f for rank, f in factors.items() if abs(f - 1) > SCALE_TOLERANCE}
        return None

    @cached_property
    def loss_gradients(self) -> list[dict[int, list[float]]]:
        """Ends of the loss gradients in every step, by rank that counts its loss; {}: not all are known."""

        def carried(last: list[float] | None, ends: list[float] | None) -> list[float] | None:
            return last if ends == [] else ends  # what a record leaves empty is as in the step before

        mesh = self.record.world.mesh
        counted = [r for r in self.record.ranks if mesh.counts_loss(r.rank)]
        if mesh.size("pipeline") > 1:  # its last stage alone computes a loss
            counted = [r for r in counted if any(r.loss_gradients)]
        steps = zip(*(accumulate(rank.loss_gradients, carried) for rank in counted), strict=False)
        known = [[ends for ends in of if ends] for of in steps]
        ranks = [rank.rank for rank in counted]
        return [dict(zip(ranks, of, strict=True)) if len(of) == len(ranks) else {} for of in known]

    @property
    def divided_per_rank(self) -> Fact:
        if self.loss_factors is None:
            return False
        at = self.loss_factors[0]
        ends, targets = [*self.loss_gradients[at].values()], self.targets(at)
        if len(ends) != len(targets) or len(set(targets)) == 1 or self.record.world.accumulation_steps > 1:
            return False
        whole = [of[1] * count for of, count in zip(ends, targets, strict=True)]
        return max(whole) - min(whole) <= SCALE_TOLERANCE * max(map(abs, whole))

    @property
    def remedy(self) -> str | None:
        """A backend whose library is known to leave this factor in gradients."""
        effective = self.record.backend.effective
        factor = effective.details.get("gradient_factor", 1) if effective else 1
        fits = factor != 1 and abs(self.ratio / factor - 1) <= SCALE_TOLERANCE
        return self.record.backend.name if fits else None

    @property
    def cut_to_bits(self) -> int | None:
        """Bits of a significand whose other ones, if they are cut off, leave all norms as much smaller."""
        less = 1 - float(numpy.mean(self.ratios))
        alike = less > 0 and len(self.ratios) >= LEAST_SCATTERED and numpy.ptp(self.ratios) <= less / 2
        bits = round(-math.log2(TIMES_CUT * less)) if alike else 0
        return bits + 1 if bits > 0 and abs(TIMES_CUT * less * 2**bits - 1) <= 2 * SUDDEN else None

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

    @cached_property
    def factors(self) -> dict[str, float]:
        return moment_factors(self.reference, self.record)

    @cached_property
    def rounding(self) -> float | None:
        """The farthest that a norm lies from the reference's, where norms of steps and second moments of
        tensors scatter about them on either side, as bfloat16 at most scatters; None: they do not."""
        mine, others = self.record.moment_norms, self.reference.moment_norms
        tensors = [mine[n][1] / others[n][1] - 1 for n in mine.keys() & others.keys() if others[n][1] > 0]
        norms = [float(ratio) - 1 for ratio in self.ratios]
        scatter = all(
            len(of) >= LEAST_SCATTERED
            and max(map(abs, of)) <= LOW_SPACING
            and 4 * min(sum(one > 0 for one in of), sum(one < 0 for one in of)) >= len(of)
            for of in (norms, tensors)
        )
        return max(map(abs, norms)) if scatter else None

    @cached_property
    def apart(self) -> tuple[list[str], float, float] | None:
        """Parameters whose gradients lie far from the reference's, most do not; least and largest factor."""
        away = {name: abs(factor - 1) for name, factor in self.factors.items()}
        usual = median(away.values()) if away else math.inf
        if usual <= ALIKE:
            names = standing_out(away, FAR, APART) or sorted(
                (n for n in away if away[n] > max(APART, FAR * usual)), key=lambda n: -away[n]
            )
            named = {name: self.factors[name] for name in names if 2 * len(names) <= len(away)}
        else:  # weights have parted meanwhile
            named = self._stand_out({name: [name] for name in away}) or self._stand_out(self._blocks(away))
        return (list(named), min(named.values()), max(named.values())) if named else None

    def _blocks(self, names: Iterable[str]) -> dict[str, list[str]]:
        """These parameters by their block; those of none are groups of their own."""
        layout, groups = self.reference.layout, dict[str, list[str]]()
        for name in names:
            of = (block for block in (layout.blocks if layout else []) if name.startswith(f"{block}."))
            groups.setdefault(next(of, name), []).append(name)
        return groups

    def _stand_out(self, groups: dict[str, list[str]]) -> dict[str, float]:
        """Factors of the groups that lie far beyond the others, or of the others beside them: whichever
        explains the norm; {}: none do."""
        away = {group: abs(median(self.factors[n] for n in names) - 1) for group, names in groups.items()}
        beyond = standing_out(away, FAR, APART)
        far = {name: self.factors[name] for group in beyond for name in sorted(groups[group])}
        farthest = max(self.factors, key=lambda name: abs(self.factors[name] - 1), default=None)
        sides = [far] if farthest in far and 2 * len(far) <= len(self.factors) else []
        if far and (base := median(far.values())):  # 0: these have no gradient
            others = {name: f / base for name, f in self.factors.items() if name not in far}
            spread = max(abs(f / base - 1) for f in far.values())
            gap = min(abs(f - 1) for f in others.values())
            sides += [others] if gap > max(APART, FAR * spread) else []
        return next((named for named in sides if named and self._explains(named)), {})

    def _explains(self, named: dict[str, float]) -> bool:
        """Whether these factors change squared norms as they differ on average: the last ones count most, as
        in second moments."""
        squares = {name: self.reference.moment_norms[name][1] ** 2 for name in self.factors}
        found = sum(squares[name] * (f**2 - 1) for name, f in named.items()) / sum(squares.values())
        weights = self.record.job.optimizer.beta2 ** numpy.arange(len(self.ratios))[::-1]
        given = float(numpy.average(self.ratios**2 - 1, weights=weights))
        return given * found > 0 and 1 / FAR <= found / given <= FAR

    @cached_property
    def far(self) -> tuple[list[str], float, float] | None:
        """Parameters beyond their limits that end far beyond all others, most do not; the least distance of
        these and the largest of the others, in movements."""
        names = standing_out(self.distances, FAR)
        if not names or 2 * len(names) > len(self.distances) or not set(names) <= set(self.beyond):
            return None
        others = max(far for name, far in self.distances.items() if name not in names)
        return (names, self.distances[names[-1]], others) if others else None

    @cached_property
    def not_zeroed_before(self) -> list[int]:
        """Numbers of the steps whose norms differ, as far as peaks are known: if they alone hold one more set
        of gradients than is usual."""
        for rank in self.record.ranks[:1]:
            peaks = {i: p for i, p in enumerate(rank.step_peak_bytes[: len(self.ratios)]) if p is not None}
            sets = [(m.kinds or {}).get("gradients", 0) for m in rank.memory if m.moment == "after_backward"]
            more = [i for i in peaks if 0 < max(sets, default=0) / 2 < peaks[i] - median(peaks.values())]
            if more == [i for i in peaks if abs(self.ratios[i] - 1) > SUDDEN]:
                return [self.record.steps[i].step for i in more]
        return []

    @property
    def gathers_without_gradient(self) -> bool:
        """Whether the job's own code gathers in the forward pass, and sends nothing in the backward."""
        own = [row for row in self.record.comm if row.of_job and row.group_size > 1]
        gathers = any(r.phase == "forward" and r.op == "all_gather" and "float" in r.dtype for r in own)
        return gathers and not any(row.phase == "backward" for row in own)

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

    @property
    def kept_to_the_limit(self) -> float | None:
        """The limit of clipping if no norm exceeds it, as of gradients that are clipped before they are added
        up, where each of the reference's does."""
        expected, given = self.both.norms
        within = self.limit and (given <= self.limit * (1 + ONE_NORM)).all() and (expected > self.limit).all()
        return self.limit if within and len(given) > 1 else None

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

    def moved_of(self, names: Iterable[str]) -> list[str]:
        """Parameters among these that moved here, however little, and not in the reference."""
        left, right = self.moved
        sketch = _sketch(self.record.initial_weights)
        return sorted(
            name
            for name in names
            if left.get(name) == 0 and name in right and right[name] > SKETCH_ROUNDING * sketch[name][0]
        )

    @cached_property
    def frozen(self) -> list[str]:
        return self.moved_of(self.reference.layout.frozen) if self.reference.layout is not None else []

    @cached_property
    def unreached(self) -> list[str]:
        layout = self.reference.layout
        return self.moved_of(layout.unreached or ()) if layout is not None else []

    @property
    def shrunk(self) -> float | None:
        """How far weight decay alone shrinks these, where that is all that moved them."""
        (found, *_), due = self.kept(self.unreached).values(), 1.0
        for step in self.record.steps:
            due *= 1.0 - step.learning_rate * self.record.job.optimizer.weight_decay
        if found is None or due >= 1.0 or abs(found - due) > DECAY_TOLERANCE * (1.0 - due):
            return None
        return 1.0 - due

    def kept(self, names: Iterable[str]) -> dict[str, float | None]:
        """Norms of parameters at the end over those at the beginning; None: not known, or it was zero."""
        first, last = _sketch(self.record.initial_weights), _sketch(self.record.final_weights)
        known = {name for name in first.keys() & last.keys() if first[name][0]}
        return {name: last[name][0] / first[name][0] if name in known else None for name in names}

    @cached_property
    def distances(self) -> dict[str, float]:
        """How far each parameter ends from the reference's, in movements of that one."""
        apart = sketch_distances(self.reference.final_weights, self.record.final_weights)
        return {name: far / moved for name, far in apart.items() if (moved := self.moved[0].get(name))}

    @cached_property
    def beyond(self) -> list[str]:
        """Parameters that end farther from the reference's than the limits allow, farthest first."""
        limits = self.limits.parameters
        beyond = [name for name, far in self.distances.items() if name in limits and far > limits[name]]
        return sorted(beyond, key=lambda name: -self.distances[name])

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
    def idle_there(self) -> dict[str, int]:
        """Parameters without a gradient in the reference, by name the first such step, which flat parts move
        here."""
        strategy = known_strategy(self.record)
        if strategy is None or not strategy.of_family.flat_gradients:
            return {}
        return {
            name: step
            for rank in self.reference.ranks[:1]
            for step, missing in sorted(rank.without_gradient.items(), reverse=True)
            for name in missing or ()
        }

    @cached_property
    def changed_in_passes(self) -> list[str]:
        """Weights that passes write to, where ranks pass through copies of what they update."""
        strategy, layout = known_strategy(self.record), self.record.layout
        if layout is None or strategy is None or not strategy.facts.stage or strategy.facts.cuts_layers:
            return []
        return sorted(layout.changed_in_passes or ())

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

    # What hypotheses ask.

    @property
    def is_zero(self) -> bool:
        strategy = known_strategy(self.record)
        return strategy is not None and strategy.family.startswith("zero")

    def scale_may_grow(self, index: int) -> bool:
        """Whether the loss scale may have grown just before this step: it does after so many steps of which
        none was skipped, then counts anew."""
        skipped = [step.gradient_norm is None for step in reversed(self.record.steps[:index])]
        clean = skipped.index(True) if True in skipped else index
        resumed = clean == index and self.record.resumed is not None  # how many came before is not known
        return clean > 0 and (resumed or clean % self.record.job.training.loss_scale_growth_interval == 0)

    @property
    def by_old_scale(self) -> Fact:
        """Whether norms have the factor by which the loss scale has just changed, in these steps alone."""
        if self.record.job.training.precision != "fp16-mixed" or not self.since.startswith("in "):
            return False
        grew, fell = (abs(self.ratio / factor - 1) <= SCALE_TOLERANCE for factor in (2, 0.5))
        return all(
            self.scale_may_grow(n) if grew else fell and n and self.record.steps[n - 1].gradient_norm is None
            for n in self.alike
        )

    @property
    def halved_otherwise(self) -> list[int]:
        """Numbers of the steps with half of the reference's norm whose loss scale cannot have grown."""
        halved = numpy.flatnonzero(abs(2 * self.ratios - 1) <= SCALE_TOLERANCE)
        return [self.record.steps[n].step for n in map(int, halved) if not self.scale_may_grow(n)]

    @property
    def norm_differs(self) -> Fact:
        """Although the loss of its step agrees."""
        return self.index is not None and not self.loss_apart[self.index]

    @property
    def norm_differs_at_once(self) -> Fact:
        """Whether the norm differs by more than weights can explain that agreed in the step before."""
        if not self.norm_differs or self.parted_by_update:
            return False
        return self.at == 0 or abs(self.ratio / self.ratios[self.at - 1] - 1) >= SUDDEN

    @property
    def means_undone(self) -> Fact:
        """If each rank divided by its own targets, undoing that gives the reference's loss."""
        targets, sums, expected = self.targets(self.at), self.sums, self.expected_loss
        if not len(sums) == len(targets) > 1 or len(set(targets)) == 1 or expected is None:
            return None
        total = sum(targets)
        undone = sum(part * count * len(targets) / total for part, count in zip(sums, targets, strict=True))
        return abs(undone / total - expected) <= self.limits.loss

    @property
    def begin_alike(self) -> bool:
        """Whether both are known to begin with the same weights."""
        digests = [
            run.initial_weights and run.initial_weights.digest for run in (self.reference, self.record)
        ]
        return digests[0] is not None and digests[0] == digests[1]

    @property
    def data_ranks_see_other_norms(self) -> Fact:
        """Whether norms differ among ranks that have the same place in all other dimensions."""
        ranks, norms, mesh = self.record.ranks, self.rank_norms, self.record.world.mesh
        if len(norms) < len(ranks) or mesh.data_size == 1:
            return None
        places: dict[tuple[Any, ...], set[float | None]] = {}
        for rank, norm in zip(ranks, norms, strict=True):
            place = tuple(at for name, at in mesh.coordinates(rank.rank).items() if name not in SPLITTING)
            places.setdefault(place, set()).add(norm)
        return any(len(of_place) > 1 for of_place in places.values())

    @property
    def reduced_after_norm(self) -> Fact:
        """Whether the optimizer is given less than ranks leave that clip by their own norms: a mean of it."""
        norms, applied = [n for n in self.rank_norms if n], self.record.steps[self.at].applied_gradient_norm
        if not norms or applied is None:
            return None
        left = math.hypot(*(min(norm, self.limit or math.inf) for norm in norms)) / math.sqrt(len(norms))
        return applied < left * (1 - ONE_NORM)

    @property
    def rank_norms_are_parts(self) -> Fact:
        """Whether norms of ranks' parts make up the reference's, or more where parts are held twice."""
        whole, parts = self.reference.steps[self.at].gradient_norm, list[float]()
        for norm in sorted(n for n in self.rank_norms if n is not None):  # equal ones are of the same part
            if not parts or norm > parts[-1] * (1 + 10 * TOLERANCE):
                parts.append(norm)
        if not parts or not whole:
            return None
        mesh = self.record.world.mesh
        twice = math.sqrt(mesh.size("tensor") * mesh.size("sequence"))
        return parts[-1] <= whole * (1 + SUDDEN) and math.hypot(*parts) <= whole * (1 + SUDDEN) * twice

    @property
    def ranks_end_apart(self) -> Fact:
        return are_unlike(rank.final_digest for rank in self.record.ranks)

    def shows_before(self, share: Callable[[int], float]) -> Fact:
        """False: a step before, due to differ by this share of it, agrees far better; None: none is."""
        known = self.both.norms[0] * self.both.norms[1] > 0
        before = [i for i in range(self.at) if known[i] and share(i)]
        least = UNSEEN * abs(self.ratio - 1)
        return all(abs(self.ratios[i] - 1) >= least * share(i) for i in before) if before else None

    @property
    def settings_of_updates_differ(self) -> Fact:
        """None: settings differ that change gradients alone, while updates were not all computed again."""
        if not self.settings:
            return False
        if set(self.settings) - set(OF_GRADIENTS):
            return True
        return False if self.updates_are_adams else None

    @property
    def optimizer_depends_on_parts(self) -> Fact:
        """Whether it is given flat parts of parameters, and updates a part differently from the whole."""
        record = self.record
        strategy, apart = known_strategy(record), record.update_of_part
        if strategy is None or apart is None or apart <= PARTS_ROUNDING:
            return False
        cut = strategy.family == "fsdp1" and strategy.sharding != "none" and record.world.world_size > 1
        return cut or strategy.of_family.flat_states

    @property
    def ranks_hold_parts(self) -> bool:
        """Whether ranks may update parts of the model; where nothing is known of a backend they may."""
        strategy, world = known_strategy(self.record), self.record.world
        return strategy is None or strategy.facts.stage > 0 or world.mesh.data_size < world.world_size

    @property
    def changes_show_then(self) -> Fact:
        """In the first step passes change both alike, but for a backward pass that gathers weights again."""
        strategy = known_strategy(self.record)
        again = strategy is not None and strategy.facts.reshards
        return self.index != 0 or (again and bool(self.norm_differs))

    @property
    def updates_are_adams(self) -> Fact:
        """Whether every rank computed all updates but the first again, with the same result."""
        due, ranks = len(self.record.steps) - 1, self.record.ranks
        if any(rank.odd_update is not None for rank in ranks):
            return False
        # Each is computed with the constants of its own rank.
        audited = all((rank.audited_updates or 0) >= due > 0 for rank in ranks)
        return True if audited and not any(rank.otherwise for rank in ranks) else None

    @cached_property
    def odd_updates(self) -> set[int]:
        """Numbers of steps whose updates are not Adam's."""
        parts = altered_updates(self.reference, self.record).values()
        return {step for part in parts for step in (part.step, *part.later)}

    def _was_odd(self, number: int) -> bool:
        """The very first is not computed again: one that is seen in the next may have begun there."""
        first = number == self.record.steps[0].step and number + 1 in self.odd_updates
        return first or number in self.odd_updates

    @property
    def altered_before(self) -> Fact:
        """Whether an update that is not Adam's came before the first step that differs."""
        if self.index is None or not self.odd_updates:
            return None
        return any(self._was_odd(step.step) for step in self.record.steps[: self.index])

    @property
    def parted_by_update(self) -> bool:
        """Whether the update just before is known to be another, and the one before it is not."""
        changed, before = self.altered[0] if self.altered else None, self.number - 1
        return (self._was_odd(before) or changed == before) and before - 1 not in self.odd_updates


FACTS: dict[str, Callable[[Pair], Any]] = {
    # Which step differs first.
    "in_the_first_step": lambda pair: pair.index == 0,
    "moments_alone_differ": lambda pair: (
        pair.index is None
        and any(abs(factor - 1) > APART for factor in pair.factors.values())
        and not pair.limits.exceeded(distance(pair.reference, pair.record))
    ),
    # No update came before it, not even in the run that this one continues.
    "first_of_all": lambda pair: pair.index == 0 and pair.record.resumed is None,
    # In which a cause begins; None: it is the first of all.
    "step": lambda pair: (pair.number or None) if pair.index is not None else None,
    # Losses.
    "loss_lost": lambda pair: pair.index is not None and None in (pair.expected_loss, pair.given_loss),
    "loss_differs": lambda pair: (
        pair.index is not None and not pair.norm_differs and not pair.fact("loss_lost")
    ),
    "first_loss_differs": lambda pair: pair.index == 0 and not pair.norm_differs,
    "computed_loss_agrees": lambda pair: (
        None
        if None in (pair.computed_loss, pair.expected_loss)
        else abs((pair.computed_loss or 0.0) - (pair.expected_loss or 0.0)) <= pair.limits.loss
    ),
    "loss_of_rank_0": lambda pair: of_one_rank(pair.record, pair.at),
    "target_tokens": lambda pair: pair.targets(pair.at),
    "loss_ratio": lambda pair: float(pair.both.losses[1][pair.at] / pair.both.losses[0][pair.at]),
    "attention": lambda pair: pair.record.observed and pair.record.observed.attention,
    "attention_undivided": lambda pair: (
        pair.record.world.mesh.size("sequence") > 1 and pair.look("attention") in UNDIVIDED
    ),
    "read_outside": lambda pair: read_outside(pair.record),
    "weights_in_use_stale": lambda pair: (
        bool(pair.record.initial_weights.stale_elements)
        if pair.record.initial_weights and not pair.record.observation
        else None
    ),
    # Gradients.
    "norm_falls": lambda pair: pair.ratio < 1.0,
    "norm_of_the_step_before": lambda pair: (
        pair.at > 0
        and abs(numpy.diff(pair.both.norms[1])[pair.at - 1]) < TOLERANCE * pair.both.norms[1][pair.at]
    ),
    "every_uneven_step_differs": lambda pair: pair.shows_before(
        lambda index: pair.unevenness(index) / (pair.unevenness(pair.at) or math.inf)
    ),
    # The same ranks lacked this gradient before.
    "every_idle_step_differs": lambda pair: pair.shows_before(
        lambda index: pair.idle is not None and pair.record.steps[index].step >= pair.idle.step
    ),
    # Noise of relative size e adds e ** 2 / 2 to a norm.
    "far_ones_have_no_factor": lambda pair: all(
        abs(pair.factors.get(name, 0.0) - 1) <= pair.distances[name] ** 2
        for name in (pair.far[0] if pair.far else ())
    ),
    # Products of both alone are read by attention scores, which positions, mask and scale change.
    "of_scores_alone": lambda pair: (
        {"".join(SCORED.findall(name))[:1] for name in (pair.far or [()])[0]} == {"q", "k"}
    ),
    # Clipping leaves the same gradients, whatever multiplied them before.
    "weights_deny_scale": lambda pair: (
        pair.limit is not None
        and all(bool((norms > pair.limit).all()) for norms in pair.both.norms)
        and pair.fact("final_weights_agree") is False
    ),
    "passes_draw_alone": lambda pair: (
        [run.observed and run.observed.draws for run in (pair.record, pair.reference)] == [True, False]
    ),
    "wire_rounds_as_much": lambda pair: low_reductions(pair.record, pair.ratio),
    "reduces_all_but_the_last": lambda pair: counted_synchronisation(pair.record) == ALL_BUT_THE_LAST,
    "rank_norms_differ": lambda pair: bool(own_norms(pair.record, pair.at)),
    # Whether the mesh has ranks with samples of their own.
    "gradients_reduced_over_ranks": lambda pair: pair.record.world.mesh.data_size > 1,
    "ranks_hold_uneven_targets": lambda pair: len(set(pair.targets(pair.at))) > 1,
    # None where how many a micro-step has is not recorded.
    "size_fits_uneven_targets": lambda pair: (
        abs(pair.ratio - 1) <= MOST_BY_WEIGHTS * pair.unevenness(pair.at)
        if pair.record.world.accumulation_steps == 1
        else None
    ),
    "tensors_have_factors": lambda pair: pair.apart is not None if pair.factors else None,
    "oddest": lambda pair: [
        one
        for one in sorted(pair.factors.items(), key=lambda of: -abs(of[1] - 1))[:3]
        if abs(one[1] - 1) > max(APART, FAR * median(abs(factor - 1) for factor in pair.factors.values()))
    ],
    # A norm that is computed otherwise leaves second moments.
    "factors_are_alike": lambda pair: (
        all(abs(factor - 1) <= SUDDEN for factor in pair.factors.values()) if pair.factors else None
    ),
    "some_ranks_idle": lambda pair: pair.idle is not None and pair.ratio < 1,
    # Weights.
    # Law of cosines, in movements of the reference.
    "turned": lambda pair: [
        name
        for name, far in pair.distances.items()
        for times in [pair.moved[1].get(name, 0.0) / pair.moved[0][name]]
        if 1 + times**2 - far**2 < 2 * times * OPPOSITE
    ],
    "ranks_begin_apart": lambda pair: are_unlike(part.initial_digest for part in pair.record.ranks),
    "unlike_copies": lambda pair: unlike_copies(pair.record),
    "gradients_are_unlike": lambda pair: pair.updates_are_adams and pair.fact("ranks_begin_apart") is False,
    "changed_ones_end_apart": lambda pair: (
        bool(
            set(pair.changed_in_passes)
            & set(pair.beyond or [max(pair.distances, key=lambda name: pair.distances[name])])
        )
        if pair.distances
        else None
    ),
    "final_weights_agree": lambda pair: (
        not pair.beyond if pair.limits.parameters.keys() & pair.moved[1] else None
    ),
    "nothing_moved": lambda pair: bool(pair.still) and not any(pair.moved[1].values()),
    "still_ones_are_in_the_optimizer": lambda pair: (
        (held := optimizer_groups(pair.record)) and set(pair.still) <= held.keys()
    ),
    # The norm may miss the gradient of one parameter, hardly those of several.
    "first_norm_denies_a_missing_gradient": lambda pair: (
        len(pair.still) > 1 and pair.index != 0 and pair.record.steps[0].gradient_norm is not None
    ),
    "kept_unreached": lambda pair: pair.kept(pair.unreached),
    # Parameters that end elsewhere, and have no gradient in some step of the reference.
    "skipped": lambda pair: [name for name in pair.beyond if name in pair.idle_there],
    "skipped_in_step": lambda pair: pair.idle_there[pair.look("skipped")[0]],
    "kept_skipped": lambda pair: pair.kept(pair.look("skipped")),
    # Updates.
    "clipped_by_part": lambda pair: bool(pair.altered) and clips_by_part(pair.record, pair.limit),
    # Each part is clipped less than all of them together.
    "clipped_in_parts": lambda pair: (
        left_by_parts(pair.record, pair.limit)
        and pair.ranks_hold_parts
        and all(
            norms[1] >= (1 + ALIKE) * pair.reference.moment_norms.get(name, (0.0, 0.0))[1]
            for name, norms in pair.record.moment_norms.items()
        )
    ),
    "otherwise": lambda pair: sorted({name for part in pair.record.ranks for name in part.otherwise}),
    "altered_in_time": lambda pair: (
        pair.index is None or not pair.altered or pair.altered[0] < pair.number  # to show
    ),
    "scale_doubled": lambda pair: pair.is_zero and halved_by_scale(pair.record, pair.limit),
    # Of the norm itself, in a step that others do not follow; stage 3 takes it from divided gradients.
    "norm_halved": lambda pair: (
        pair.is_zero
        and pair.record.job.training.precision == "fp16-mixed"
        and pair.scale_may_grow(pair.at)
        and abs(2 * pair.ratio - 1) <= SCALE_TOLERANCE
        and pair.since.startswith("in ")
    ),
    # Norm of weight decay x weights where adding that explains gradients that were altered.
    "added_decay": lambda pair: decay_explains(pair.record, pair.limit) and decay_norm(pair.record),
    "optimizer": lambda pair: (of := pair.record.backend.effective) and of.optimizer.rpartition(".")[2],
    "clipped_norm": lambda pair: max(step.applied_gradient_norm or 0.0 for step in pair.record.steps),
    "shifted_ratio": lambda pair: 1 + pair.shift.mean if pair.shift else None,
}
"""What hypotheses ask in a line each; what takes more is a property of `Pair`."""


def unlimited(reference: Record, record: Record) -> Pair:
    """The two, whatever they differ by."""
    return Pair(reference, record, Tolerance(loss=math.inf, norm=math.inf, update=math.inf, weights=math.inf))


def shown_alone(reference: Record, record: Record, *, wide: bool) -> Explanation | None:
    """Parameters that this run alone moves, however little; factors of ranks where the limits of norms are as
    wide as those of low precision. Narrow ones see a factor, unless the backend takes it back."""
    pair = unlimited(reference, record)
    named = ("moved", "unreached", *(("divided-per-rank", "loss-factors") if wide else ()))
    found = (one for one in HYPOTHESES if one.name in named and one.support(pair) is not None)
    return next((one.told(pair) for one in found), None)


def shifted(shift: NormShift | None) -> str | None:
    """A factor on gradients that no single step shows, in words."""
    return None if shift is None else sentence("gradient-differs", "shifted", shift=shift)


def name_scale(
    ratio: float,
    mesh: Mesh,
    accumulation_steps: int,
    parts: int = 1,
    *,
    rounding: float = SCALE_TOLERANCE,
    loss_scale: float = 1.0,
) -> list[str]:
    """The mistakes that explain a ratio of gradients; several if their factors coincide.

    parts: the micro-batches into which a pipeline cuts the batch of a micro-step. rounding: how far it moves
    the ratio, relative. A rank that adds no gradient may halve a norm, but not as exactly as a factor does.
    """
    ranks, steps = mesh.data_size, accumulation_steps
    both, pipeline = (
        ranks * steps if min(ranks, steps) > 1 else 1,
        f"the {parts} micro-batches of the pipeline",
    )
    factors = {
        f"summed over {ranks} ranks instead of averaged": ranks,
        f"divided by the {ranks} ranks again": 1 / ranks,
        f"not divided by the {steps} accumulation steps": steps,
        f"divided by the {steps} accumulation steps again": 1 / steps,
        f"summed over {ranks} ranks and {steps} accumulation steps": both,
        f"divided by {ranks} ranks and {steps} accumulation steps again": 1 / both,
        f"divided by {pipeline} (scale_grads)": 1 / parts,
        f"not divided by {pipeline}": parts,
        f"not divided by the loss scale of {loss_scale:g}": loss_scale,
        f"divided by the loss scale of {loss_scale:g} again": 1 / loss_scale,
    }
    for name, size in mesh.sizes:
        if name not in SPLITTING:
            factors[f"added up {size} times over the {size} ranks along '{name}'"] = size
            factors[f"divided by the {size} ranks along '{name}', which share samples"] = 1 / size
    most = min(rounding, SCALE_TOLERANCE)
    return [name for name, factor in factors.items() if factor != 1 and abs(ratio / factor - 1) <= most]


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
    return sorted(record.layout.read_outside or ()) if cut and record.layout is not None else []


def altered_updates(reference: Record, record: Record) -> dict[int, OddUpdatePart]:
    """First update of each rank that is not what Adam makes of its gradient.

    None where the reference has some too, as of weights that passes change, and where updates were made
    outside of their step, whose samples are of other moments.
    """
    made = record.observed.updates_by_phase if record.observed is not None else {}
    elsewhere = any(count for phase, count in made.items() if phase != "step")
    if elsewhere or any(part.odd_update for part in reference.ranks):
        return {}
    return {part.rank: part.odd_update for part in record.ranks if part.odd_update is not None}


def are_unlike(digests: Iterable[str | None]) -> Fact:
    """Whether ranks hold other weights than each other; None: not all are known, or there is one."""
    known = list(digests)
    return None if None in known or len(known) < 2 else len(set(known)) > 1


def unlike_copies(record: Record) -> list[str]:
    """Parameters whose copies on ranks lie far farther apart than those of others; []: none do."""
    apart = record.final_weights.apart if record.final_weights else {}
    shares = {name: apart.get(name, 0.0) / moved for name, moved in movement(record).items() if moved}
    found = standing_out(shares, FAR)
    return found if 2 * len(found) <= len(shares) else []


def where(reference: Record, names: Sequence[str]) -> str:
    """These parameters in words: a block's name stands for all that it trains."""
    layout, rest, shown = reference.layout, list(names), []
    for block in layout.blocks if layout is not None else []:
        trained = {name for name in movement(reference) if name.startswith(f"{block}.")}
        if trained and trained <= set(rest):
            rest = [name for name in rest if name not in trained]
            shown.append(f"block {block}")
    return a_few([*shown, *rest])


def _sketch(weights: WeightsPart | None) -> dict[str, list[float]]:
    return (weights.sketch if weights else None) or {}
