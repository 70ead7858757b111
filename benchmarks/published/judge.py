"""Predictions next to published figures, and how far they are apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import mean, median
from typing import Any, Literal

from benchmarks.published.mapping import Mapped, recomputing_all
from benchmarks.published.reserved import reserved_bytes, reserving
from benchmarks.published.rows import UNSAID, Row
from harness.errors import HarnessError
from harness.plan.hardware import MemoryVerdict, default_constants
from harness.plan.prediction import MemoryPrediction, predict_memory
from harness.plan.profiles import Trace
from harness.plan.scenario import Scenario
from harness.plan.step_time import predict_speed
from harness.plan.trust import chip_of, crosses_pcie, kind_of, trust_in

FULLY_SPECIFIED = "A"
"""Tier: memory and throughput measured, all that decides them is said."""
Quantity = Literal["speed", "memory"]
CLEARLY = 0.05
"""Runs whose figures differ by less are tied."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A row with its predictions; None: not covered, or not published."""

    mapped: Mapped
    memory_bytes: float | None = None
    """The allocator's peak; for a published device figure with context and NCCL's buffers."""
    device_bytes: float | None = None
    fits: bool | None = None
    tokens_per_second: float | None = None
    least_tokens_per_second: float | None = None
    """Where it may hide nothing of its communication: of replicas that reach it the answer prefers one."""
    fitted_tokens_per_second: float | None = None
    """By the shipped constants, which the row's source has a part in."""
    has_no_rate: bool = False
    """Whether the answer is a range of speeds: too few sources ran on the GPU, or what is recomputed is not
    said."""
    unread: Judged | None = None
    """As if nobody had read the program's code; None: nobody has."""
    memory_reason: str | None = None
    """Why there is no memory, or a range."""
    speed_reason: str | None = None
    least_bytes: float | None = None
    """Where something that decides it is not said (`Mapped.least`); `memory_bytes` is the most."""

    @property
    def row(self) -> Row:
        return self.mapped.row

    @property
    def memory_error(self) -> float | None:
        published = self.row.memory_bytes
        if published is None or self.memory_bytes is None or self.least_bytes is not None:
            return None
        return self.memory_bytes / published - 1

    @property
    def speed_error(self) -> float | None:
        return None if self.has_no_rate else self.error_of_figure

    @property
    def error_of_figure(self) -> float | None:
        """Of the speed, whether or not the answer gives a range in its place."""
        return self._off(self.tokens_per_second)

    @property
    def fitted_speed_error(self) -> float | None:
        """By the shipped constants."""
        return None if self.has_no_rate else self._off(self.fitted_tokens_per_second)

    def _off(self, tokens_per_second: float | None) -> float | None:
        published = self.row.tokens_per_second
        if published is None or tokens_per_second is None:
            return None
        return tokens_per_second / published - 1

    @property
    def left_out(self) -> Judged:
        """Without what was read with this row at hand."""
        return self.unread or self

    @property
    def is_adapted(self) -> bool:
        """Whether adapters alone were trained."""
        return "lora" in self.row.method.lower()


def judge(mapped: Mapped, sustained: float | None = None, trace: Trace | None = None) -> Judged:
    """Predict memory and speed of a row as far as the model covers it.

    `sustained`: what other sources' training sustained, in place of what ships. `trace`: as of
    `predict_memory`.
    """
    row, scenario = mapped.row, mapped.scenario
    if scenario is None:
        return Judged(mapped=mapped, memory_reason=mapped.not_covered, speed_reason=mapped.not_covered)
    found = Judged(mapped=mapped, speed_reason=mapped.speed_not_covered)
    if found.speed_reason is None:
        try:
            speed = shipped = predict_speed(scenario, mapped.constants)
            if sustained is not None and scenario.device is not None:
                constants = mapped.constants or default_constants(scenario.device)
                speed = predict_speed(scenario, replace(constants, sustained_share=sustained))
            assert speed is not None
            assert shipped is not None
            least, most = speed.tokens_per_second_between or (None, None)
            is_range = least is not None and not speed.loses_with_scale
            because = speed.between_because
            if mapped.bounded:
                slower = predict_speed(recomputing_all(scenario), mapped.constants)
                assert slower is not None
                slow, fast = (one.tokens_per_second_per_gpu for one in (slower, shipped))
                least, most = min(least or slow, slow), max(most or fast, fast)
                is_range, because = True, mapped.unsaid
            found = replace(
                found, tokens_per_second=speed.tokens_per_second_per_gpu, has_no_rate=is_range,
                fitted_tokens_per_second=shipped.tokens_per_second_per_gpu,
                least_tokens_per_second=None if is_range else least,
                speed_reason=f"{because}: between {least:,.0f} and {most:,.0f} tokens/s"
                if is_range else None,
            )  # fmt: skip
        except ASKED_WRONG as error:
            found = replace(found, speed_reason=_first_line(error))
    if mapped.memory_not_covered is not None:
        return replace(found, memory_reason=mapped.memory_not_covered)
    try:
        memory = _memory(mapped, mapped.memory_scenario or scenario, trace)
        least = _memory(mapped, mapped.least, trace).figure if mapped.least else None
    except ASKED_WRONG as error:
        return replace(found, memory_reason=_first_line(error))
    peak, overhead = memory.figure, memory.overhead
    if least is not None and peak > MOST_APART * least:
        return replace(found, memory_reason=f"{mapped.unsaid}, and the bounds lie a factor of 3 apart")
    assert scenario.device is not None
    needed = memory.needed + overhead
    verdict = MemoryVerdict(needed_bytes=needed, device_bytes=scenario.device.memory_bytes)
    at_least = MemoryVerdict(
        needed_bytes=least + overhead if least else needed, device_bytes=verdict.device_bytes
    )
    return replace(
        found,
        memory_bytes=peak + overhead if row.statistic == "device" else peak,
        device_bytes=needed,
        least_bytes=least,
        memory_reason=f"{mapped.unsaid}: between {least / 1e9:.1f} and {peak / 1e9:.1f} GB"
        if least
        else None,
        fits=verdict.fits if verdict.fits == at_least.fits else None,
    )


ASKED_WRONG = (HarnessError, ValueError, ArithmeticError, LookupError)
"""What a row of a stranger may raise."""


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


MOST_APART = 3
"""Bounds that lie further apart say nothing."""


@dataclass(frozen=True, kw_only=True)
class _Memory:
    figure: int
    """As the row counts: what the allocator keeps, which gives it back before it fails, or its peak."""
    needed: int
    overhead: int
    """Outside of the allocator."""


def _memory(mapped: Mapped, scenario: Scenario, trace: Trace | None) -> _Memory:
    of_allocator = mapped.row.statistic in ("reserved", "device")
    scenario = reserving(scenario) if of_allocator else scenario
    memory = predict_memory(scenario, trace)
    peak, overhead = memory.peak_bytes, memory.device_bytes - memory.peak_bytes
    if mapped.own_state_bytes is not None:
        peak = round(mapped.own_state_bytes) + _activation_bytes(memory)
        return _Memory(figure=peak, needed=peak, overhead=overhead)
    assert scenario.device is not None
    most = max(peak, scenario.device.memory_bytes - overhead)
    kept = min(reserved_bytes(scenario), most) if of_allocator else peak
    return _Memory(figure=kept, needed=peak, overhead=overhead)


def _activation_bytes(memory: MemoryPrediction) -> int:
    """Activations and data at the moment of the passes at which they are most."""
    return max(
        sum(term.bytes for term in moment.terms if term.kind in ("activations", "data"))
        for moment in memory.moments
    )


def errors_of(judged: Iterable[Judged]) -> list[dict[str, Any]]:
    """What answers say of their own error: of each run whose settings are said, as if nobody had read its
    program's code, and of memory where the page says which peak it is."""
    return [
        {
            "run": one.row.id, "source": one.row.source, "adapted": one.is_adapted,
            "statistic": one.row.statistic, "kind": kind_of(scenario.strategy, scenario.options),
            "gpu": chip_of(scenario), "gpus": scenario.world_size, "parameters": scenario.model.parameters,
            "tokens": int(one.row.seq_len), "compiled": scenario.job.model.compile != "none",
            "pcie": crosses_pcie(scenario),
            "memory": None if one.row.statistic == UNSAID else _rounded(one.memory_error),
            "speed": _rounded(one.error_of_figure),
        }
        for one in (run.left_out for run in judged)
        if (scenario := one.mapped.scenario) is not None and not one.row.tier.startswith(OPEN)
        and not (one.memory_error is None and one.speed_error is None)
    ]  # fmt: skip


def stated_errors(one: Judged, without: str | None = None) -> tuple[float | None, float | None]:
    """Of memory and speed, what the answer to a row says; `without`: as if that source were not known."""
    scenario = one.mapped.scenario
    if scenario is None:
        return None, None
    trust = trust_in(scenario, without=without)
    has_memory = one.memory_bytes is not None and one.least_bytes is None
    memory = trust.memory.typical if trust.memory and has_memory else None
    has_speed = one.tokens_per_second is not None and not one.has_no_rate
    speed = trust.speed.typical if trust.speed and has_speed else None
    return memory, speed


OPEN = "C"
"""Tier of rows of which something that decides is not said."""


def _rounded(error: float | None) -> float | None:
    return None if error is None else round(error, 3)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Errors over several rows, relative and without sign."""

    memory: tuple[float, ...]
    fits: tuple[bool, ...]
    """Per run that was tried: whether the answer was right."""
    speed: tuple[float, ...]
    order: Mapping[str, tuple[int, int]]
    """Of speed, by source: pairs of strategies in the right order, and all pairs."""
    memory_order: Mapping[str, tuple[int, int]]
    asked: tuple[int, int]
    """Rows with any prediction, and all rows."""

    @property
    def memory_mean(self) -> float | None:
        return mean(self.memory) if self.memory else None

    @property
    def memory_worst(self) -> float | None:
        return max(self.memory, default=None)

    @property
    def fits_share(self) -> float | None:
        return sum(self.fits) / len(self.fits) if self.fits else None

    @property
    def speed_median(self) -> float | None:
        return median(self.speed) if self.speed else None

    @property
    def order_share(self) -> float | None:
        return by_source(self.order)

    @property
    def order_pairs(self) -> int:
        return sum(total for _, total in self.order.values())


def summarize(judged: Sequence[Judged]) -> Summary:
    """Errors of all rows that have a prediction and a published figure."""
    predicted = [one for one in judged if one.memory_bytes is not None or one.tokens_per_second is not None]
    return Summary(
        memory=tuple(abs(j.memory_error) for j in judged if j.memory_error is not None),
        fits=tuple(j.fits == j.row.fitted for j in judged if j.fits is not None and j.row.tried),
        speed=tuple(abs(j.speed_error) for j in judged if j.speed_error is not None),
        order=order(judged),
        memory_order=order(judged, "memory"),
        asked=(len(predicted), len(judged)),
    )


def order(judged: Iterable[Judged], quantity: Quantity = "speed") -> dict[str, tuple[int, int]]:
    """By source: pairs of strategies in the right order, and all pairs.

    A pair is one model on as many GPUs with one global batch and the same other settings under two
    strategies, whose figures differ by over 5 %. Nearer ones are ties, which no order has.
    """
    found: dict[str, tuple[int, int]] = {}
    for pair in pairs(judged, quantity):
        right, total = found.get(pair.source, (0, 0))
        found[pair.source] = (right + pair.is_right, total + 1)
    return found


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two strategies whose published figures differ clearly, by the larger figure first."""

    larger: Row
    smaller: Row
    published: float
    """How many times the larger figure is the smaller one; predicted: below 1 if the order is wrong."""
    predicted: float

    @property
    def source(self) -> str:
        return self.larger.source

    @property
    def is_right(self) -> bool:
        return self.predicted > 1


def pairs(judged: Iterable[Judged], quantity: Quantity = "speed") -> list[Pair]:
    """What `order` counts."""
    groups: dict[tuple[str, ...], list[tuple[Judged, float]]] = {}
    for one in judged:
        published = one.row.rate if quantity == "speed" else one.row.memory_bytes
        if published is not None and (one.tokens_per_second if quantity == "speed" else one.memory_bytes):
            groups.setdefault(_setting(one.row), []).append((one, published))
    found = []
    for runs in groups.values():
        for two in combinations(runs, 2):
            (one, most), (other, least) = sorted(two, key=lambda run: -run[1])
            if _asked(one) != _asked(other) and most > (1 + CLEARLY) * least:
                predicted, rival = _beside(one, other, quantity), _beside(other, one, quantity)
                found.append(
                    Pair(
                        larger=one.row,
                        smaller=other.row,
                        published=most / least,
                        predicted=predicted / rival,
                    )
                )
    return found


def _asked(one: Judged) -> tuple[str, Mapping[str, Any]] | None:
    """The strategy of ours that a row's is, with its options: two rows with one are no pair."""
    scenario = one.mapped.scenario
    return None if scenario is None else (scenario.label, scenario.options)


def _beside(one: Judged, other: Judged, quantity: Quantity) -> float:
    """Predicted; beside replicas the least that full sharding may reach, as in the order of an answer
    (`harness.plan.search.close_to_first`)."""
    if quantity == "memory":
        assert one.memory_bytes is not None
        return one.memory_bytes
    scenario = other.mapped.scenario
    has_replicas = scenario is not None and scenario.strategy.facts.has_replicas
    assert one.tokens_per_second is not None
    return (one.least_tokens_per_second if has_replicas else None) or one.tokens_per_second


def _setting(row: Row) -> tuple[str, ...]:
    """What must be equal for two strategies to be compared. Precision may differ within a pair that a source
    measured as one, since libraries bring their own."""
    named = re.search(r"pair:(\S+)", row.note)
    return (
        row.source, named[1] if named else row.precision, row.model, row.gpu, str(row.gpus), row.seq_len,
        row.method, row.global_batch, row.offload, row.activation_ckpt, row.compile, row.attention,
        row.tp, row.pp, row.cp, row.ep,
    )  # fmt: skip


def by_source(found: Mapping[str, tuple[int, int]]) -> float | None:
    """The mean share over sources, so that no source with many rows decides; None: there is no pair."""
    return mean(right / total for right, total in found.values()) if found else None
