"""The first page of a report: answers to fixed questions in a table, the results, pictures, how to verify.

What it says stands in `tables.toml`: `answers`, `phrases` and `titles`; what pictures say, in `pictures/`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.backends.registry import PLANTED
from harness.forms.textbook import STUB
from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison, ScalingPoint, strong_scaling, weak_scaling
from harness.judge.facts import EXPECTED_SENT, SENT, SPEED, STEP
from harness.judge.findings.finding import statements
from harness.judge.library_notes import library_notes
from harness.judge.quantities import loss_unit, rank_states, unjudged_amounts, volume_differences
from harness.judge.rows import BASE, CellRuns, job_marks, rank_speeds
from harness.judge.run_conditions import is_deterministic, own_words, shares_cores
from harness.judge.statistics import EQUAL, Ranking, interval_runs
from harness.judge.wording import a_few, counted, entries, listed, name_cells, ranks, words
from harness.nested import grouped
from harness.tell.document import (
    Block,
    Code,
    Column,
    Document,
    Folded,
    Heading,
    Line,
    Picture,
    Section,
    Shown,
    Table,
)
from harness.tell.formats import dash, megabytes, number, percent, scientific, times
from harness.tell.pictures.plots import (
    loss_picture,
    memory_picture,
    strong_picture,
    throughput_picture,
    volume_picture,
    weak_picture,
)
from harness.tell.sections.choice import (
    LEAST_STEP,
    WITHOUT_ACTIVATIONS,
    ComparisonScope,
    bytes_frontier,
    comparison_scope,
    explain_slowest,
    held_with,
    levels,
    memory_to_state,
    names,
    peak,
    sent_once,
    shortened,
    unwrapped,
    use_here,
)
from harness.tell.sections.job import commands_of, words_to_plan
from harness.tell.sections.results import KEY as SURPRISES
from harness.tell.sections.time import used
from harness.tell.tables import (
    ANSWERS,
    LABELS,
    WITHOUT_FORM,
    figure_column,
    legend,
    parity_cell,
    phrase,
    rate_text,
    ratio_cell,
    ratio_column,
    ratio_text,
    shown_ratio,
    speed_title,
    title_text,
    unranked_words,
)
from harness.tell.writers.text import render_markdown

MOST_NAMES = 6
"""Of cells in an answer."""
PLANTED_PREFIX = "planted-"
LEAST_SHARE = 1 / 3
"""Of the cells next to DDP that have options, where the comparison is about these."""
MOST_VARIED = 2


def title(comparison: Comparison, question: ReportFocus, subject: str = "") -> str:
    """'LlamaForCausalLM with 0.87 M parameters on 2 CPU ranks: which strategy is fastest?'.

    `subject` follows the ranks: what the records do not say of them, such as the speed of links. Options or
    deliberate faults follow the question where the cells differ in these.
    """
    place = ", ".join(filter(None, [rank_words(comparison), subject]))
    kinds_of_scaling = {"strong": strong_scaling, "weak": weak_scaling} if question == "scaling" else {}
    ran = [kind for kind, curves in kinds_of_scaling.items() if curves(comparison)]
    scripts = _scripts(comparison)
    if scripts and question in ("all", "speed", "memory"):
        ran = [f"scripts_{question}" if len(scripts) > 1 else "script"]
    asked = title_text(ran[0] if len(ran) == 1 else question)
    labels = dict.fromkeys(group.backend for group in _measured(comparison))
    others = [label for label in labels if label != BASE]
    # What cannot run here shows no change.
    refused = {group.backend for group in comparison.groups if group.record.status == "unsupported"}
    with_options = [label for label in others if ":" in label and label not in refused]
    if others and all(label.startswith(PLANTED_PREFIX) for label in others):
        asked = title_text("planted", title=asked, cells=listed(others, MOST_VARIED))
    elif with_options and LEAST_SHARE * len(others) <= len(with_options):
        pairs = [pair for label in with_options for pair in label.partition(":")[2].split(",")]
        options = list(dict.fromkeys(pair.partition("=")[0] for pair in pairs))
        asked = title_text("varied", title=asked, options=listed(options, MOST_VARIED))
    return f"{job_words(comparison)} on {place}: {asked}"


def _measured(comparison: Comparison) -> Sequence[CellRuns]:
    """All cells but the reference; the reference where nothing else ran."""
    return [group for group in comparison.groups if not group.is_reference] or comparison.groups


def _scripts(comparison: Comparison) -> Sequence[CellRuns]:
    """The cells where commands are compared and not strategies: rows of --script, or observed of one kind."""
    groups = _measured(comparison)
    if not all(group.record.observation for group in groups):
        return []
    named = any("--script" in group.record.command for group in groups)
    return groups if named or len({group.record.backend.name for group in groups}) == 1 else []


def compared(comparison: Comparison) -> str:
    """'a: ddp, --lr 1; b: zero2, --lr 2': what each script trains under, and its own words; '' of one."""
    scripts = _scripts(comparison)
    seen = [group.record.observation for group in scripts if group.record.observation]
    found = []
    for group, part in zip(scripts, seen, strict=True):
        strategy = part.base if part.base not in (None, "single") else phrase("compared_alone")
        own = shortened(own_words(part.command, [other.command for other in seen]), MOST_WORDS_FINDING)
        found.append(f"{group.label}: {strategy if group.has_result else group.status}{own and f', {own}'}")
    return "; ".join(found[:MOST_NAMES]) if len(found) > 1 else ""


def job_words(comparison: Comparison) -> str:
    """The models that ran, with their number of parameters in millions."""
    found: dict[str, None] = {}
    for record in (row.record for row in comparison.rows if row.record.model or row.record.initial_weights):
        name = record.model.architecture if record.model else "model"
        count = record.initial_weights.parameter_count if record.initial_weights else None
        words = f"{name} with {count / 1e6:.3g} M parameters" if count else name
        if record.job.adapter.is_present:
            trained = record.layout.trained_count if record.layout else None
            share = f", {percent(trained / count)} trained" if trained and count else ""
            size = f" of rank {record.job.adapter.rank}" if record.job.adapter.rank else ""
            words += f" (LoRA{size}{share})"
        found[words] = None
    return listed(list(found), 2) or "One job"


def picture_heading(comparison: Comparison) -> str:
    """'LlamaForCausalLM with 0.87 M parameters on 2 CPU ranks, global batch 8'."""
    sizes = {row.record.job.training.global_batch_size for row in comparison.rows} - {None}
    batch = f", global batch {words(sorted(sizes))}" if sizes else ""
    return f"{job_words(comparison)} on {rank_words(comparison)}{batch}"


def rank_words(comparison: Comparison) -> str:
    """'2 CPU ranks', '4 and 8 GPU ranks of 1 and 2 nodes'; of the reference only where nothing else ran."""
    groups = _measured(comparison)
    sizes = sorted({group.world_size for group in groups})
    # A record without ranks, such as of an unsupported backend, does not name its device.
    ran = [group for group in groups if group.record.ranks] or groups
    devices = dict.fromkeys(
        STUB if group.record.on_stub else "GPU" if group.record.world.device == "cuda" else "CPU"
        for group in ran
    )
    nodes = sorted({group.record.world.nodes for group in groups})
    on_nodes = "" if nodes == [1] else f" of {listed([str(n) for n in nodes])} nodes"
    noun = "rank" if sizes == [1] else "ranks"
    return f"{listed([str(size) for size in sizes])} {'/'.join(devices)} {noun}{on_nodes}"


LIBRARIES = ("torch", "deepspeed")


def facts_line(comparison: Comparison) -> str:
    """Ranks, job, versions and number of runs, separated by commas; what differs between runs is left out."""
    worlds = [row.record.world for row in comparison.rows]
    transports = listed(list(dict.fromkeys(world.collectives for world in worlds)))
    known = dict.fromkeys(row.record.job.training.precision for row in comparison.rows)
    meant = {"bf16": phrase("precision_bf16")}
    facts = [f"{rank_words(comparison)} over {transports}"]
    ran = [group.record.world for group in comparison.groups if group.has_result and not group.is_reference]
    threads = {world.threads_per_rank for world in ran}
    if len(threads) == 1 and all(world.device == "cpu" for world in ran):
        facts.append(phrase("fact_threads", threads=threads.pop()))
    facts += [job_words(comparison), listed([meant.get(p, p) for p in known if p is not None])]
    presets = {world.preset for world in worlds}
    facts += [phrase("fact_preset", preset=presets.pop())] if len(presets) == 1 else []
    for name in LIBRARIES:
        versions = {row.record.environment.packages.get(name) for row in comparison.rows}
        if len(versions) == 1 and (version := versions.pop()):
            facts.append(f"{name} {version.partition('+')[0]}")
    counts = sorted({len(group.rows) for group in comparison.groups})
    extent = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    return ", ".join(filter(None, [*facts, phrase("fact_runs", runs=extent)]))


NORM, WEIGHTS = "max_grad_norm_difference", "final_weights_difference"


def same_training(comparison: Comparison) -> str:
    """Whether all cells train as one process does, and how far the evidence reaches; empty for it alone."""
    others = [g for g in comparison.comparable.groups if not g.judges_others]
    judged = [group for group in others if group.parity != "unjudged"]
    base = _base_of_scripts(comparison)
    untrained = [group for group in comparison.groups if not group.has_result]
    before = [g for g in untrained if base and g.record.created_at < base.record.created_at]
    because = [phrase("same_base", base=base.label, cells=_cells(before))] if base and before else []
    if not judged and base:
        apart = comparison.not_comparable.groups
        return "; ".join([phrase("same_apart", cells=_cells(apart)), *because]) if apart else ""
    if not judged:
        every = comparison.comparable.groups
        refused = next((group for group in every if group.is_reference and group.record.reasons), None)
        why = f": {refused.cell}: {refused.record.reasons[0]}" if refused is not None else ""
        return phrase("no_reference", why=why) if others else ""
    sound = [group for group in judged if group.record.backend.name not in PLANTED] or judged
    agree = [group for group in sound if group.parity != "diverged"]
    off = [group for group in judged if group.parity == "diverged"]
    is_off = any(group in sound for group in off)
    largest = max((group.figures["max_loss_difference"] or 0.0 for group in agree), default=0.0)
    held = [(limits, group) for group in agree if (limits := group.limits) is not None]
    tested = [(w, g) for w, g in held if g.parity != "exact" and g.figures[WEIGHTS] is not None]
    # A run that moves no weight is as far from the reference as that moved.
    widest = max((limits.weights for limits, _ in tested), default=0.0)
    facts = []
    unit = min((f" {loss_unit(group.record)}".rstrip() for group in agree), key=len, default="")
    if agree:
        shown = (
            phrase("same_largest", value=scientific(largest), unit=unit) if largest else phrase("same_exact")
        )
        facts = [shown, phrase("same_steps", steps=min(len(group.record.steps) for group in agree))]
    if largest and held:
        limits, group = max(held, key=lambda one: one[0].loss)
        name, source = ("same_assumed_limit", group.assumed) if group.assumed else ("same_limit", "")
        facts.insert(1, phrase(name, value=scientific(limits.loss), source=source))
    is_assumed = largest > 0 and any(group.assumed for _, group in held)
    answer = "same_no" if is_off else "same_not_shown" if widest >= 1 else None
    head = phrase(answer or ("same_assumed" if is_assumed else "same_yes"))
    if cut := [group for group in agree if group.at_once]:
        samples = " or ".join(map(str, sorted({group.at_once or 0 for group in cut})))
        which = phrase("same_at_once_of", cells=_cells(cut)) if len(cut) < len(agree) else ""
        head = phrase("same_at_once", answer=head, samples=samples, which=which)
    of = {"agree": len(agree), "judged": len(sound), "facts": ", ".join(facts)}
    parts = [phrase("same_of", answer=head, **of) if agree else head]
    if off:
        measures = (("loss", "max_loss_difference", scientific), ("gradient norm", NORM, percent))
        beyond = [
            f"{name} {show(max(found))}"
            for name, key, show in measures
            if (found := [value for group in off if (value := group.figures[key])])
        ]
        extent = f" ({', '.join(beyond)})" if beyond else ""
        parts.append(phrase("same_diverged" if is_off else "same_planted", cells=_cells(off), extent=extent))
    parts += [phrase("same_weights", times=times(widest))] if widest >= 1 else []
    unjudged = [group for group in others if group.parity == "unjudged" and group.has_result]
    parts += [phrase("same_unjudged", cells=_cells(unjudged))] if unjudged else []
    return "; ".join([*parts, *because])


def _base_of_scripts(comparison: Comparison) -> CellRuns | None:
    return next((group for group in comparison.groups if group.is_base_of_scripts), None)


def _cells(groups: Sequence[CellRuns]) -> str:
    return name_cells([group.cell for group in groups], MOST_NAMES)


def cause(comparison: Comparison) -> str:
    """What says most of why a run, a diverged one first, left the reference; empty if none did."""
    parity = {group.cell: group.parity for group in comparison.groups if not group.judges_others}
    left = {"diverged", "unjudged"}.intersection
    told = [s for s in statements(comparison.findings) if left(parity.get(cell, "") for cell in s.cells)]
    told = [s for s in told if s.id != "diverged" and s.role != "figures"]
    if not told:
        return phrase("no_cause") if "diverged" in parity.values() else ""
    first = min(told, key=lambda one: "diverged" not in {parity.get(cell) for cell in one.cells})
    finding = shortened(first.sentence.removesuffix("."), MOST_WORDS_FINDING)
    means = phrase(f"{first.role}_means", cause=entries()[first.id]["cause"])
    return f"{finding}; {means}"


def amounts(comparison: Comparison) -> str:
    """How many cells hold the states and send the bytes of their closed forms, and which do not."""
    cells = [g for g in comparison.comparable.groups if g.has_result and not g.is_reference]
    states, sent = {}, {}
    for group in cells:
        held = [of_rank for row in group.rows for of_rank in rank_states(row.record) if of_rank.expected]
        if held:
            states[group.cell] = any(of_rank.off for of_rank in held)
        # Sent minus expected per step, of the repeat furthest off.
        pairs = [(row.figures[SENT], row.figures[EXPECTED_SENT]) for row in group.rows]
        off = [one - other for one, other in pairs if one is not None and other is not None]
        if off:
            sent[group.cell] = max(off, key=abs)
    # It sends what its strategy does; of a script or another's backend, norms and flags aside.
    claimed = {
        group.cell
        for group in cells
        if abs(sent.get(group.cell, 0)) >= 1
        and all(r.record.backend.claim is not None and volume_differences(r.record) == [] for r in group.rows)
    }
    extra = {cell: f"{cell} ({off:+,.0f} bytes)" for cell, off in sent.items() if abs(off) >= 1}
    holds = sum(abs(off) < 1 or cell in claimed for cell, off in sent.items())
    counts = {
        "states": f"{sum(not off for off in states.values())} of {len(states)}",
        "bytes": f"{holds} of {len(sent)}",
    }
    off_cells = {
        "amounts_states_off": name_cells([cell for cell, off in states.items() if off], MOST_NAMES),
        "amounts_bytes_off": words([text for cell, text in extra.items() if cell not in claimed] or ""),
        "amounts_norms": words([text for cell, text in extra.items() if cell in claimed] or ""),
        "amounts_no_form": _cells([g for g in cells if g.cell not in states or g.cell not in sent]),
    }
    parts = [phrase("amounts_of", **counts)] if states or sent else []
    return "; ".join([*parts, *(phrase(name, cells=cells) for name, cells in off_cells.items() if cells)])


ENDINGS = {
    "oom": "out of memory", "failed": "failed", "timeout": "out of time",
    "diverged": "loss or norm of NaN or infinity", "unsupported": "unsupported here",
}  # fmt: skip
"""Status, and what is written of cells that have it."""


def completed(comparison: Comparison) -> str:
    """How many cells completed, how the others ended, and what is compared with nothing."""
    groups = comparison.comparable.groups
    counts = {"succeeded": sum(group.succeeded for group in groups), "cells": len(groups)}
    reference = phrase("completed_reference") if any(group.is_reference for group in groups) else ""
    parts = [phrase("completed_of", **counts, reference=reference)] if groups else []
    for status, what in ENDINGS.items():
        ended = [(g, n) for g in groups if (n := sum(row.record.status == status for row in g.rows))]
        none = [group for group, _ in ended if not group.has_result]
        parts += [phrase("completed_none", status=what, cells=_cells(none))] if none else []
        parts += [
            phrase("completed_some", status=what, runs=runs, all=len(group.rows), cell=group.cell)
            for group, runs in ended
            if group.has_result
        ]
    planted = list(dict.fromkeys(g.label for g in groups if g.record.backend.name in PLANTED))
    parts += [phrase("completed_planted", cells=words(planted))] if planted else []
    excluded = comparison.not_comparable.groups
    return "; ".join([*parts, *([phrase("completed_other_job", cells=_cells(excluded))] if excluded else [])])


def least_memory(scope: ComparisonScope) -> str:
    """Who holds least, relative to DDP: of CPU ranks model states first, as their peaks do not carry over."""
    if scope.is_alone:
        return phrase("fastest_apart")
    parts = [_least(scope, memory_to_state(scope), "states " if scope.on_cpu else "peak ")]
    parts += [_least(scope, peak, "lowest peak ")] if scope.on_cpu else []
    return "; ".join(filter(None, parts)) or phrase("not_measured")


def least_traffic(scope: ComparisonScope) -> str:
    """Who sends least, relative to DDP; empty where nobody sends anything."""
    if not any(scope.figures(sent_once).values()):
        return ""
    return phrase("fastest_apart") if scope.is_alone else _least(scope, sent_once, "", " MB a step")


def _least(
    scope: ComparisonScope, read: Callable[[CellRuns], float | None], what: str, unit: str = " MB"
) -> str:
    """'fsdp, fsdp1: states 6.96 MB (ddp 13.9)'; empty where no cell has the figure."""
    found = levels(scope.figures(read), megabytes)
    if not found:
        return ""
    value, base = found[0][1], scope.base
    labels = [group.label for group in scope.groups if group.label in found[0][0]]
    of_base = read(base) if base is not None and base.label not in labels else None
    shown = "" if of_base is None else phrase("least_base", base=BASE, value=megabytes(of_base))
    cells = phrase("least_all") if len(found) == 1 and len(labels) > 1 else names(labels)
    return phrase("least", cells=cells, what=what, value=megabytes(value), unit=unit, base=shown)


FEW_TIMED_STEPS = 8
"""With fewer per run, speeds are rough."""


def fastest(scope: ComparisonScope) -> str:
    """The fastest, what equals it, and the slowest, as far as the rounds show them; or why none is named."""
    timed = scope.timed
    if not timed:
        on_stub = any(group.record.on_stub for group in scope.groups)
        return phrase("fastest_stub" if on_stub else "fastest_none")
    parts = [phrase("fastest_apart")]
    if not scope.is_alone:
        parts = _order(scope.order or rank_speeds(list(timed.values())), timed)
    fewest = min(len(steps) for group in timed.values() for steps in group.timed_steps if steps)
    if any(shares_cores(row.record) for group in timed.values() for row in group.rows):
        parts.append(phrase("fastest_shared"))
    if fewest < FEW_TIMED_STEPS:
        parts.append(phrase("fastest_few_steps", steps=fewest))
    return "; ".join(parts)


def _order(order: Ranking, timed: Mapping[str, CellRuns]) -> list[str]:
    def rate(label: str) -> str:
        return rate_text(timed[label].record, timed[label].median(SPEED))

    if len(order.names) == 1:
        return [phrase("fastest_alone", cell=order.names[0], rate=rate(order.names[0]))]
    if not order.is_judged:
        slow, *_, fast = sorted(order.names, key=lambda name: timed[name].median(SPEED) or 0.0)
        ends = {"least": number(timed[slow].median(SPEED)), "most": rate(fast)}
        return [phrase("fastest_unranked", why=unranked_words(order), **ends)]
    first = order.base if order.base in order.leaders else order.names[0]
    others = [name for name in order.leaders if name != first]
    equal = [name for name in others if order.ratio(name, first).order == "equal"]
    undecided = [name for name in others if name not in equal]
    parts = [phrase("fastest_first", cell=first, rate=rate(first))]
    parts += [phrase("fastest_equal", equal=percent(EQUAL), cells=names(equal))] if equal else []
    parts += [phrase("fastest_open", cells=names(undecided))] if undecided else []
    last = [name for name in order.trailers if name not in order.leaders]
    ratios = {name: order.ratio(name, first).middle for name in last}
    if last:
        shown = words([f"{name} {times(ratios[name])}" for name in reversed(last)])
        parts.append(phrase("fastest_last", first=first, cells=shown))
    return parts


def price(scope: ComparisonScope) -> str:
    """GPU-hours and price of 1e9 tokens, the cheapest first; empty where no price is given."""
    prices = {group.label: given for group in scope.groups if (given := group.record.price_per_gpu_hour)}
    if not prices or scope.on_cpu:
        return phrase("price_on_cpu") if prices else ""
    costs = {g.label: cost for g in scope.timed.values() if (cost := used(g, "cost")) is not None}
    cells = [
        phrase("price_of", cell=label, hours=number(costs[label] / prices[label].amount),
               price=number(costs[label]), currency=prices[label].currency)
        for label in sorted(costs, key=lambda label: costs[label])
    ]  # fmt: skip
    return phrase("price", cells=a_few(cells, mark="; ")) if cells else phrase("not_measured")


def slowest(comparison: Comparison) -> str:
    """How far the slowest is behind the fastest that shards the same; empty where it is not shown to be."""
    found = explain_slowest(comparison)
    return found.answer if found is not None and found.gap.order == "faster" else ""


def one_process(scope: ComparisonScope) -> str:
    """Throughput of one process on the same job; empty where it was not timed or nothing is compared."""
    groups = scope.comparison.groups
    of_job = [group for group in groups if group.is_reference and group.record.job_id == scope.place[0]]
    timed = [group for group in of_job if group.has_result and group.values(SPEED)]
    if len(timed) != 1 or len(scope.timed) < 2:
        return ""
    threads, speeds = timed[0].record.world.threads_per_rank, timed[0].values(SPEED)
    others = sorted({group.record.world.threads_per_rank for group in scope.groups})
    extent, cut = "", ""
    if len(speeds) > 1:
        extent = phrase("reference_extent", least=number(min(speeds)), most=number(max(speeds)))
    if others != [threads]:
        kind = "reference_same" if [threads] == [n * scope.size for n in others] else "reference_threads"
        cut = phrase(kind, threads=threads, others=words(others), size=scope.size)
    found = phrase(
        "reference_rate", rate=rate_text(timed[0].record, timed[0].median(SPEED)), extent=extent, threads=cut
    )
    return found + (phrase("sessions") if scope.comparison.sessions == 1 else "")


def scaled(comparison: Comparison, kind: str) -> str:
    """Strong or weak scaling at the most ranks: most and least, and which are faster; empty without any."""
    is_strong = kind == "strong"
    curves = strong_scaling(comparison) if is_strong else weak_scaling(comparison)
    if not curves:
        return ""
    last = [curve[-1] for curve in curves]
    size = max(point.group.world_size for point in last)
    last = sorted((p for p in last if p.group.world_size == size), key=lambda point: -point.speed_up)
    show = times if is_strong else percent

    def value(point: ScalingPoint) -> str:
        shown = ratio_text(point.ratio, show) if point.ratio.extent else show(point.speed_up)
        share = point.strong_efficiency
        more = {"cost": times(1 / share), "efficiency": percent(share)} if is_strong else {}
        return phrase(f"{kind}_point", cell=point.curve, value=shown, **more)

    parts = ", ".join(map(value, last))
    if len(last) > 2:
        ends = {"scaled_most": last[0], "scaled_least": last[-1]}
        parts = ", ".join(phrase(name, cells=value(point)) for name, point in ends.items())
    first = min(point.base.world_size for point in last)
    figure = phrase("speed_up" if is_strong else "efficiency")
    found = [f"{phrase('scaled_head', size=size, first=first, figure=figure)}: {parts}"]
    best = next(curve for curve in curves if curve[-1] is last[0])
    if is_strong and len({point.group.world_size for point in best}) > 2:
        sizes = [f"{p.group.world_size}: {times(p.speed_up)} at {percent(p.strong_efficiency)}" for p in best]
        found.append(phrase("scaled_sizes", cell=last[0].curve, sizes=", ".join(sizes)))
    if not any(point.ratio.extent for point in last):
        rounds = counted(min(len(point.group.values(STEP)) for point in last), "round")
        return "; ".join([*found, phrase("scaled_untested", rounds=rounds, needed=interval_runs())])
    for order in ("faster", "equal", "slower", "open"):
        curves_of = [point.curve for point in last if point.ratio.order == order]
        if curves_of:
            found.append(phrase(f"scaled_{order}", equal=percent(EQUAL), cells=words(curves_of)))
    return "; ".join(found)


def on_gpus(comparison: Comparison) -> str:
    """What carries over to GPUs, and the command that predicts the rest; empty of runs on GPUs."""
    records = [row.record for row in comparison.rows]
    job = words_to_plan(records)
    priced = dict.fromkeys(
        f"compare.price_per_gpu_hour={r.price_per_gpu_hour}" for r in records if r.price_per_gpu_hour
    )
    words = [word for one in priced for word in ("--set", one)]
    plan = (
        phrase("plan", job=shlex.join([*job, *words, "--gpu", "H100-80", "--gpus", "8"]))
        if job is not None
        else ""
    )
    if any(record.on_stub for record in records):
        return phrase("on_stub", plan=plan)
    return phrase("on_cpu", plan=plan) if any(r.world.device == "cpu" for r in records) else ""


def warnings(comparison: Comparison) -> str:
    found = list(dict.fromkeys(statement.id for statement in statements(comparison.findings)))
    if found:
        return f"{len(found)}: {words(found)}"
    judged = any(group.parity != "unjudged" for group in comparison.groups if not group.is_reference)
    return phrase("no_warnings" if judged else "no_warnings_no_reference")


def what_to_use(scope: ComparisonScope) -> str:
    """'ddp from 13.9 MB (...); below that fsdp from 10.0', fewest bytes sent first; empty: no choice."""
    what, taken = use_here(scope)
    parts = [
        phrase("use_next" if place else "use_first", cell=cell, value=megabytes(held), what=what)
        for place, (cell, held) in enumerate(taken)
    ]
    if len(taken) == 1:
        gathered = phrase("use_gathered") if what == WITHOUT_ACTIVATIONS else ""
        parts.append(phrase("use_alone", step=percent(LEAST_STEP), gathered=gathered))
    order, first = scope.order, taken[0][0] if taken else ""
    if order is not None and first in order.names:
        faster = [
            name for name in order.names if name != first and order.ratio(name, first).order == "faster"
        ]
        parts += [phrase("use_faster", cells=names(faster), first=first)] if faster else []
    return "; ".join(parts)


PLANNED_RANKS = 8
"""Those of one node with GPUs."""


def on_more_ranks(scope: ComparisonScope) -> str:
    """'fsdp 1,300 MB; ddp 5,592 (memory without activations)'; empty where so many ran, or none is known."""
    if scope.size >= PLANNED_RANKS or not scope.on_cpu:
        return ""
    found = levels(scope.figures(lambda group: held_with(group.record, PLANNED_RANKS)), megabytes)
    shown = [f"{names(labels)} {megabytes(held)} MB" for labels, held in found]
    return phrase("planned", cells="; ".join(shown)) if len(found) > 1 else ""


OF_SCOPE: dict[str, Callable[[ComparisonScope], str]] = {
    "memory": least_memory,
    "traffic": least_traffic,
    "fastest": fastest,
    "reference": one_process,
    "price": price,
    "use": what_to_use,
    "planned": on_more_ranks,
}
OF_COMPARISON: dict[str, Callable[[Comparison], str]] = {
    "compared": compared,
    "same": same_training,
    "cause": cause,
    "amounts": amounts,
    "completed": completed,
    "slowest": slowest,
    "strong": lambda comparison: scaled(comparison, "strong"),
    "weak": lambda comparison: scaled(comparison, "weak"),
    "gpus": on_gpus,
    "warnings": warnings,
}
TRUST = ("amounts", "completed", "warnings")
ROWS: dict[ReportFocus, tuple[str, ...]] = {
    "all": (
        "compared",
        "same",
        "memory",
        "traffic",
        "fastest",
        "slowest",
        "reference",
        "price",
        "use",
        "gpus",
        *TRUST,
    ),
    "speed": ("compared", "fastest", "slowest", "reference", "price", "same", "use", "gpus", *TRUST),
    "memory": ("compared", "memory", "same", "use", "planned", "gpus", *TRUST),
    "footprint": ("compared", "memory", "traffic", "same", "use", "gpus", *TRUST),
    "parity": ("compared", "same", "cause", *TRUST),
    "scaling": ("strong", "weak", "same", *TRUST),
}
"""Which questions a report answers, the first first."""
MOST_WORDS_FINDING, MOST_WARNINGS, MOST_SURPRISES = 30, 4, 3


def answers_table(comparison: Comparison, question: ReportFocus, titles: Mapping[str, str]) -> Table:
    """A row for each question, then the kinds of findings and what differs from the textbook.

    `titles`: of the sections of the details; a row whose evidence is in none of these has no link.
    """
    scope = comparison_scope(comparison)

    def evidence(key: str, text: str = "", entry: str = "") -> Shown | None:
        shown = titles.get(key, "").partition(":")[0].partition(",")[0]
        return Shown(key, text or shown, section=key, entry=entry) if shown else Shown(None, "")

    rows: list[list[Any]] = []
    base = _base_of_scripts(comparison)
    for name in ROWS[question]:
        if name in OF_COMPARISON:
            of = comparison.by_job[scope.place[0]] if scope and name == "gpus" else comparison
            answer = OF_COMPARISON[name](of)
        else:
            answer = "" if scope is None else OF_SCOPE[name](scope)
        if answer:
            asked = (
                phrase("same_as", base=base.label) if name == "same" and base else ANSWERS[name]["question"]
            )
            rows.append([asked, answer, evidence(ANSWERS[name]["evidence"])])
    if question == "scaling" and "scaling" not in titles:
        rows.insert(0, [ANSWERS["strong"]["question"], phrase("scaled_none"), evidence("results")])
    jobs = len(comparison.comparable.by_job)
    if scope is not None and question != "scaling" and jobs > 1:
        job = phrase("several_jobs", job=scope.place[0], jobs=jobs)
        rows.append([ANSWERS["job"]["question"], job, evidence("results")])
    sizes = sorted({g.world_size for g in comparison.groups if not g.is_reference and g.has_result})
    if scope is not None and question not in ("scaling", "parity") and len(sizes) > 1:
        size = phrase("several_sizes", size=scope.size, sizes=words(sizes))
        rows.append([ANSWERS["size"]["question"], size, evidence("results")])
    # By kind of finding its first statement, and how many others there are.
    found = grouped((statement.id, statement) for statement in statements(comparison.findings))
    for name, (stated, *alike) in list(found.items())[:MOST_WARNINGS]:
        where = f"{name_cells(stated.cells, MOST_VARIED)}: " if stated.cells else ""
        more = phrase("warning_more", rest=len(alike)) if alike else ""
        text = shortened(f"{where}{stated.text}", MOST_WORDS_FINDING)
        rows.append([phrase("warning", id=name), f"{text}{more}", evidence("findings", entry=name)])
    commands = {str(row.record.observation.command) for row in comparison.rows if row.record.observation}
    without = {"diverged"}
    if len(commands) > 1:  # whose options explain a difference of jobs as well as what a fix is for
        without |= {n for n in found if n == "several-jobs" or "shared/job" in entries()[n]["text"]}
    if causes := [name for role in ("cause", "consequence") for name, stated in found.items()
                  if stated[0].role == role and name not in without]:  # fmt: skip
        fix = shortened(entries()[causes[0]]["fix"].replace("`", ""), MOST_WORDS_FINDING)
        rows.append([ANSWERS["change"]["question"], fix, evidence("findings", entry=causes[0])])
    notes = library_notes(comparison.comparable, question)
    for place, note in enumerate(notes[:MOST_SURPRISES], 1):
        what = shortened(note.what, MOST_WORDS_FINDING)
        rest = len(notes) - MOST_SURPRISES if place == MOST_SURPRISES else 0
        name = titles.get(SURPRISES, "").partition(":")[0]
        text = phrase("surprises_more", title=name, rest=rest) if rest > 0 else ""
        cells = phrase("surprise", cells=note.short_cells, what=what)
        rows.append([ANSWERS["surprises"]["question"], cells, evidence(SURPRISES, text)])
    columns = [Column(key, key, align="left") for key in ("question", "answer", "evidence")]
    return Table(key="answers", columns=columns, rows=rows)


MOST_ROWS = 16
"""Beyond these only cells that the answers compare are shown."""
MANY_TIMES = 10
"""A ratio from which it is written as a multiple: nobody reads 5293 %."""
STATES, STATES_RATIO = "model_state_bytes", "model_state_bytes_of_ddp"
PEAK, PEAK_RATIO, SENT_RATIO = "peak_bytes", "peak_bytes_of_ddp", f"{SENT}_of_ddp"
RATIOS = {STATES_RATIO: "states / ddp", PEAK_RATIO: "peak / ddp", SENT_RATIO: "sent / ddp"}
AMOUNTS = (PEAK, STATES, SENT)
"""What closed forms judge."""
OF_SPEED = (SPEED, STEP, SENT, PEAK, "parity")
FIGURES: dict[ReportFocus, tuple[str, ...]] = {
    "all": (STATES, SENT, "parity", PEAK, "speed_ratio"),
    "speed": ("speed_ratio", SENT_RATIO, *OF_SPEED),
    "memory": (PEAK_RATIO, STATES_RATIO, PEAK, STATES, "expected_model_state_bytes", "parity"),
    "footprint": (STATES, STATES_RATIO, SENT, SENT_RATIO, "parity", PEAK, PEAK_RATIO),
    "parity": ("max_loss_difference", NORM, WEIGHTS, "first_divergent_step", "parity"),
    "scaling": ("speed_up", "speed_ratio", *OF_SPEED),
}
"""Columns by key; what the question asks for leads; of all, what carries over to other machines."""


def _figure(group: CellRuns, key: str, *, middle: bool = False) -> float | None:
    if key == PEAK:
        return peak(group)
    return group.median(key) if middle else group.figures[key]


def summary_section(comparison: Comparison, question: ReportFocus, most: int = MOST_ROWS) -> Section | None:
    """A table for each number of ranks, and for each job if there are several; None without runs."""
    groups = summary_cells(comparison, most)
    if not groups:
        return None
    members_of = grouped(((group.world_size, group.record.job_id), group) for group in groups)
    named = comparison.comparable.groups
    several = len({group.world_size for group in named if not group.is_reference}) > 1
    marks = job_marks(groups) if len(members_of) > len({size for size, _ in members_of}) else {}
    blocks: list[Block] = []
    for (size, job), members in sorted(members_of.items(), key=lambda item: item[0][0]):
        blocks += [Heading(f"{ranks(size)}{marks.get(job, '')}")] if several or marks else []
        key = f"summary_{size}{f'_{job}' if marks else ''}"
        blocks.append(_summary(key, comparison, members, FIGURES[question]))
    left = len([group for group in comparison.groups if not group.is_reference]) - len(groups)
    notes = legend([block for block in blocks if isinstance(block, Table)], groups)
    notes += [phrase("legend_more", rest=left)] if left > 0 else []
    note = " ".join(notes) or phrase("legend_all")
    return Section("summary", "Results", [*blocks, Line(note, details="results")])


def summary_cells(comparison: Comparison, most: int) -> list[CellRuns]:
    """All cells but the reference; of too many those where the answers compare, the telling ones first.

    Telling are DDP, cells that diverged, and those that no other beats in bytes. Left out are those that
    only show the parity of cells which are timed with the kernels that jobs use.
    """
    groups = comparison.comparable.groups
    groups = [group for group in groups if not group.is_reference] or groups
    # `completed` has those that are unsupported.
    groups = [group for group in groups if group.record.status != "unsupported"] or groups
    timed = {_kernels_aside(g) for g in groups if g.step_seconds and not is_deterministic(g.record)}
    groups = [g for g in groups if not is_deterministic(g.record) or _kernels_aside(g) not in timed]
    where = comparison_scope(comparison)
    if len(groups) <= most or where is None:
        return groups[:most]
    labels = {group.label: group for group in where.groups}
    here = [g for g in groups if g.place == where.place and not _repeats(g, labels.get(unwrapped(g.label)))]
    telling = {g.label for g in here if g.backend == BASE or g.parity == "diverged"}
    telling |= {g.label for g in bytes_frontier(where)}
    chosen = sorted(here, key=lambda group: group.label not in telling)[:most]
    return [group for group in here if group in chosen]


def _kernels_aside(group: CellRuns) -> tuple[str, str, int]:
    return group.record.job_id, group.backend, group.world_size


def _repeats(group: CellRuns, native: CellRuns | None) -> bool:
    """Whether a cell is another one, wrapped, and shows the same figures but for time."""
    if native is None or native is group or group.parity != native.parity:
        return False
    return all(megabytes(_figure(group, key)) == megabytes(_figure(native, key)) for key in AMOUNTS)


def _summary(key: str, comparison: Comparison, groups: Sequence[CellRuns], wanted: Sequence[str]) -> Table:
    bases = {group.place: group for group in groups if group.backend == BASE and group.has_result}
    orders = [comparison.comparable.rankings.get(group.place) for group in groups]
    strong = strong_scaling(comparison) if "speed_up" in wanted else []
    curves, show = (strong, times) if strong else (weak_scaling(comparison), percent)
    points = {point.group.cell: point for curve in curves for point in curve}
    others = {
        "speed_ratio": ratio_column([order for order in orders if order]),
        "speed_up": Column("speed_up", "speed-up" if strong else "efficiency"),
        SPEED: figure_column(SPEED, speed_title(comparison)),
        "parity": Column("parity", "parity", align="left"),
        "first_divergent_step": replace(figure_column("first_divergent_step"), show=dash),
    }
    figures = [figure for figure in wanted if bases or figure not in RATIOS]

    def value(group: CellRuns, figure: str) -> Any:
        if figure == "speed_up":
            point = points.get(group.cell)
            shown = point and (shown_ratio(point.ratio, show) or Shown(point.speed_up, show(point.speed_up)))
            return shown or None
        if figure == "speed_ratio":
            return ratio_cell(comparison.comparable.rankings.get(group.place), group.label)
        if figure == "parity":
            ended = parity_cell(group) if group.succeeded else f"{group.parity} ({group.status})"
            return ended if group.has_result else group.status
        is_other_work = group.parity == "diverged" and figure in (SPEED, STEP)
        if not group.has_result or is_other_work:
            return None
        if figure in RATIOS:
            of, base = figure.removesuffix("_of_ddp"), bases.get(group.place)
            found = _figure(group, of, middle=True)
            divisor = _figure(base, of, middle=True) if base is not None else None
            return found / divisor if found is not None and divisor else None
        found = _figure(group, figure)
        if found is not None and figure in AMOUNTS and unjudged_amounts(group.record):
            return Shown(found, f"{megabytes(found)}{WITHOUT_FORM}")
        return found

    def share(ratio: float | None) -> str:
        return percent(ratio) if ratio is None or ratio < MANY_TIMES else f"{ratio:,.0f} x"

    named = replace(LABELS[0], title="script") if _scripts(comparison) else LABELS[0]
    columns = [named, replace(LABELS[1], only_values=True)]
    others |= {key: Column(key, name, share) for key, name in RATIOS.items()}
    columns += [others[figure] if figure in others else figure_column(figure) for figure in figures]
    rows = [[*group.cell, *(value(group, figure) for figure in figures)] for group in groups]
    return Table(key=key, columns=columns, rows=rows)


VERIFY = "harness verify FILE  # this report"
MOST_WORDS_CHECK = 30
"""Of a command that is shown here."""


def check_section(comparison: Comparison) -> Section:
    """The first command that made the runs, if it is short, and the one that verifies this report."""
    first, *others = commands_of(comparison)
    shown = [first] if len(first.split()) <= MOST_WORDS_CHECK else []
    hidden = others if shown else [first, *others]
    more = phrase("check_more", rest=len(hidden)) if hidden else ""
    lines = [
        Line(phrase("check_commands", more=more), details="reproduce"),
        Line(phrase("check_verify"), details="records"),
    ]
    return Section("check", "Reproduce and verify", [Code("sh", "\n".join([*shown, VERIFY])), *lines])


MOST_WORDS = 900
"""Of the first page as markdown, whatever the number of cells."""
MOST_PICTURES = 4
PICTURES: dict[ReportFocus, tuple[Callable[[Comparison], Picture | None], ...]] = {
    "all": (memory_picture, volume_picture, loss_picture, throughput_picture),
    "speed": (throughput_picture, volume_picture, memory_picture),
    "memory": (memory_picture,),
    "footprint": (memory_picture, volume_picture),
    "parity": (loss_picture,),
    "scaling": (lambda c: strong_picture(strong_scaling(c)), lambda c: weak_picture(weak_scaling(c))),
}
"""At most `MOST_PICTURES` each: one with the answers, the others after the results, none in the details."""


def short_document(
    comparison: Comparison, question: ReportFocus, details: Document, *, named: str | None = None
) -> Document:
    """The first page that answers `question`, in front of its details; named: other than by its `title`.

    As many rows of the results as `MOST_WORDS` leave room for.
    """
    pictures = [p for make in PICTURES[question] if (p := make(comparison.comparable)) is not None]
    shown = {picture.key for picture in pictures}
    without = [replace(section, blocks=_without(section.blocks, shown)) for section in details.sections]
    kept = replace(details, sections=[section for section in without if section.blocks])
    facts = [Line(f"{facts_line(comparison)}.", details="machine")] if comparison.rows else []
    table = answers_table(comparison, question, kept.section_titles())
    answers = Section("verdict", "Answers", [*facts, table, *pictures[:1]])
    check = [check_section(comparison)] if comparison.rows else []
    page = Document(named or title(comparison, question), [], kept, heading=picture_heading(comparison))
    for most in range(MOST_ROWS, 3, -1):
        results = summary_section(comparison, question, most)
        more = [replace(results, blocks=[*results.blocks, *pictures[1:]])] if results is not None else []
        page = replace(page, sections=[answers, *more, *check])
        if words_of(page) <= MOST_WORDS:
            break
    return page


def words_of(document: Document) -> int:
    """Words of the first page as markdown, alternative texts included, marks of tables not."""
    pictures = {picture.key: picture.key for picture in document.pictures()}
    text = render_markdown(document, pictures, "", "report.details.md")
    return sum(any(map(str.isalnum, word)) for word in text.split())


def _without(blocks: Sequence[Block], keys: Collection[str]) -> list[Block]:
    """The blocks without the pictures of these keys."""
    return [
        replace(block, blocks=_without(block.blocks, keys)) if isinstance(block, Folded) else block
        for block in blocks
        if not (isinstance(block, Picture) and block.key in keys)
    ]
