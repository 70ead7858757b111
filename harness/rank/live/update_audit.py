"""Whether updates are what Adam makes of gradients: samples of weights and moments, held from step to step.

First moments of before and after an update hold its gradient. With the constants in force that gives the
second ones, and all of them the weights: Kingma and Ba, 'Adam', 2015; Loshchilov and Hutter, 'Decoupled
weight decay regularization', 2019. Nothing here works while a step is timed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy
import numpy.typing
import torch
from torch import Tensor

from harness.backends.optimizer.gradients import local_shard
from harness.backends.optimizer.groups import uses_rate
from harness.backends.piece import MOMENTS, Piece
from harness.record.measured import OddUpdate, OddUpdatePart

Values: TypeAlias = numpy.typing.NDArray[numpy.float64]
Odd: TypeAlias = numpy.typing.NDArray[numpy.bool_]
MOST_TENSORS, MOST_ELEMENTS = 64, 1024
"""Of a rank, those evenly spaced are looked at."""
MOST_SUMMED = 2**27
"""Elements of a rank's states that are added up after each step."""
MOST_NAMES = 20
UNIT = 2.0**-23
"""Relative spacing of fp32."""
MARGIN = 4.0
"""Times what the roundings of one update can add up to: libraries order its products differently."""
Told: TypeAlias = tuple[OddUpdate, float | None, float | None, Odd]
"""What an update did, the figure that it shows and the one due, where."""
LEAST_ODD, FEW = 3, 0.02
"""Elements that must be odd before a tensor is; of them, as many as may be left beside a cause."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """In force in one update."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    """Of the weights themselves; 0 where it is part of the gradient."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Elements of one tensor that an optimizer updates, at the end of a step."""

    weight: Values
    first: Values
    second: Values
    updates: int
    constants: Constants
    places: range
    """Of the elements, in the flattened tensor."""


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A tensor that an optimizer updates, with its states and the group that it lies in."""

    tensor: Tensor
    state: Mapping[str, Any]
    group: Mapping[str, Any]
    share: float | None = 1.0
    """Of its elements that this rank counts, where others hold them too; None: not known."""


class UpdateAudit:
    """Of the optimizer of one rank; `look` stands behind each step."""

    def __init__(self, *, decoupled: bool = True) -> None:
        self.decoupled = decoupled
        """Whether weight decay leaves the gradient alone, as in AdamW."""
        self._before: dict[int, Sample] = {}
        self._taken: dict[int, tuple[int, int | None]] = {}
        self._sums: dict[int, _Sum] = {}
        self.updates = 0
        """How many were looked at."""
        self.odd: OddUpdatePart | None = None
        """The first that is something else."""

    def look(
        self,
        held: Iterable[HeldTensor],
        step: int | None,
        pieces: Callable[[], Iterable[Piece]],
        asked: float | None = None,
    ) -> None:
        """Compare what these hold with the step before.

        step: None: before the first. pieces: of the weights of this rank, to name them. asked: the learning
        rate that the loop asked this update to use; None: not known.
        """
        tensors = list(held)
        now: dict[int, Sample] = {}
        odd: list[tuple[HeldTensor, Sample, Told]] = []
        for one in tensors[:: 1 + len(tensors) // MOST_TENSORS]:
            if (sample := _sample(one, decoupled=self.decoupled)) is not None:
                key = id(one.tensor)
                taken, then = self._taken.get(key, (0, step))
                since = 1 if step is None or then is None else step - then
                used = asked is not None and uses_rate(one.group, asked)
                before = self._before.get(key)
                told = unlike(before, sample, taken, since, in_force=used)
                now[key], self._taken[key] = sample, (sample.updates, step)
                odd += [] if told is None else [(one, sample, told)]
        if odd and step is not None:
            counts = Counter[OddUpdate]()
            for *_, told in odd:
                counts[told[0]] += int(told[3].sum())
            kind, _ = counts.most_common(1)[0]
            _, given, due, _ = next(told for *_, told in odd if told[0] == kind)
        if odd and step is not None and self.odd is not None:
            later = {"later": [*self.odd.later, step][:MOST_NAMES]}
            tells = self.odd.kind == "betas" and kind in ("beta1", "beta2")
            told_later = {"kind": kind, "given": given, "due": due} if tells else {}
            self.odd = self.odd.model_copy(update=later | told_later)
        elif odd and step is not None:
            everywhere = len(odd) == len(now) and all(told[3].all() for *_, told in odd)
            names = [] if everywhere else list(_names(odd, pieces()))[:MOST_NAMES]
            self.odd = OddUpdatePart(step=step, kind=kind, given=given, due=due, parameters=names)
        self.updates += bool(self._before.keys() & now.keys())
        self._before = now

    def squares(self, held: Iterable[HeldTensor]) -> float | None:
        """Sum of the squared gradients of the update just made; None: not known.

        Each update moves the sum of second moments towards it by 1 - beta2 of the way.
        """
        tensors = list(held)
        count = sum(local_shard(one.tensor.detach()).numel() for one in tensors)
        if not self.decoupled or not tensors or count > MOST_SUMMED:
            return None
        before, self._sums = self._sums, {}
        states = [one.state.get(MOMENTS[1]) for one in tensors]
        second = [local_shard(s.detach()) for s in states if isinstance(s, Tensor)]
        if len(second) < len(tensors) or not all(map(_plain, second)):
            return None
        totals = torch.stack([s.sum(dtype=torch.float64).cpu() for s in second]).tolist()
        parts = [self._added(*pair, before) for pair in zip(tensors, totals, strict=True)]
        known = [part for part in parts if part is not None]
        total = math.fsum(known)
        return total if len(known) == len(parts) and 0 <= total < math.inf else None

    def _added(self, one: HeldTensor, total: float, before: Mapping[int, _Sum]) -> float | None:
        """The part of that sum that comes from one tensor."""
        updates, betas = one.state.get("step"), one.group.get("betas")
        if one.share is None or updates is None or betas is None or one.group.get("amsgrad"):
            return None
        now = self._sums[id(one.tensor)] = _Sum(total=total, updates=int(updates), beta2=float(betas[1]))
        old = before.get(id(one.tensor), _Sum(total=0.0, updates=0, beta2=now.beta2))
        if now.updates == old.updates:
            return 0.0
        if now.updates != old.updates + 1 or now.beta2 != old.beta2:
            return None
        return one.share * (now.total - now.beta2 * old.total) / (1.0 - now.beta2)


class _Sum(NamedTuple):
    """Of the second moments of one tensor."""

    total: float
    updates: int
    beta2: float


def _sample(held: HeldTensor, *, decoupled: bool) -> Sample | None:
    """None: its states are not Adam's, not in fp32, or not here."""
    states = [held.state.get(name) for name in MOMENTS]
    group, updates = held.group, held.state.get("step")
    tensors = [local_shard(t.detach()) for t in (held.tensor, *states) if isinstance(t, Tensor)]
    if len(tensors) < 3 or updates is None or group.get("amsgrad") or "betas" not in group:
        return None
    count = tensors[0].numel()
    if not count or any(t.numel() != count or not _plain(t) for t in tensors):
        return None
    stride = max(1, count // MOST_ELEMENTS)
    stride += stride > 1 and stride % 2 == 0  # rows are even
    values = [t.view(-1)[::stride].double().cpu().numpy().copy() for t in tensors]
    return Sample(
        weight=values[0], first=values[1], second=values[2], updates=int(updates),
        places=range(0, count, stride),
        constants=Constants(
            rate=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
            eps=float(group["eps"]), decay=float(group.get("weight_decay", 0.0)) if decoupled else 0.0,
        ),
    )  # fmt: skip


def _plain(tensor: Tensor) -> bool:
    """Whether its values can be read as they are."""
    usual = type(tensor) in (Tensor, torch.nn.Parameter)
    return usual and tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.is_meta


def _names(odd: Iterable[tuple[HeldTensor, Sample, Told]], pieces: Iterable[Piece]) -> Iterator[str]:
    """Names of the parameters that the odd elements of what an optimizer holds belong to."""
    addresses = [
        local_shard(one.tensor.detach()).data_ptr() + 4 * sample.places[int(place)]
        for one, sample, told in odd
        for place in numpy.flatnonzero(told[3])
    ]
    places = numpy.sort(numpy.array(addresses))
    for piece in pieces:
        first = piece.weight.data_ptr()
        begin, end = numpy.searchsorted(places, [first, first + 4 * piece.weight.numel()])
        if begin < end:
            yield piece.name


def unlike(
    before: Sample | None, after: Sample, taken: int = 0, steps: int = 1, *, in_force: bool = False
) -> Told | None:
    """None: the update is sound. taken: updates that were counted when states were last seen, so many steps
    before. in_force: whether the rate after the update is the one that it was to use."""
    if after.updates < taken or (before is None and 0 < after.updates == taken):
        everywhere = numpy.ones_like(after.first, dtype=bool)
        return "begun-anew", float(after.updates), float(taken + steps), everywhere
    if before is None:
        zeros = numpy.zeros_like(after.first)
        sound = None if after.updates != 1 else odd_moments(zeros, zeros, after)
        return None if sound is None else _why_moments(zeros, zeros, after, sound)
    if after.updates != before.updates + 1:
        return None
    # A constant may change between the update and the end of its step.
    earlier = replace(before.constants, rate=after.constants.rate)
    for constants in (after.constants, earlier, *([] if in_force else [before.constants])):
        of_moments = odd_moments(before.first, before.second, replace(after, constants=constants))
        if of_moments is None and odd_weights(before, after, constants) is None:
            return None
    of_moments = odd_moments(before.first, before.second, after)
    if of_moments is not None:
        return _why_moments(before.first, before.second, after, of_moments)
    of_weights = odd_weights(before, after, after.constants)
    return None if of_weights is None else _why_weights(before, after, of_weights)


def _gradient(first: Values, after: Sample) -> tuple[Values, Values]:
    """What moved the first moments, and how far roundings may have moved it."""
    rest = 1.0 - after.constants.beta1
    gradient = (after.first - after.constants.beta1 * first) / rest
    return gradient, 6 * UNIT * (abs(first) + abs(after.first)) / rest


def _second_moments(gradient: Values, error: Values, second: Values, beta2: float) -> tuple[Values, Values]:
    """As they should be, and how far they may lie from that."""
    added = (1.0 - beta2) * gradient**2
    due = beta2 * second + added
    bound = (1.0 - beta2) * (2 * abs(gradient) * error + error**2) + 6 * UNIT * due
    return due, MARGIN * bound + 1e-37


def odd_moments(first: Values, second: Values, after: Sample) -> Odd | None:
    """Elements whose moments do not fit each other; None: hardly any. first, second: of before."""
    due, allowed = _second_moments(*_gradient(first, after), second, after.constants.beta2)
    return _mostly(abs(after.second - due) > allowed)


def _mostly(odd: Odd) -> Odd | None:
    return odd if odd.sum() >= min(LEAST_ODD, odd.size) else None


def _fits(odd: Odd, distance: Values, allowed: Values) -> bool:
    """Whether hardly any of the odd elements is left."""
    return bool((distance > allowed)[odd].sum() <= FEW * odd.sum())


def _why_moments(first: Values, second: Values, after: Sample, odd: Odd) -> Told:
    if (low := _low_precision(after.first[odd]) or _low_precision(after.second[odd])) is not None:
        return "moments-rounded", low, None, odd
    zeros, constants = numpy.zeros_like(first), after.constants

    def fits(first: Values, second: Values, times: float = 1.0, **altered: float) -> bool:
        sample = replace(after, constants=replace(constants, **altered))
        due, allowed = _second_moments(*_gradient(first, sample), second, sample.constants.beta2)
        return _fits(odd, abs(after.second - due), times * allowed)

    if first.any() and fits(zeros, zeros):
        return "moments-lost", None, None, odd
    if not after.first[odd].any() or (first.any() and fits(zeros, second)):
        return "first-moments-lost", None, None, odd
    gradient, beta2 = _gradient(first, after)[0], constants.beta2
    with numpy.errstate(all="ignore"):
        size = numpy.sqrt((after.second - beta2 * second) / (1.0 - beta2))  # the gradient's, whatever beta1
        either = [((after.first - g) / (first - g))[odd] for g in (size, -size)]
        other = _median((after.second - gradient**2) / (second - gradient**2), odd)
    shown: dict[OddUpdate, float | None] = {"beta1": _commonest(numpy.concatenate(either)), "beta2": other}
    known = {name: one for name, one in shown.items() if one is not None and 0 <= one <= 1}
    fitting = [name for name, one in known.items() if fits(first, second, 2.0, **{name: one})]
    if len(fitting) == 1:
        return fitting[0], known[fitting[0]], getattr(constants, fitting[0]), odd
    return "betas" if fitting else "moments", None, None, odd


def _commonest(values: Values) -> float | None:
    """Of those from 0 to below 1, the middle of the narrowest range that holds a quarter."""
    known = numpy.sort(values[(values >= 0) & (values < 1)])
    count = known.size // 4
    begin = int(numpy.argmin(known[count:] - known[:-count])) if count else 0
    return float(numpy.median(known[begin : begin + count + 1])) if count else None


def _median(values: Values, odd: Odd) -> float | None:
    known = values[odd & numpy.isfinite(values)]
    return float(numpy.median(known)) if known.size else None


LOW_BITS = (8, 11)
"""Significant bits of bfloat16 and float16, the hidden one included."""


def _low_precision(values: Values) -> int | None:
    """Bits of the low precision that holds all values; None: none does."""
    mantissas, _ = numpy.frexp(values[values != 0])
    for bits in LOW_BITS:
        scaled = mantissas * 2.0**bits
        if scaled.size >= LEAST_ODD and bool((scaled == numpy.round(scaled)).all()):
            return bits
    return None


Move = Callable[[Sample, Constants], Values]


def _move(*, first: bool = True, second: bool = True, eps_in_root: bool = False) -> Move:
    """How far an update moves weights beside their decay, over the learning rate.

    first, second: whether these moments lose the bias of their beginning at zero.
    """

    def move(after: Sample, constants: Constants) -> Values:
        without_bias = corrected(after, constants)
        top = without_bias[0] if first else after.first
        squares = without_bias[1] if second else after.second
        if eps_in_root:
            return -top / numpy.sqrt(squares + constants.eps)
        return -top / (numpy.sqrt(squares) + constants.eps)

    return move


def corrected(after: Sample, constants: Constants) -> tuple[Values, Values]:
    """Moments without the bias of their beginning at zero."""
    first = after.first / (1.0 - constants.beta1**after.updates)
    return first, after.second / (1.0 - constants.beta2**after.updates)


adam = _move()
OTHERWISE: dict[OddUpdate, Move] = {
    "eps-in-root": _move(eps_in_root=True),
    "bias-uncorrected": _move(first=False, second=False),
    "first-uncorrected": _move(first=False),
    "second-uncorrected": _move(second=False),
}
"""Ways in which an update may be computed instead."""


def _distance(before: Sample, after: Sample, constants: Constants, move: Move) -> tuple[Values, Values]:
    """Distance of the weights from what they should be, and how far they may lie from that."""
    step = constants.rate * move(after, constants)
    due = before.weight * (1.0 - constants.rate * constants.decay) + step
    bound = UNIT * (abs(before.weight) + abs(after.weight)) + 16 * UNIT * abs(step)
    return abs(after.weight - due), MARGIN * bound


def odd_weights(before: Sample, after: Sample, constants: Constants) -> Odd | None:
    """Elements that these constants do not explain; None: hardly any."""
    distance, allowed = _distance(before, after, constants, adam)
    return _mostly(distance > allowed)


def _why_weights(before: Sample, after: Sample, odd: Odd) -> Told:
    constants = after.constants
    if bool((after.weight == before.weight)[odd].all()):
        return "stood-still", None, None, odd

    def nesterov(after: Sample, constants: Constants) -> Values:
        ahead = (1.0 + constants.beta1) * after.first - constants.beta1 * before.first
        return adam(replace(after, first=ahead), constants)

    for kind, move in (OTHERWISE | {"nesterov": nesterov}).items():
        if _fits(odd, *_distance(before, after, constants, move)):
            return kind, None, None, odd
    low = _low_precision(after.weight[odd])
    if low is not None:
        return "weights-rounded", low, None, odd
    for kind, given, due, altered in _of_figures(before, after, odd):
        if given is not None and math.isfinite(given):
            distance, allowed = _distance(before, after, replace(constants, **altered(given)), adam)
            if kind == "decay":  # before the update or after it
                sound = before.weight * constants.decay - adam(after, constants)
                allowed = allowed + abs(given * constants.rate**2 * sound)
            if _fits(odd, distance, 2 * allowed):
                return kind, given, due, odd
    return "weights", None, None, odd


Fitted: TypeAlias = tuple[OddUpdate, float | None, float, Callable[[float], dict[str, float]]]


def _of_figures(before: Sample, after: Sample, odd: Odd) -> Iterator[Fitted]:
    """What the moved weights show of constants: kind, figure, the one due, and constants by the figure."""
    constants = after.constants
    move = constants.rate * adam(after, constants)
    decayed = before.weight * (1.0 - constants.rate * constants.decay)
    first, second = corrected(after, constants)
    large = odd & (abs(before.weight) >= numpy.median(abs(before.weight[odd])))
    far = odd & (abs(move) >= numpy.median(abs(move[odd])))
    with numpy.errstate(all="ignore"):
        decay = _median((before.weight + move - after.weight) / (constants.rate * before.weight), large)
        factor = _median((after.weight - decayed) / move, far)
        whole = _median((after.weight - before.weight) / (move + decayed - before.weight), far)
        eps = _median(constants.rate * first / (decayed - after.weight) - numpy.sqrt(second), far)
    rate, due = constants.rate, constants.decay
    yield "decay", decay, due, lambda given: {"decay": given}
    yield "factor", factor, 1.0, lambda given: {"rate": rate * given, "decay": due / given if given else 0.0}
    yield "factor", whole, 1.0, lambda given: {"rate": rate * given}
    yield "eps", eps, constants.eps, lambda given: {"eps": given}
