"""The verdict: three to six plain sentences for each job, computed from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.compare.cell import name_cells
from harness.compare.comparison import Comparison
from harness.compare.findings.finding import Finding
from harness.compare.findings.groups import statements
from harness.compare.repeats import Repeats, place_to_compare
from harness.compare.speed import shares_cores
from harness.compare.statistics import (
    LEVEL,
    median_interval,
    pairs_among,
    runs_to_judge,
    significance,
    value_range,
)
from harness.compare.wording import counted, listed, ranks
from harness.report.document import Block, Items, Paragraph, Section
from harness.report.formats import megabytes, number, percent, scientific

MOST_JOBS = 4
"""Beyond these the verdict would be longer than the tables it sums up."""
NOTHING_JUDGED = "No finding, and nothing that a reference could judge."
NO_FINDING = "No finding speaks against the comparison."
MOST_NAMES = 6
"""Of backends in a list."""
ALIKE = 0.99
"""Throughputs of this share of the fastest and above are not told apart in words."""
PLANTED = "planted-"
"""Backends that make a mistake, to show that it is found."""
FEW_TIMED_STEPS = 8
"""Fewer of a run say little of its speed."""


def verdict_section(comparison: Comparison) -> Section:
    """What a reader should take away."""
    jobs = comparison.comparable.by_job
    apart = _set_apart(comparison)
    if len(jobs) == 1:
        (own,) = jobs.values()
        first, *others = sentences(own, comparison.findings)
        return Section("verdict", "Verdict", [Items([_joined([first, *apart]), *others])])
    blocks: list[Block] = [
        Items(
            [
                (f"Job {job_id}", " ".join(sentences(own, None)))
                for job_id, own in list(jobs.items())[:MOST_JOBS]
            ]
        ),
        *(Paragraph(sentence) for sentence in [*apart, _findings(comparison.findings)]),
    ]
    if len(jobs) > MOST_JOBS:
        rest = f"The other {len(jobs) - MOST_JOBS} of {len(jobs)} jobs are in the tables below."
        blocks.append(Paragraph(rest))
    return Section("verdict", "Verdict", blocks)


def sentences(comparison: Comparison, found: Sequence[Finding] | None) -> list[str]:
    """Three to six sentences of one job: what fits, what is fastest, what it costs, whether losses agree.

    `found`: what was found, which is told last; None where that is told elsewhere.
    """
    groups = comparison.groups
    told = [_fits(groups)]
    place = place_to_compare(groups)
    if place is not None:
        size, timed = place[1], [g for g in groups if g.place == place and g.whole]
        same = [g for g in timed if g.parity != "diverged"] or timed
        whose = "" if len(same) == len(timed) else " of the cells that do not leave the reference"
        elsewhere = any(g.world_size == size and g.place != place and g.step_seconds for g in groups)
        speed = _not_alike(size) if elsewhere and len(same) == 1 else _speed(same, size, whose)
        if speed:
            speed = _joined([speed, *_one_process(groups, size)])
        told += [speed, _memory(same), _communication(same)]
    else:
        told.append("No cell that ended well has timed steps, so there is no speed to compare.")
    is_judged = any(g.parity != "unjudged" for g in groups if not g.is_reference)
    told += [_losses(groups), "" if found is None else _findings(found, is_judged=is_judged)]
    return [sentence for sentence in told if sentence]


def _fits(groups: Sequence[Repeats]) -> str:
    """How many cells ended how."""
    whole = [group for group in groups if group.whole]
    if len(groups) == len(whole) == 1:
        return f"The only cell, {groups[0].cell}, ended well."
    parts = [f"{len(whole) or 'none'} ended well"] if len(whole) < len(groups) else ["all ended well"]
    kinds = (
        ("oom", "ran out of memory", "ran out of memory"), ("failed", "failed", "failed"),
        ("timeout", "ran out of time", "ran out of time"),
        ("diverged", "lost its numbers", "lost their numbers"),
        ("unsupported", "is unsupported here", "are unsupported here"),
    )  # fmt: skip
    for status, of_one, of_several in kinds:
        names = [g.cell for g in groups if any(row.record.status == status for row in g.rows)]
        if names:
            words = of_one if len(names) == 1 else of_several
            parts.append(f"{len(names)} {words} ({name_cells(names, MOST_NAMES)})")
    if len(groups) == 1:
        return f"The only cell, {groups[0].cell}, did not end well: {groups[0].status}."
    planted = [g.label for g in groups if g.record.backend.name.startswith(PLANTED)]
    on_purpose = f" {listed(list(dict.fromkeys(planted)))}: wrong on purpose." if planted else ""
    return f"Of {len(groups)} cells of backend and number of ranks, {', '.join(parts)}.{on_purpose}"


def _speed(groups: Sequence[Repeats], size: int, whose: str) -> str:
    key = "tokens_per_second"
    ordered = sorted((g for g in groups if g.values(key)), key=lambda g: g.median(key) or 0.0, reverse=True)
    if not ordered:
        return ""
    best, others = ordered[0], ordered[1:]
    rate = best.median(key)
    name = f"{best.label}, which leaves the reference," if best.parity == "diverged" else best.label
    presets = {g.record.world.preset for g in ordered}
    preset = f" under the preset {presets.pop()}" if len(presets) == 1 else ""
    text = f"On {ranks(size)} {name} is fastest{whose}, with {number(rate)} tokens/s"
    text += _runs(best.values(key)) + preset
    if not others:
        return f"On {ranks(size)} only {best.label}{whose} was timed, with {number(rate)} tokens/s."
    pairs = pairs_among(len(ordered))
    text += f", {_slowest(best, others, pairs)}"
    judged = {g.label: significance(g.values(key), best.values(key), pairs) for g in others}
    close = [label for label, found in judged.items() if found == "within noise"]
    open_ = [label for label, found in judged.items() if found == "not judged"]
    if close:
        text += f"; these runs do not tell {listed(close)} apart from the fastest"
    if len(open_) == len(others):
        text += (
            f"; with fewer than {runs_to_judge(pairs)} runs of each, no difference is tested against noise"
        )
    elif open_:
        text += f"; {listed(open_)}: too few runs, not judged"
    elif not close:
        text += "; every difference to the fastest is beyond noise"
    if any(shares_cores(row.record) for group in ordered for row in group.rows):
        text += "; the ranks take turns on processor cores, so none of this is the strategies' own speed"
    fewest = min(len(steps) for group in ordered for steps in group.timed_steps)
    if fewest < FEW_TIMED_STEPS:
        text += f"; runs of {counted(fewest, 'timed step')} say little of speed"
    return text + "."


def _slowest(best: Repeats, others: Sequence[Repeats], pairs: int) -> str:
    """The last of `others`, in falling order, with those next to it that runs do not tell from it."""
    key = "tokens_per_second"
    last = others[-1]
    apart = [n for n, g in enumerate(others[:-1], 1) if not _alike(g, last, pairs) or _alike(g, best, pairs)]
    level = others[max(apart, default=0) :]
    shares = [(g.median(key) or 0) / (best.median(key) or 1) for g in level]
    if shares[-1] >= ALIKE:
        return f"no other below {percent(ALIKE)} of that"
    least, most = percent(shares[-1]), percent(shares[0])
    extent = least if least == most else f"{least} to {most}"
    return f"{listed([g.label for g in level])} slowest with {extent} of that"


def _alike(group: Repeats, other: Repeats, pairs: int) -> bool:
    key = "tokens_per_second"
    return significance(group.values(key), other.values(key), pairs) == "within noise"


def _one_process(groups: Sequence[Repeats], size: int) -> list[str]:
    """What the reference reaches alone; [] where that is already told."""
    timed = [g for g in groups if g.is_reference and g.whole and g.values("tokens_per_second")]
    if len(timed) != 1 or size == 1:
        return []
    threads = timed[0].record.world.threads_per_rank
    others = {g.record.world.threads_per_rank for g in groups if g.world_size == size}
    cut = ""
    if others != {threads}:
        cut = f" of {counted(threads, 'thread')}, beside ranks of {listed(sorted(map(str, others)))},"
    return [f"The reference on one process{cut} has {number(timed[0].median('tokens_per_second'))} tokens/s."]


def _not_alike(size: int) -> str:
    return f"On {ranks(size)} no two cells were measured alike, so no speeds are compared."


def _runs(values: Sequence[float]) -> str:
    """The interval of the median, or of too few runs for one their range."""
    interval, extent = median_interval(values), value_range(values)
    if interval is not None:
        return f" ({percent(LEVEL)} interval {number(interval.low)} to {number(interval.high)})"
    if extent is None or len(values) < 2:
        return ""
    return f" (range of {len(values)} runs {number(extent.low)} to {number(extent.high)})"


def _memory(groups: Sequence[Repeats]) -> str:
    peaks = {group.label: max(group.rank_peaks) for group in groups if group.rank_peaks}
    if not peaks:
        return "Peak memory was not measured."
    return f"On {ranks(groups[0].world_size)} the peak memory of a rank {_range(peaks, groups)}."


def _communication(groups: Sequence[Repeats]) -> str:
    sent = {g.label: value for g in groups if (value := g.median("sent_bytes_per_step")) is not None}
    if not sent:
        return "Communication was not measured."
    if not any(sent.values()):
        return "Nothing was communicated." if groups[0].world_size > 1 else ""
    off = []
    for group in groups:
        most = max(_bytes_off(group), key=abs, default=0.0)
        if abs(most) >= 1:
            off.append(f"{group.label} ({most:+,.0f} bytes)")
    unknown = [
        group.label
        for group in groups
        if group.label in sent and group.median("expected_sent_bytes_per_step") is None
    ]
    tail = ""
    if off:
        tail = f"; not what its implementation should send: {listed(off)}"
    elif len(unknown) < len(sent):
        of = f" in the {len(sent) - len(unknown)} of {len(sent)} cells with a closed form" if unknown else ""
        tail = f"; to the byte as expected{of}"
    if unknown:
        tail += f"; without a closed form: {listed(unknown)}"
    size, extent = groups[0].world_size, _range(sent, groups).removeprefix("is ")
    return f"On {ranks(size)} a rank sends per step, counted as on a ring, {extent}{tail}{_emulated(groups)}."


def _emulated(groups: Sequence[Repeats]) -> str:
    """What a transport sends that emulates collectives by others; empty where none does."""
    pairs = [(g.median("sent_bytes_per_step"), g.median("transport_sent_bytes_per_step"), g) for g in groups]
    more = [(real, g) for ring, real, g in pairs if ring is not None and real is not None and real != ring]
    if not more:
        return ""
    most, group = max(more, key=lambda pair: pair[0])
    transport = group.record.world.collectives
    return f"; {transport} emulates some collectives by others and sends up to {megabytes(most)} MB"


def _bytes_off(group: Repeats) -> list[float]:
    """Sent minus expected per step, of each repeat of which both are known."""
    pairs = [
        (document["sent_bytes_per_step"], document["expected_sent_bytes_per_step"])
        for document in group.documents
    ]
    return [sent - expected for sent, expected in pairs if sent is not None and expected is not None]


def _range(figures: Mapping[str, float], groups: Sequence[Repeats]) -> str:
    """'is from 1 MB (a, b) to 2 MB (c); the fastest, d, has 1.5 MB'."""
    least, most = min(figures.values()), max(figures.values())

    def who(value: float) -> str:
        return listed(
            [label for label, figure in figures.items() if megabytes(figure) == megabytes(value)], 4
        )

    if megabytes(least) == megabytes(most):
        return f"is {megabytes(most)} MB{' for each of them' if len(figures) > 1 else ''}"
    text = f"is from {megabytes(least)} MB ({who(least)}) to {megabytes(most)} MB ({who(most)})"
    timed = [group for group in groups if group.label in figures and group.values("tokens_per_second")]
    best = max(timed, key=lambda group: group.median("tokens_per_second") or 0.0, default=None)
    if best is not None:
        text += f"; {best.label}, the fastest, has {megabytes(figures[best.label])} MB"
    return text


def _losses(groups: Sequence[Repeats]) -> str:
    """Agreement of everything but the reference itself."""
    others = [g for g in groups if not g.is_reference]
    judged = [g for g in others if g.parity != "unjudged"]
    if not judged:
        return "No loss could be compared with a reference." if others else ""
    off = [g.cell for g in judged if g.parity == "diverged"]
    agree = len(judged) - len(off)
    largest = max((g.largest("max_loss_difference") or 0.0 for g in judged if g.cell not in off), default=0.0)
    text = (
        f"{agree} of {len(judged)} judged cells agree with the reference in loss, gradient norm and weights"
    )
    if agree:
        text += f", losses to {scientific(largest)} nats per token" if largest else ", losses bit for bit"
    if off:
        text += f"; {name_cells(off, MOST_NAMES)} {'leaves' if len(off) == 1 else 'leave'} it"
    unjudged = [g.cell for g in others if g.parity == "unjudged" and g.whole]
    if unjudged:
        text += f"; {name_cells(unjudged, MOST_NAMES)} could not be judged"
    return text + "."


def _set_apart(comparison: Comparison) -> list[str]:
    """Which runs were left out of everything above; nothing where none was."""
    groups = comparison.set_apart.groups
    if not groups:
        return []
    one = len(groups) == 1
    return [
        f"Left out: {name_cells([g.cell for g in groups], MOST_NAMES)} {'is' if one else 'are'} not the same "
        "job as the others and can be compared with none of them; "
        f"{'it stands' if one else 'they stand'} apart below, with the fields that differ."
    ]


def _findings(found: Sequence[Finding], *, is_judged: bool = True) -> str:
    """What was found, the cause by which a run left the reference first."""
    told = statements(found)
    names = list(dict.fromkeys(statement.id for statement in told))
    if not names:
        return NO_FINDING if is_judged else NOTHING_JUDGED
    count = "1 kind of finding" if len(names) == 1 else f"{len(names)} kinds of finding"
    text = f"{count} must be read before these figures are used: {listed(names)}."
    causes = [statement for statement in told if statement.role == "cause"]
    left = {cell for statement in told if statement.id == "diverged" for cell in statement.cells}
    # Of several causes that by which a run left the reference is told.
    causes.sort(key=lambda cause: left.isdisjoint(cause.cells))
    return _joined([text, *(f"The first cause: {cause.sentence}." for cause in causes[:1])])


def _joined(told: Sequence[str]) -> str:
    """Sentences as one."""
    first, *others = told
    return "; ".join([first.removesuffix("."), *(f"{text[0].lower()}{text[1:-1]}" for text in others)]) + "."
