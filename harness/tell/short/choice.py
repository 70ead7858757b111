"""Which strategy to use, and why the slowest is slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from harness.forms.terms import STEP_PHASES
from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.judge.facts import SENT, SPEED
from harness.judge.rows import CellRuns, place_to_compare, rank_speeds, rivals
from harness.judge.statistics import Ratio, frontier, interval_runs
from harness.judge.wording import percent
from harness.record import Record
from harness.record.workload import known_strategy
from harness.tell.document import Column, Line, Section, Table
from harness.tell.formats import megabytes, short, times
from harness.tell.formats import percent as whole_percent
from harness.tell.short.comparison_scope import ComparisonScope, comparison_scope, peak
from harness.tell.short.decision import decision_blocks
from harness.tell.short.words import sentence
from harness.tell.tables import ratio_text


@dataclass(frozen=True, kw_only=True)
class CellFacts:
    """What a cell does in a step, per rank."""

    label: str
    runs: int
    token_seconds: float
    """Seconds per token over all ranks, median over the runs."""
    collectives: float | None
    """Calls per step among several ranks, mean over ranks; None: not counted."""
    sent_bytes: float | None
    """Per step, as on a ring."""
    units: int | None
    """Groups of parameters that are gathered at once; None: the backend does not say."""
    prefetch: str | None
    """How gathering runs ahead, in the library's words; 'none': not at all; None: it does not say."""


def cell_facts(group: CellRuns) -> CellFacts:
    """The facts of a timed cell. Its collectives and settings are those of the first run."""
    record = group.record
    effective = record.backend.effective
    return CellFacts(
        label=group.label,
        runs=len(group.values(SPEED)),
        token_seconds=median(group.by_round(SPEED).values()),
        collectives=calls_per_step(record),
        sent_bytes=group.median(SENT),
        units=len(effective.wrap_units) if effective else None,
        prefetch=effective.prefetch if effective else None,
    )


def calls_per_step(record: Record) -> float | None:
    """Collectives among several ranks that a rank starts per probed step, mean over ranks; None: unknown."""
    probed = record.windows.probed if record.windows else 0
    if not probed or not record.ranks:
        return None
    calls = sum(row.calls for row in record.comm if row.phase in STEP_PHASES and row.group_size > 1)
    return calls / probed / len(record.ranks)


@dataclass(frozen=True, kw_only=True)
class SettingEffect:
    """The slowest backend with settings of its own changed."""

    facts: CellFacts
    changed: str
    """'stage3_max_live_parameters=1000000000'; a preset changes several settings at once."""
    closed: float | None
    """Share of the gap to the fastest that it closes: 1 closes it, below 0 widens it; None: no gap."""
    difference: Ratio
    """Of its speed to the slowest cell's, over all effects and the gap together."""

    @property
    def is_preset(self) -> bool:
        """Whether it changes what a preset changes, not one setting."""
        return self.changed.startswith("preset=")


@dataclass(frozen=True, kw_only=True)
class SlowestExplanation:
    """The slowest cell next to the fastest one that shards the same states."""

    slowest: CellFacts
    fastest: CellFacts
    ratio: float
    """Time per token of the slowest over that of the fastest."""
    gap: Ratio
    """Of the fastest's speed to the slowest's."""
    effects: tuple[SettingEffect, ...]
    """Largest share first; empty: no setting was varied."""

    @property
    def is_tested(self) -> bool:
        """Whether any setting was varied and could be judged."""
        return self.gap.order == "faster" and any(e.difference.extent for e in self.effects)

    @property
    def sentence(self) -> str:
        """One or two sentences."""
        return " ".join([_gap(self), *_effects(self)])


def explain_slowest(comparison: Comparison) -> SlowestExplanation | None:
    """Explain the slowest cell of the place where most cells are compared.

    Cells that change one setting of another cell are its variants and not candidates. None: fewer than two
    timed cells shard the same states as the slowest one does.
    """
    groups = comparison.comparable.groups
    place = place_to_compare(groups)
    compared = rivals(groups).get(place, []) if place is not None else []
    variants = {id(group): base for group in compared if (base := _base(group, compared)) is not None}
    candidates = [group for group in compared if id(group) not in variants]
    if len(candidates) < 2:
        return None
    slowest = _slowest_varied(candidates, list(variants.values()))
    alike = [g for g in candidates if g is not slowest and _states(g.record) == _states(slowest.record)]
    if not alike:
        return None
    fastest = max(alike, key=_throughput)
    own = [group for group in compared if variants.get(id(group)) is slowest]
    return _explanation(slowest, fastest, own)


def _explanation(slowest: CellRuns, fastest: CellRuns, own: Sequence[CellRuns]) -> SlowestExplanation:
    ratios = rank_speeds([slowest, fastest, *own], base=slowest).to_base
    slow, fast = cell_facts(slowest), cell_facts(fastest)
    ratio = ratios[fastest.label].middle or slow.token_seconds / fast.token_seconds
    effects = [
        SettingEffect(
            facts=cell_facts(group),
            changed=_changed(slowest.record, group.record),
            closed=_closed(ratios[group.label].middle, ratio),
            difference=ratios[group.label],
        )
        for group in own
    ]
    return SlowestExplanation(
        slowest=slow, fastest=fast, gap=ratios[fastest.label], ratio=ratio,
        effects=tuple(sorted(effects, key=lambda effect: -(effect.difference.middle or 0.0))),
    )  # fmt: skip


def _closed(faster: float | None, fastest: float) -> float | None:
    """Share of the gap in time, by speeds over the slowest's in the same rounds; None: there is none."""
    return (1 - 1 / faster) / (1 - 1 / fastest) if faster and fastest > 1 else None


def _throughput(group: CellRuns) -> float:
    return group.median(SPEED) or 0.0


def _states(record: Record) -> tuple[Any, ...] | None:
    """Equal for cells that divide the same states among the same ranks."""
    strategy = known_strategy(record)
    if strategy is None:
        return None
    return strategy.stage, strategy.facts.has_replicas, strategy.facts.reshards


def _slowest_varied(candidates: Sequence[CellRuns], bases: Sequence[CellRuns]) -> CellRuns:
    """The slowest cell, or one of its implementation that is tied with it and whose settings were varied."""
    slowest = min(candidates, key=_throughput)
    varied = [
        group
        for group in candidates
        if any(group is base for base in bases)
        and _implementation(group.record) == _implementation(slowest.record)
        and rank_speeds([slowest, group]).ratio(group.label, slowest.label).order != "faster"
    ]
    return slowest if slowest in varied or not varied else min(varied, key=_throughput)


def _implementation(record: Record) -> tuple[Any, ...]:
    strategy = known_strategy(record)
    return (
        (record.backend.name,) if strategy is None else (strategy.family, strategy.sharding, strategy.stage)
    )


def _base(group: CellRuns, compared: Sequence[CellRuns]) -> CellRuns | None:
    """The cell of which this one changes one setting: the same backend without that option."""
    given = _given(group.record)
    for other in compared:
        if other.record.backend.name != group.record.backend.name:
            continue
        if (
            len(given.items() - _given(other.record).items()) == 1
            and len(given) == len(_given(other.record)) + 1
        ):
            return other
    return None


def _given(record: Record) -> dict[str, str]:
    """Options in the label, as they are typed there."""
    pairs = (pair.partition("=") for pair in record.backend.label.partition(":")[2].split(",") if pair)
    return {name: value for name, _, value in pairs}


def _changed(base: Record, record: Record) -> str:
    """The option of the second that the first lacks."""
    ((name, value),) = _given(record).items() - _given(base).items()
    return f"{name}={value}"


def _gap(found: SlowestExplanation) -> str:
    slow, fast = found.slowest.label, found.fastest.label
    if found.gap.order in ("equal", "slower") or (found.gap.extent and found.gap.order == "open"):
        return f"{slow} is not shown to be slower than {fast}, which shards the same tensors."
    untested = "" if found.gap.extent else ", not tested against noise"
    ratio = ratio_text(found.gap) if found.gap.extent else f"{found.ratio:.2f}"
    return f"{slow} takes {ratio} x the time of {fast}, which shards the same tensors{untested}."


CAUSE_OPEN = "Cause not measured here: configs/explain-zero3-speed.yaml varies zero3's settings one by one."


def _effects(found: SlowestExplanation) -> list[str]:
    """What follows from the settings that were changed."""
    if found.gap.extent and found.gap.order != "faster":
        return []
    if not found.effects or (found.is_tested and all(effect.is_preset for effect in found.effects)):
        return [CAUSE_OPEN]
    if not found.is_tested:
        return [
            f"Its settings were changed one at a time, but fewer than {interval_runs()} rounds "
            "cannot show what the gap comes from."
        ]
    if all(_closed_words(effect) in (WIDENED, NOT_SHOWN) for effect in found.effects):
        return ["None of the settings that were changed explains the gap."]
    return []


WIDENED, NOT_SHOWN, NOT_COMPARED = "made it slower", "no change shown", "not compared: no round in common"


def _closed_words(effect: SettingEffect) -> str:
    """'60 %' of the gap; words where the rounds show no such share."""
    if not effect.difference.rounds:
        return NOT_COMPARED
    if effect.difference.order not in ("faster", "slower") or effect.closed is None:
        return NOT_SHOWN
    return percent(effect.closed) if effect.closed > 0 else WIDENED


def differences(found: SlowestExplanation) -> Table:
    """What the two do in a step, and the slower one with a setting changed."""
    cells: list[tuple[CellFacts, float | None, str]]
    cells = [(found.fastest, 1.0, ""), (found.slowest, found.ratio, "")]
    for effect in found.effects:
        faster = effect.difference.middle
        cells.append((effect.facts, found.ratio / faster if faster else None, _closed_words(effect)))
    columns = [
        Column("configuration", "configuration", align="left"),
        Column("time", f"time / {found.fastest.label}", times),
        *([Column("gap_closed", "share of the gap closed")] if found.effects else []),
        Column("collectives", "collectives per step", short, optional=True),
        Column("units", "units gathered", optional=True),
        Column("sent", "sends per step, MB", megabytes, optional=True),
        Column("prefetch", "gathers ahead", align="left", optional=True),
    ]
    rows = [
        [
            facts.label, ratio, *([closed] if found.effects else []), facts.collectives, facts.units,
            facts.sent_bytes, facts.prefetch,
        ]
        for facts, ratio, closed in cells
    ]  # fmt: skip
    return Table(key="slowest", columns=columns, rows=rows)


ASKED: tuple[ReportFocus, ...] = ("all", "speed", "memory", "footprint")
SPEEDS: tuple[ReportFocus, ...] = ("all", "speed")


def choice_section(comparison: Comparison, question: ReportFocus) -> Section | None:
    """None where nothing is to be chosen: another question, one rank, or a single cell."""
    where = comparison_scope(comparison)
    if question not in ASKED or where is None or where.size == 1 or len(where.groups) < 2:
        return None
    blocks = decision_blocks(where, question)
    if question in SPEEDS:
        if not where.on_cpu and (text := _speed(where)):  # else a speed is no advice
            blocks.append(Line(text, "Speed here", "time"))
        found = explain_slowest(comparison)
        if found is not None and found.gap.order == "faster":
            blocks.append(Line(found.sentence, "Slow here", "time"))
            if any(not effect.is_preset for effect in found.effects):
                blocks.append(differences(found))
    return Section("choice", "Which to use", blocks) if blocks else None


def _speed(where: ComparisonScope) -> str:
    """The same by speed, as far as the runs support an order."""
    order, peaks = where.order, where.figures(peak)
    if order is None or not order.is_judged or len(order.names) < 2:
        return ""
    steps = frontier(peaks, order)
    shares = ", ".join(
        f"{label} {whole_percent(order.ratio(label, order.base).middle)} at {megabytes(peaks[label])} MB"
        for label in reversed(steps)
    )
    text = f"Pareto frontier of speed, relative to {order.base}, and peak memory: {shares}"
    return sentence(text)
