"""The verdict, which answers the question, and why it may be trusted; each with where its evidence is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.backends.registry import PLANTED
from harness.backends.strategy import ROUTE_PREFIXES
from harness.forms.terms import STATE_KINDS
from harness.job.experiment import ReportFocus
from harness.judge.agreement.noise import Tolerance
from harness.judge.comparison import Comparison, ScalingPoint, strong_scaling, weak_scaling
from harness.judge.facts import EXPECTED_SENT, SENT, SPEED, STEP
from harness.judge.findings.finding import kinds, statements
from harness.judge.quantities import largest, rank_states, volume_differences
from harness.judge.rows import CellRuns, rank_speeds
from harness.judge.run_conditions import shares_cores
from harness.judge.statistics import EQUAL, Ranking
from harness.judge.wording import CellName, counted, listed, name_cells, ranks
from harness.tell.document import Items, Line, Section
from harness.tell.formats import megabytes, number, percent, scientific, times
from harness.tell.short.comparison_scope import (
    ComparisonScope,
    comparison_scope,
    memory_to_state,
    peak,
    rounded,
    sent_once,
)
from harness.tell.short.decision import MANY_RANKS, least_on_many
from harness.tell.short.words import names, ratio, sentence, shortened
from harness.tell.tables import (
    ONE_SESSION,
    fastest_words,
    ratio_text,
    slowest_words,
    unranked_words,
)


def costs_sentence(scope: ComparisonScope, *, with_traffic: bool) -> str:
    """Who holds least, relative to DDP: of CPU ranks model states, as their peaks do not carry over."""
    read, on = memory_to_state(scope), f"on {ranks(scope.size)}"
    known = [(value, group) for group in scope.groups if (value := read(group)) is not None]
    if not known:
        return "Memory was not measured."
    noun = "of model states per rank" if scope.on_cpu else "per rank at its peak"
    if len({megabytes(value) for value, _ in known}) == 1:
        return f"Every configuration holds {megabytes(known[0][0])} MB {noun} {on}."
    second = sent_once if with_traffic else peak
    least, best = min(
        known,
        key=lambda pair: (rounded(pair[0]), second(pair[1]) or 0, pair[1].label.startswith(ROUTE_PREFIXES)),
    )
    base = next((pair for pair in known if pair[1] is scope.base and pair[1] is not best), None)
    alike = [group for value, group in known if megabytes(value) == megabytes(least) and group is not best]
    who = names([best.label, *(group.label for group in alike)])
    text = f"{who} {'hold' if alike else 'holds'} least {on}: {megabytes(least)} MB {noun}"
    if base is not None:
        text += (
            f", {percent(least / base[0])} of ddp's {megabytes(base[0])} MB{_per_parameter(scope, base[1])}"
        )
    clauses = [text]
    if with_traffic and (sent := sent_once(best)):
        than = _next_to(sent, sent_once(base[1]) if base else None)
        who = f"of these {best.label} sends least," if alike else "it sends"
        clauses.append(f"{who} {megabytes(sent)} MB per step{than}")
    if scope.on_cpu and (most := peak(best)):
        of_base = peak(base[1]) if base else None
        share = f", {percent(most / of_base)} of ddp's" if of_base else ""
        whose = f"the peak of {best.label}" if alike and len(clauses) == 1 else "its peak"
        clauses.append(f"{whose} here was {megabytes(most)} MB{share}")
    return "; ".join(clauses) + "."


def many_ranks_sentence(scope: ComparisonScope) -> str:
    """Who needs least on many ranks, where that is not who holds least here; empty otherwise."""
    found = least_on_many(scope)
    held = scope.figures(memory_to_state(scope))
    if found is None or not held:
        return ""
    labels, least = found
    if any(rounded(held.get(label, 0.0)) == rounded(min(held.values())) for label in labels):
        return ""
    verb = "needs" if len(labels) == 1 else "need"
    return (
        f"On {ranks(MANY_RANKS)}, by calculation, {names(labels)} {verb} least: {megabytes(least)} MB "
        "without activations (table below)."
    )


def _next_to(sent: float, of_base: float | None) -> str:
    """', as much as ddp', ', 1.5 x ddp's 4.00 MB'; empty where DDP's is not known."""
    if not of_base:
        return ""
    if megabytes(sent) == megabytes(of_base):
        return ", as much as ddp"
    return f", {ratio(sent, of_base)} ddp's {megabytes(of_base)} MB"


def _per_parameter(scope: ComparisonScope, group: CellRuns) -> str:
    """' (8 bytes per parameter: weights 2, gradients 2, optimizer 4)', where model states decide.

    Of a model of which all parameters are trained; of others no such figure follows.
    """
    record, states = group.record, largest(rank_states(group.record))
    if not scope.on_cpu or states is None or record.model is None or record.layout is None:
        return ""
    count = record.model.parameters
    if not count or record.layout.frozen:
        return ""
    parts = [f"{kind} {of / count:.3g}" for kind in STATE_KINDS if (of := states.measured.get(kind, 0))]
    return f" ({states.measured_bytes / count:.3g} bytes per parameter: {', '.join(parts)})"


def checks_sentence(comparison: Comparison) -> str:
    """How many checks of losses, model states and bytes hold, and which do not; empty without any."""
    cells = [g for g in comparison.comparable.groups if g.has_result and not g.is_reference]
    agree = [group.parity != "diverged" for group in cells if group.parity != "unjudged"]
    states = {group.cell: off for group in cells if (off := _states_off(group)) is not None}
    sent = {group.cell: off for group in cells if (off := _bytes_off(group)) is not None}
    claimed = {g.cell for g in cells if abs(sent.get(g.cell, 0)) >= 1 and _all_as_claimed(g)}
    assumed = any(group.assumed for group in cells if group.parity not in ("exact", "unjudged"))
    checks = {
        f"agree with one process{' (assumed limit)' if assumed else ''}": agree,
        "hold the expected states": [not off for off in states.values()],
        "send the expected bytes": [abs(off) < 1 or cell in claimed for cell, off in sent.items()],
    }
    checks = {what: good for what, good in checks.items() if good}
    parts = [f"{sum(good)} of {len(good)} {what}" for what, good in checks.items()]
    every = [one for good in checks.values() for one in good]
    counts = {len(good) for good in checks.values()}
    if all(every) and len(counts) == 1 and (count := counts.pop()) > 1:
        parts = [f"all {count} {listed(list(checks))}"]
    without = [group.cell for group in cells if group.cell not in states or group.cell not in sent]
    other_states = [cell for cell, off in states.items() if off]
    extra = {cell: f"{cell} ({off:+,.0f} bytes)" for cell, off in sent.items() if abs(off) >= 1}
    other_bytes = [text for cell, text in extra.items() if cell not in claimed]
    norms = [text for cell, text in extra.items() if cell in claimed]
    return sentence(
        f"{sum(every)} of {len(every)} checks hold: {listed(parts)}" if every else "",
        f"other model states: {name_cells(other_states, MOST_NAMES)}" if other_states else "",
        f"other bytes: {listed(other_bytes, MOST_NAMES)}" if other_bytes else "",
        f"as expected except for norms and flags: {listed(norms, MOST_NAMES)}" if norms else "",
        f"no closed form for {name_cells(without, MOST_NAMES)}" if without else "",
    )


def _states_off(group: CellRuns) -> float | None:
    """Model states minus those expected; None where either is unknown."""
    found, expected = group.median("model_state_bytes"), group.median("expected_model_state_bytes")
    return None if found is None or expected is None else found - expected


NORM, WEIGHTS = "max_grad_norm_difference", "final_weights_difference"
MOST_NAMES = 6
"""Of backends in a list."""
ENDINGS = (
    ("oom", "ran out of memory", "ran out of memory"),
    ("failed", "failed", "failed"),
    ("timeout", "ran out of time", "ran out of time"),
    ("diverged", "has a loss or norm of NaN or infinity", "have a loss or norm of NaN or infinity"),
    ("unsupported", "is unsupported here", "are unsupported here"),
)
"""Status, and what is written of one and of several cells that have it."""


def endings_sentence(comparison: Comparison) -> str:
    """How many cells completed, how the others ended, and what is compared with nothing."""
    return sentence(*_endings(comparison.comparable.groups), *_excluded(comparison.not_comparable.groups))


def parity_sentence(comparison: Comparison) -> str:
    """Agreement with the reference of everything but itself; empty where the reference ran alone.

    Where the limit is assumed, or final weights prove nothing, it says how far the evidence reaches.
    """
    others = [group for group in comparison.comparable.groups if not group.is_reference]
    judged = [group for group in others if group.parity != "unjudged"]
    if not judged:
        return f"No loss could be compared with a reference{_why_no_reference(comparison)}." if others else ""
    off = [group for group in judged if group.parity == "diverged"]
    return sentence(*_agreement(judged), *_divergence(off), *_unjudged(others))


def _why_no_reference(comparison: Comparison) -> str:
    """': single on 1 rank: cannot fit: 131 GB of 80 GB per rank'; '' where it was not refused."""
    groups = comparison.comparable.groups
    refused = next((group for group in groups if group.is_reference and group.record.reasons), None)
    return f": {refused.cell}: {refused.record.reasons[0]}" if refused is not None else ""


def _endings(groups: Sequence[CellRuns]) -> list[str]:
    if not groups:
        return []
    succeeded = sum(group.succeeded for group in groups)
    if len(groups) == 1:
        end = "completed" if succeeded else f"did not complete: {groups[0].status}"
        return [f"the only configuration, {groups[0].cell}, {end}"]
    others = [group for group in groups if not group.is_reference]
    text = f"{succeeded or 'none'} of {len(groups)} configurations"
    if succeeded == len(groups):
        several = others if len(others) > 1 else groups
        text = f"{'both' if len(several) == 2 else f'all {len(several)}'} configurations"
        text += " and the reference" if len(several) < len(groups) else ""
    parts = [f"{text} completed"]
    for status, of_one, of_several in ENDINGS:
        ended = [(g, n) for g in groups if (n := sum(row.record.status == status for row in g.rows))]
        cells = [group.cell for group, _ in ended if not group.has_result]
        if cells:
            parts.append(f"{len(cells)} {of_one if len(cells) == 1 else of_several} ({_where(cells)})")
        parts += [
            f"{group.cell} {of_one} in {count} of {len(group.rows)} runs"
            for group, count in ended
            if group.has_result
        ]
    planted = list(dict.fromkeys(g.label for g in groups if g.record.backend.name in PLANTED))
    verb = "is" if len(planted) == 1 else "are"
    return [", ".join(parts), *([f"{listed(planted)} {verb} deliberately faulty"] if planted else [])]


def _where(cells: Sequence[CellName]) -> str:
    """One cell with its ranks, of several the backends."""
    if len(cells) == 1:
        return str(cells[0])
    return listed(list(dict.fromkeys(cell.label for cell in cells)), MOST_NAMES)


def _agreement(judged: Sequence[CellRuns]) -> list[str]:
    agree = [group for group in judged if group.parity != "diverged"]
    if not agree:
        return []
    largest = max((group.figures["max_loss_difference"] or 0.0 for group in agree), default=0.0)
    held = [(limits, group) for group in agree if (limits := group.limits) is not None]
    allowed, no_test = _limit(held) if held else ("", "")
    extent = f"within {scientific(largest)} nats per token{allowed}" if largest else "bit for bit"
    is_assumed = largest > 0 and any(group.assumed for _, group in held)
    number = f"all {len(judged)}" if len(agree) == len(judged) else f"{len(agree)} of {len(judged)}"
    judged_ones, verb = f"{number} judged configurations", "train"
    if len(judged) == 1:
        judged_ones, verb = "the one judged configuration", "trains"
    judgement = f"{judged_ones} {verb}"
    steps = counted(min(len(group.record.steps) for group in agree), "step")
    if not is_assumed and not no_test:
        return [f"{judgement} the same model as one process: losses agree {extent} over {steps}"]
    if no_test:
        return [
            f"losses of {judged_ones} agree with one process {extent} over {steps}",
            "that alone does not show the same training",
            no_test,
        ]
    claim = f"as far as {steps} and an assumed limit show, {judgement} the same model as one process"
    return [f"{claim}: losses agree {extent}"]


def _limit(held: Sequence[tuple[Tolerance, CellRuns]]) -> tuple[str, str]:
    """The widest limit of a loss, and why final weights prove nothing where theirs admits untrained ones."""
    limits, group = max(held, key=lambda one: one[0].loss)
    assumed = f": {group.assumed}" if group.assumed else ""
    allowed = f" (limit {scientific(limits.loss)}{assumed})"
    compared = (one for one in held if one[1].parity != "exact" and one[1].figures[WEIGHTS] is not None)
    widest = max((limits.weights for limits, _ in compared), default=0.0)
    if widest < 1:  # a run that moves no weight is as far from the reference as that moved
        return allowed, ""
    return allowed, (
        f"final weights cannot tell: their limit is {times(widest)} x the distance that training moved them"
    )


def _divergence(off: Sequence[CellRuns]) -> list[str]:
    if not off:
        return []
    measures = (("loss", "max_loss_difference", scientific), ("gradient norm", NORM, percent))
    parts = [
        f"{name} by up to {show(max(found))}"
        for name, key, show in measures
        if (found := [value for group in off if (value := group.figures[key])])
    ]
    extent = f" ({', '.join(parts)})" if parts else ""
    cells = name_cells([group.cell for group in off], MOST_NAMES)
    return [f"{cells} {'diverges' if len(off) == 1 else 'diverge'}{extent}"]


def _unjudged(others: Sequence[CellRuns]) -> list[str]:
    cells = [group.cell for group in others if group.parity == "unjudged" and group.has_result]
    return [f"{name_cells(cells, MOST_NAMES)} could not be judged"] if cells else []


def _excluded(groups: Sequence[CellRuns]) -> list[str]:
    if not groups:
        return []
    cells = name_cells([group.cell for group in groups], MOST_NAMES)
    return [f"not comparable: {cells} ran a different job"]


Curves = Sequence[Sequence[ScalingPoint]]


def scaling_sentences(comparison: Comparison) -> list[str]:
    """At most one for strong and one for weak scaling."""
    found = (
        _scaling_sentence("strong scaling", "speed-up", strong_scaling(comparison), _speed_up, times),
        _scaling_sentence("weak scaling", "efficiency", weak_scaling(comparison), _weak_efficiency, percent),
    )
    return [text for text in found if text]


def _speed_up(point: ScalingPoint) -> str:
    return f"{_with_interval(point, times)}, {percent(point.strong_efficiency)} efficient"


def _weak_efficiency(point: ScalingPoint) -> str:
    return _with_interval(point, percent)


def _with_interval(point: ScalingPoint, show: Callable[[float], str]) -> str:
    return ratio_text(point.ratio, show) if point.ratio.extent else show(point.speed_up)


ORDERS = {"faster": "faster", "equal": f"as fast within {percent(EQUAL)}", "slower": "slower", "open": "open"}


def _scaling_sentence(
    kind: str, figure: str, curves: Curves, show: Callable[[ScalingPoint], str], plain: Callable[[float], str]
) -> str:
    """What is known at the most ranks; of more than two backends which are faster, which slower."""
    if not curves:
        return ""
    ends = [curve[-1] for curve in curves]
    size = max(point.group.world_size for point in ends)
    last = sorted((p for p in ends if p.group.world_size == size), key=lambda point: -point.speed_up)
    first = min(point.base.world_size for point in last)
    runs = counted(min(len(point.group.values(STEP)) for point in last), "run")
    is_tested, are_many = any(point.ratio.extent for point in last), len(last) > 2

    def of(order: str) -> str:
        points = [point for point in last if point.ratio.order == order]
        text = f"{ORDERS[order]} with {listed([point.curve for point in points], MOST_NAMES)}"
        if not points or order == "open" or not are_many:
            return text if points else ""
        middles = sorted((point.ratio.middle or point.speed_up for point in points), reverse=True)
        ends = dict.fromkeys([plain(middles[0]), plain(middles[-1])])
        return f"{text} ({figure} {' down to '.join(ends)})"

    if not is_tested:
        evidence = f"medians of {runs}, not tested against noise"
    elif all(point.ratio.order == "open" for point in last):
        evidence = f"{runs} show no difference from {ranks(first)}"
    else:
        evidence = f"a step on {ranks(size)} is {'; '.join(filter(None, map(of, ORDERS)))}"
    head = f"{kind}, {ranks(size)} against {first}"
    if is_tested and are_many:
        return sentence(f"{head}: {evidence}")
    words = [f"{point.curve} {show(point)}" for point in last]
    shown = f"most {words[0]}, least {words[-1]}" if are_many else ", ".join(words)
    return sentence(f"{head}, {figure}: {shown}", evidence)


FEW_TIMED_STEPS = 8
"""With fewer per run, speeds are rough."""
ON_STUB = "No speed to compare: no kernel runs on a CUDA stub, so its durations are left out."
NOTHING_TIMED = "No speed to compare: no configuration that trains the same model was timed."


def speed_sentence(scope: ComparisonScope) -> str:
    """The fastest and the slowest, as far as the rounds show them; or why there is no order."""
    timed = scope.timed
    if not timed:
        return ON_STUB if any(group.record.on_stub for group in scope.groups) else NOTHING_TIMED
    if scope.is_alone:
        text = "no two cells were measured under the same conditions, so speeds are not compared"
    else:
        text = _order(scope.order or rank_speeds(list(timed.values())), timed)
    return sentence(f"speed on {ranks(scope.size)}: {text}", *_caveats(list(timed.values())))


def beside_speed_sentence(scope: ComparisonScope) -> str:
    """What one process reaches, and for how long the order was measured; empty where nothing is compared."""
    if len(scope.timed) < 2:
        return ""
    one = f"all from {ONE_SESSION}" if scope.comparison.sessions == 1 else ""
    return sentence(*reference_words(scope), one)


def _order(order: Ranking, timed: dict[str, CellRuns]) -> str:
    first = timed[order.names[0]]
    if len(order.names) == 1:
        return f"only {first.label} was timed, at {number(first.median(SPEED))} tokens/s"
    if not order.is_judged:
        medians = [timed[name].median(SPEED) or 0.0 for name in order.names]
        extent = f"{number(min(medians))} to {number(max(medians))}"
        return f"medians are {extent} tokens/s; {unranked_words(order)} (--repeats adds some)"
    head = fastest_words(order)
    if head.startswith(first.label):
        head = f"{head}, at {number(first.median(SPEED))} tokens/s"
    elif head.endswith(order.base):
        head = f"{head} ({number(timed[order.base].median(SPEED))} tokens/s)"
    return "; ".join(filter(None, [head, slowest_words(order)]))


def reference_words(scope: ComparisonScope) -> list[str]:
    """Throughput of one process on the same job; empty where it was not timed."""
    timed = [
        group
        for group in scope.comparison.groups
        if group.is_reference
        and group.record.job_id == scope.place[0]
        and group.has_result
        and group.values(SPEED)
    ]
    if len(timed) != 1:
        return []
    threads = timed[0].record.world.threads_per_rank
    others = {group.record.world.threads_per_rank for group in scope.groups}
    cut = ""
    if others != {threads}:
        cut = f" with {counted(threads, 'thread')} (ranks use {listed(sorted(map(str, others)))})"
    speeds = timed[0].values(SPEED)
    extent = f" (runs: {number(min(speeds))} to {number(max(speeds))})" if len(speeds) > 1 else ""
    return [f"one process{cut} trains at {number(timed[0].median(SPEED))} tokens/s{extent}"]


def _caveats(groups: Sequence[CellRuns]) -> list[str]:
    fewest = min(len(steps) for group in groups for steps in group.timed_steps if steps)
    clauses = []
    if any(shares_cores(row.record) for group in groups for row in group.rows):
        clauses.append("ranks share processor cores, so these speeds say little about the strategies")
    if fewest < FEW_TIMED_STEPS:
        clauses.append(f"only {counted(fewest, 'timed step')} per run, so speeds are rough")
    return clauses


def _all_as_claimed(group: CellRuns) -> bool:
    """Whether it sends what its strategy does; of a script or another's backend, norms and flags aside."""
    records = [row.record for row in group.rows]
    return all(r.backend.claim is not None and volume_differences(r) == [] for r in records)


def _bytes_off(group: CellRuns) -> float | None:
    """Sent minus expected per step, of the repeat furthest off; None where no repeat has both."""
    pairs = [(row.figures[SENT], row.figures[EXPECTED_SENT]) for row in group.rows]
    found = [sent - expected for sent, expected in pairs if sent is not None and expected is not None]
    return max(found, key=abs, default=None)


PARTS: dict[ReportFocus, tuple[str, ...]] = {
    "all": ("costs", "speed"),
    "speed": ("speed",),
    "memory": ("costs",),
    "footprint": ("costs",),
    "parity": ("cause", "parity"),
    "scaling": ("scaling",),
}
"""What is answered, the answer first."""
MOST_WARNINGS = 6
MOST_WORDS = 40
"""Of a finding that opens the verdict."""
NOT_SCALED = "No backend was timed on several numbers of ranks, so there is no scaling to report."
NOTHING_RAN = "No configuration completed, so there is nothing to compare."


def verdict_section(comparison: Comparison, question: ReportFocus) -> Section:
    """What a reader should take away."""
    lines = [line for part in PARTS[question] for line in _part(comparison, part, question)]
    if comparison_scope(comparison) is None:
        lines.append(Line(NOTHING_RAN))
    elif question != "scaling":
        lines.append(Line(_one_of_several(comparison)))
    return Section("verdict", "Verdict", [Items([line for line in lines if line.text])])


def trust_lines(comparison: Comparison, question: ReportFocus) -> list[Line]:
    """Whether the figures can be trusted: same training, n of n checks, what completed, what was found."""
    lines = [] if question == "parity" else _part(comparison, "parity", question)
    lines += [
        Line(checks_sentence(comparison), details="results"),
        Line(endings_sentence(comparison), details="results"),
        Line(_warnings(comparison), details="findings"),
    ]
    return [line for line in lines if line.text]


def _part(comparison: Comparison, part: str, question: ReportFocus) -> list[Line]:
    where = comparison_scope(comparison)
    match part:
        case "parity":
            details = "levels" if comparison.noises else "results"
            return [Line(parity_sentence(comparison), details=details)]
        case "cause":
            return [Line(text, details="findings") for text in _cause(comparison)]
        case "costs" if where is not None:
            costs = Line(costs_sentence(where, with_traffic=question != "memory"), details="results")
            return [
                costs,
                Line(many_ranks_sentence(where) if question == "memory" else "", details="model_states"),
            ]
        case "speed" if where is not None:
            return [
                Line(text, details="results")
                for text in (speed_sentence(where), beside_speed_sentence(where))
            ]
        case "scaling":
            found = scaling_sentences(comparison)
            return [Line(text, details="scaling") for text in found] or [Line(NOT_SCALED)]
    return []


def _one_of_several(comparison: Comparison) -> str:
    """Which job the figures are of; empty where all runs are one job."""
    jobs, where = comparison.comparable.by_job, comparison_scope(comparison)
    if len(jobs) == 1 or where is None:
        return ""
    return f"The figures above are of job {where.place[0]}, one of {len(jobs)} jobs; the results show all."


def _cause(comparison: Comparison) -> list[str]:
    """The finding that explains why losses differ, the one of a run that diverged first, and its cause."""
    merged = statements(comparison.findings)
    diverged = {cell for found in merged if found.id == "diverged" for cell in found.cells}
    causes = [found for found in merged if found.role == "cause"]
    causes.sort(key=lambda cause: diverged.isdisjoint(cause.cells))
    if not causes:
        return ["No cause of a difference was found."] if diverged else []
    first = causes[0]
    return [
        f"{shortened(first.sentence.removesuffix('.'), MOST_WORDS)}.",
        f"Cause: {kinds()[first.id].cause}",
    ]


def _warnings(comparison: Comparison) -> str:
    """How many kinds of findings there are, by name."""
    found = list(dict.fromkeys(statement.id for statement in statements(comparison.findings)))
    if found:
        return f"{counted(len(found), 'warning')}: {listed(found, MOST_WARNINGS)}."
    groups = comparison.groups
    if any(group.parity != "unjudged" for group in groups if not group.is_reference):
        return "No warnings."
    return "No warnings, but no run could be compared with a reference."
