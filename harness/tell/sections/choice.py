"""Which strategy to use: cells that are compared, what fits which memory, why the slowest is slow."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import median
from typing import Any, TypeVar

from harness.backends.registry import PLANTED, UnknownBackend, moving_parts
from harness.backends.strategy import ROUTE_PREFIXES
from harness.forms import families
from harness.forms.peak_memory.families import without_activations
from harness.forms.terms import STEP_PHASES
from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.judge.facts import SENT, SPEED
from harness.judge.quantities import pipeline_use
from harness.judge.rows import BASE, CellRuns, Place, place_to_compare, rank_speeds, rivals
from harness.judge.statistics import Ranking, Ratio, frontier, interval_runs
from harness.judge.wording import a_few, percent, ranks
from harness.record import Record
from harness.record.workload import known_strategy, of_record
from harness.tell.document import Block, Line, Section, Shown, Table
from harness.tell.formats import megabytes
from harness.tell.formats import percent as whole_percent
from harness.tell.sections.job import words_to_plan
from harness.tell.tables import blocks_of, prose, ratio_text, table, table_columns

Level = tuple[list[str], float]
"""Labels whose figures are written alike, and the first of these."""
MOST_LABELS_NAMED = 4


def levels(figures: Mapping[str, float], show: Callable[[float], str]) -> list[Level]:
    """Cells whose figures are written alike together, with the first figure; least first."""
    found: dict[str, Level] = {}
    for label, value in sorted(figures.items(), key=lambda item: item[1]):
        found.setdefault(show(value), ([], value))[0].append(label)
    return list(found.values())


def unwrapped(label: str) -> str:
    """The label of the backend that another runs through a library of Hugging Face."""
    prefix = next((known for known in ROUTE_PREFIXES if label.startswith(known)), "")
    return label.removeprefix(prefix)


def names(labels: Sequence[str], most: int = MOST_LABELS_NAMED) -> str:
    """'a, b, c'; beyond `most` the rest as a number.

    A backend through Accelerate or Trainer is not named next to the same one without.
    """
    bare = {label for label in labels if unwrapped(label) == label}
    shown = [label for label in labels if label in bare or unwrapped(label) not in bare]
    return ", ".join([*shown[:most], *([f"{len(shown) - most} more"] if len(shown) > most else [])])


def shortened(text: str, most_words: int) -> str:
    """Text of at most so many words, after a clause where one ends in its second half; the rest is marked."""
    words = text.split()
    if len(words) <= most_words:
        return text
    kept = words[:most_words]
    clauses = [place for place, word in enumerate(kept, 1) if word[-1] in ",;:." and 2 * place >= most_words]
    shown = " ".join(kept[: clauses[-1] if clauses else most_words]).rstrip(",;:.")
    return f"{shown} ...{')' if shown.count('(') > shown.count(')') else ''}"


Read = Callable[[CellRuns], float | None]
T = TypeVar("T")


@dataclass(frozen=True)
class ComparisonScope:
    """Cells of one place that succeeded, the reference left out where others ran beside it."""

    comparison: Comparison
    place: Place

    @property
    def size(self) -> int:
        return self.place[1]

    @cached_property
    def groups(self) -> list[CellRuns]:
        """Cells that agree with the reference, or cannot be judged; never one that is wrong on purpose."""
        found = [
            group
            for group in self.comparison.groups
            if group.place == self.place
            and group.has_result
            and group.parity != "diverged"
            and group.record.backend.name not in PLANTED
        ]
        return [group for group in found if not group.is_reference] or found

    @cached_property
    def base(self) -> CellRuns | None:
        """DDP, which the others are related to; None where it did not run."""
        return next((group for group in self.groups if group.backend == BASE), None)

    @property
    def order(self) -> Ranking | None:
        """The order by speed, as far as the runs support one; None where nothing but the reference ran."""
        return self.comparison.rankings.get(self.place)

    @cached_property
    def timed(self) -> dict[str, CellRuns]:
        """The cells that are in the order, by label; the reference where it ran alone."""
        here = [g for g in self.comparison.groups if g.place == self.place and g.has_result]
        names = [group.label for group in self.groups] if self.order is None else self.order.names
        return {group.label: group for group in here if group.label in names and group.values(SPEED)}

    @property
    def is_alone(self) -> bool:
        """Whether its only cell ran under other conditions than all others on as many ranks."""
        here = [g for g in self.comparison.groups if g.record.job_id == self.place[0]]
        return len(self.groups) == 1 and any(
            g.world_size == self.size and g.place != self.place and g.step_seconds for g in here
        )

    @property
    def on_cpu(self) -> bool:
        """Whether speeds say nothing of GPUs."""
        return any(group.record.world.device == "cpu" or group.record.on_stub for group in self.groups)

    def figures(self, read: Callable[[CellRuns], float | None]) -> dict[str, float]:
        """A figure of each cell that has it, by label, least first."""
        found = {group.label: value for group in self.groups if (value := read(group)) is not None}
        return dict(sorted(found.items(), key=lambda item: item[1]))


def comparison_scope(comparison: Comparison) -> ComparisonScope | None:
    """Where most backends were compared; None where nothing succeeded."""
    comparable = comparison.comparable
    place = place_to_compare(comparable.groups)
    if place is None:  # nothing was timed
        known = [group for group in comparable.groups if group.has_result]
        place = max(known, key=lambda group: group.world_size).place if known else None
    return None if place is None else ComparisonScope(comparable, place)


def peak(group: CellRuns) -> float | None:
    """Largest allocator peak of any rank, in bytes."""
    return max(group.rank_peaks, default=None)


def sent_once(group: CellRuns) -> float | None:
    """Ring bytes that a rank sends per step, as counted."""
    return group.median(SENT)


def states(group: CellRuns) -> float | None:
    """Bytes of model states of the rank that holds most."""
    return group.median("model_state_bytes")


def memory_to_state(where: ComparisonScope) -> Read:
    """The peak, or of CPU ranks, whose peaks do not carry over, the model states."""
    return states if where.on_cpu else peak


def bytes_frontier(where: ComparisonScope) -> list[CellRuns]:
    """Cells in rising traffic and falling peaks: each needs less memory than all that send no more.

    Both figures are counts, which other machines share; of equal cells the first of the comparison is kept.
    """
    known = [
        (rounded(sent), rounded(most), number, group)
        for number, group in enumerate(where.groups)
        if (sent := sent_once(group)) is not None and (most := peak(group)) is not None
    ]
    return falling((group, most) for _, most, _, group in sorted(known, key=lambda part: part[:3]))


def falling(cells: Iterable[tuple[T, float]], least_step: float = 0.0) -> list[T]:
    """Cells that need less than each before them, by this share at least; `cells`: with their memory."""
    found: list[T] = []
    least: float | None = None
    for cell, most in cells:
        if least is None or most < least * (1 - least_step):
            found.append(cell)
            least = most
    return found


def rounded(value: float, digits: int = 3) -> float:
    """As it is shown, so that figures that read alike are alike."""
    return float(f"{value:.{digits}g}")


MOST_LEFT = 6
"""Amounts of memory of cells without a row."""
LEAST_STEP = 0.01
"""Of memory, between two thresholds."""
NONE_FITS = "none of these: more ranks, or offload"
ON_CPU = prose("decision_on_cpu", held=prose("decision_held"))
WITHOUT_ACTIVATIONS = "memory without activations"


def use_here(where: ComparisonScope) -> tuple[str, list[tuple[str, float]]]:
    """Name of the memory, and what to take from how many bytes on, most memory first; none where nothing is
    sent."""
    if where.size == 1 or len(where.groups) < 2 or not min(where.figures(sent_once).values(), default=0.0):
        return "", []
    held, title, _ = memory_to_take(where)
    return title, [(name, held[name]) for name in worth_taking(where, where.figures(sent_once), held)]


def _thresholds(where: ComparisonScope) -> list[Block]:
    """A row for each amount of memory."""
    title, taken = use_here(where)
    if not taken:
        return []
    held, _, text = memory_to_take(where)
    sent = where.figures(sent_once)
    rows = [[Shown(most, f"from {megabytes(most)}"), name, sent[name]] for name, most in taken]
    columns = [
        replace(column, title=f"{title}, MB") if column.key == "memory" else column
        for column in table_columns("decision")
    ]
    shown = dict(taken)
    bubbles = _bubbles(where)
    others = sent.keys() - shown.keys() - bubbles.keys()
    left = {one: size for one, size in held.items() if one in others and unwrapped(one) not in shown}
    needs = [f"{names(labels)} {megabytes(size)} MB" for labels, size in levels(left, megabytes)]
    waits = [f"{names(labels)} {whole_percent(share)}" for labels, share in levels(bubbles, whole_percent)]
    return blocks_of(
        table("decision", [*rows, [Shown(None, "less"), NONE_FITS, Shown(None, "")]], columns),
        prose("decision_order", ranks=ranks(where.size), more=_with_more_micro_steps(where)),
        text,
        prose("decision_left_out", cells=a_few(needs, MOST_LEFT, "; ")) if needs else None,
        prose("decision_pipelines", cells=", ".join(waits)) if waits else None,
    )


def _with_more_micro_steps(where: ComparisonScope) -> str:
    """The command that predicts the job with micro-batches as they ran; empty: none asked for it."""
    records = [group.record for group in (where.base, *where.groups) if group is not None]
    if (words := words_to_plan(records)) is None:
        return ""
    job = shlex.join([*words, "--world-size", str(where.size)])
    return prose("decision_more", job=job, micro_batch=records[0].world.micro_batch_size)


def memory_to_take(where: ComparisonScope) -> tuple[dict[str, float], str, str]:
    """Memory of a rank by label, its name, and how it is known."""
    if not where.on_cpu:
        return where.figures(peak), "peak memory", prose("decision_measured")
    held = where.figures(lambda group: held_with(group.record))
    if held:
        return held, WITHOUT_ACTIVATIONS, ON_CPU
    return where.figures(states), "model states", prose("decision_states")


def worth_taking(where: ComparisonScope, sent: Mapping[str, float], held: Mapping[str, float]) -> list[str]:
    """Labels in rising traffic and falling memory, of cells that send alike the fewest moving parts first.

    Without pipelines: they send least, and wait for it.
    """

    def parts(label: str) -> tuple[bool, float]:
        try:
            return moving_parts(label)
        except UnknownBackend:  # not installed, or without such options any more
            return True, inf

    bubbles = _bubbles(where)
    known = [
        (label, (rounded(sent[label], 2), parts(label), rounded(held[label])))
        for label in (group.label for group in where.groups)
        if label in sent and label in held and label not in bubbles
    ]
    ordered = sorted(known, key=lambda pair: pair[1])
    return falling(((label, most) for label, (*_, most) in ordered), LEAST_STEP)


def _bubbles(where: ComparisonScope) -> dict[str, float]:
    """Share in which the ranks of each pipeline wait, by label, from the schedule alone."""
    uses = {group.label: pipeline_use(group.record) for group in where.groups}
    return {label: use["expected_bubble"] for label, use in uses.items() if use}


def held_with(record: Record, size: int | None = None) -> int | None:
    """Bytes that the strategy needs on a GPU besides activations, on as many ranks as the run or on `size`;
    None: no closed form, a third party's own, which hold for its run alone, or on another number of ranks not
    data parallel over all of them."""
    if record.backend.own_forms is not None or record.backend.effective is None:
        return None
    workload = of_record(record)
    if workload is None or workload.strategy.family not in families.CLOSED_FORMS:
        return None
    if size is not None:
        of_mesh = workload.mesh is not None and workload.mesh.shares_samples
        if of_mesh or workload.second_copy_ranks or workload.shards != workload.world_size:
            return None
        workload = replace(workload, mesh=None, world_size=size, shard_size=size, ranks_per_node=None)
    return without_activations(workload)


def calls_per_step(record: Record) -> float | None:
    """Collectives among several ranks that a rank starts per probed step, mean over ranks; None: unknown."""
    probed = record.probed_steps
    if not probed or not record.ranks:
        return None
    calls = sum(row.calls for row in record.comm if row.phase in STEP_PHASES and row.group_size > 1)
    return calls / probed / len(record.ranks)


@dataclass(frozen=True, kw_only=True)
class SettingEffect:
    """The slowest backend with settings of its own changed."""

    group: CellRuns
    changed: str
    """'stage3_max_live_parameters=1000000000'; a preset changes several settings at once."""
    closed: float | None
    """Share of the gap to the fastest that it closes: 1 closes it, below 0 widens it; None: no gap."""
    difference: Ratio
    """Of its speed to the slowest cell's, over all effects and the gap together."""

    @property
    def is_preset(self) -> bool:
        return self.changed.startswith("preset=")

    @property
    def words(self) -> str:
        """'60 %' of the gap; words where the rounds show no such share."""
        if not self.difference.rounds:
            return NOT_COMPARED
        if self.difference.order not in ("faster", "slower") or self.closed is None:
            return NOT_SHOWN
        return percent(self.closed) if self.closed > 0 else WIDENED


@dataclass(frozen=True, kw_only=True)
class SlowestExplanation:
    """The slowest cell next to the fastest one that shards the same states."""

    slowest: CellRuns
    fastest: CellRuns
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
    def answer(self) -> str:
        """'zero3: 1.99 (1.94 to 2.04) x the time of fsdp1, which shards the same tensors; cause: ...'."""
        cells = {"slow": self.slowest.label, "fast": self.fastest.label}
        if self.gap.order in ("equal", "slower") or (self.gap.extent and self.gap.order == "open"):
            return prose("slowest_not_shown", **cells)
        ratio = ratio_text(self.gap) if self.gap.extent else f"{self.ratio:.2f} (not tested)"
        return "; ".join(filter(None, [prose("slowest_gap", ratio=ratio, **cells), self.cause]))

    @property
    def cause(self) -> str:
        """What follows from the settings that were changed; empty where the table shows it."""
        if self.gap.extent and self.gap.order != "faster":
            return ""
        if not self.effects or (self.is_tested and all(effect.is_preset for effect in self.effects)):
            return prose("slowest_open", slow=self.slowest.label)
        if not self.is_tested:
            return prose("slowest_few_rounds", rounds=interval_runs())
        if all(effect.words in (WIDENED, NOT_SHOWN) for effect in self.effects):
            return prose("slowest_unexplained")
        return prose("slowest_settings")

    def table(self) -> Table:
        """What the two do in a step, and the slower one with a setting changed."""
        cells: list[tuple[CellRuns, float | None, str]]
        cells = [(self.fastest, 1.0, ""), (self.slowest, self.ratio, "")]
        for effect in self.effects:
            faster = effect.difference.middle
            cells.append((effect.group, self.ratio / faster if faster else None, effect.words))
        first, time, closed, *others = table_columns("slowest")
        columns = [
            first,
            replace(time, title=f"time / {self.fastest.label}"),
            *([closed] if self.effects else []),
            *others,
        ]
        rows = []
        for group, ratio, share in cells:
            effective = group.record.backend.effective
            units, prefetch = (len(effective.wrap_units), effective.prefetch) if effective else (None, None)
            facts = [calls_per_step(group.record), units, group.median(SENT), prefetch]
            rows.append([group.label, ratio, *([share] if self.effects else []), *facts])
        return Table(key="slowest", columns=columns, rows=rows)


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
    ratios = rank_speeds([slowest, fastest, *own], base=slowest).to_base
    slow, fast = (median(run.value for run in g.rounds(SPEED).values()) for g in (slowest, fastest))
    ratio = ratios[fastest.label].middle or slow / fast
    effects = []
    for group in own:
        difference = ratios[group.label]
        ((name, value),) = _given(group.record).items() - _given(slowest.record).items()
        faster = difference.middle
        closed = (1 - 1 / faster) / (1 - 1 / ratio) if faster and ratio > 1 else None
        effects.append(
            SettingEffect(group=group, changed=f"{name}={value}", closed=closed, difference=difference)
        )
    return SlowestExplanation(
        slowest=slowest, fastest=fastest, gap=ratios[fastest.label], ratio=ratio,
        effects=tuple(sorted(effects, key=lambda effect: -(effect.difference.middle or 0.0))),
    )  # fmt: skip


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

    def implementation(record: Record) -> tuple[Any, ...]:
        known = known_strategy(record)
        return (record.backend.name,) if known is None else (known.family, known.sharding, known.stage)

    slowest = min(candidates, key=_throughput)
    varied = [
        group
        for group in candidates
        if any(group is base for base in bases)
        and implementation(group.record) == implementation(slowest.record)
        and rank_speeds([slowest, group]).ratio(group.label, slowest.label).order != "faster"
    ]
    return slowest if slowest in varied or not varied else min(varied, key=_throughput)


def _base(group: CellRuns, compared: Sequence[CellRuns]) -> CellRuns | None:
    """The cell of which this one changes one setting: the same backend without that option."""
    given = _given(group.record)
    for other in compared:
        less = _given(other.record)
        is_same = other.record.backend.name == group.record.backend.name
        if is_same and len(given.items() - less.items()) == 1 and len(given) == len(less) + 1:
            return other
    return None


def _given(record: Record) -> dict[str, str]:
    """Options in the label, as they are typed there."""
    pairs = (pair.partition("=") for pair in record.backend.label.partition(":")[2].split(",") if pair)
    return {name: value for name, _, value in pairs}


WIDENED, NOT_SHOWN, NOT_COMPARED = "made it slower", "no change shown", "not compared: no round in common"
ASKED: tuple[ReportFocus, ...] = ("all", "speed", "footprint")
SPEEDS: tuple[ReportFocus, ...] = ("all", "speed")


def choice_section(comparison: Comparison, question: ReportFocus = "all") -> Section | None:
    """None where nothing is to be chosen: another question, one rank, or a single cell."""
    where = comparison_scope(comparison)
    if question not in ASKED or where is None or where.size == 1 or len(where.groups) < 2:
        return None
    blocks = _thresholds(where)
    if question in SPEEDS:
        order, peaks = where.order, where.figures(peak)
        # On the CPU a speed is no advice.
        if not where.on_cpu and order is not None and order.is_judged and len(order.names) > 1:
            best = {label: order.ratio(label, order.base).middle for label in frontier(peaks, order)}
            shares = [
                f"{label} {whole_percent(share)} at {megabytes(peaks[label])} MB"
                for label, share in reversed(best.items())
            ]
            text = prose("choice_frontier", base=order.base, cells=", ".join(shares))
            blocks.append(Line(text, "Pareto frontier", "time"))
        found = explain_slowest(comparison)
        if found is not None and found.gap.order == "faster":
            blocks.append(Line(found.answer, "Slow here", "time"))
            if any(not effect.is_preset for effect in found.effects):
                blocks.append(found.table())
    return Section("choice", "Which to use", blocks) if blocks else None
