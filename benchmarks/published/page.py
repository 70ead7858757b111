"""The page of predicted against published figures: tables, pictures, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from tabulate import tabulate

from benchmarks.published import aims, collectives
from benchmarks.published.aims import LARGE_GROUP
from benchmarks.published.judge import (
    FULLY_SPECIFIED,
    OPEN,
    Judged,
    Pair,
    Quantity,
    Summary,
    by_source,
    order,
    pairs,
    stated_errors,
    summarize,
)
from benchmarks.published.mapping import data_file, said
from harness.tell.document import Picture
from harness.tell.pictures.drawing import GREY

CURVES = ("#0A74B8", "#CC8400", "#00966C", "#B8569A", "#4FA6D8", "#C4511A", "#8A6D00")
CURVE_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")

INTRODUCTION = """\
# Predictions for published runs

Training runs that others measured on GPUs and published, and what `harness estimate` predicts for the same
settings. `benchmarks/published/*.csv` hold the figures with repository, commit, path and line.
`python -m benchmarks.published` writes this page again.

- Predictions come from the closed forms, the traced activations and the time model of this commit, with
  published constants of the hardware (`harness/plan/hardware.py`). Two of these, the shares of the
  matrix rate that training sustains on A100 and H100, are [the middle of sources](left-out.md) here, each
  counted once. Each row is predicted by the middle of all sources but its own; one column has what ships.
  A row says what it is in columns: the job's settings, and the program that ran (`framework`), whose code
  says what it does otherwise than our job (`benchmarks/published/programs.yaml`). No repository, path or
  name of a source decides anything, and no constant of memory was estimated from any row.
- Memory: the allocator's peak is predicted. A published 'reserved' or 'device' figure is compared with what
  the allocator keeps: of the loss (`benchmarks/published/losses.py`), and for each stream what it once needed
  (`benchmarks/published/reserved.py`), no more than the device has; 'device' with context and
  NCCL's buffers besides.
- Where a page does not say what is recomputed, memory and speed lie between all and none: such a row counts
  as asked, and in no error.
- Rows of tier A say everything that decides memory and speed, those of tier B lack one of the two or link a
  setting, and those of tier C leave something open, so that only order and ratios count.
"""
LEFT_OUT = """\
Each source as if it were not known. Nothing counts that was read in its program's code with these rows at
hand (`programs.yaml`): the row's own columns remain, which anybody could type as settings. Speeds are
predicted by what all other sources sustain, and the error that an answer states comes from all others, each
counted once (`harness/plan/trust.py`); a row that does not say which peak it has is judged, and says nothing
of others. 'Fitted' is the same error with the program's code, and by the shipped constants, which all sources
decided. Every figure of memory below this table is fitted so, every speed is by constants of other sources.
"""
AIMS = """\
Each row by constants of other sources. A group is ten runs or more of one GPU, strategy, length, or of
compiled or eager code. Causes of what is missed stand under "Missed".
"""
ORDER = """\
As `recommend` orders them: beside hybrid sharding, full sharding over nodes counts by the least that it may
reach. Two rows that are one strategy of ours (InternEvo's ZeRO-1 within groups, and its ZeRO-1) are no pair.
"""
COLLECTIVES = """\
Times of nccl-tests (`benchmarks/published/nccl_tests.csv`) on H100, H200, A100, B200 and GH200; networks are
InfiniBand, RoCE, EFA and Slingshot. One source measured 1 MiB over Slingshot at 2.6 times what another did.
"""
SOURCES_TITLE = "## By source"
UNKNOWN = "the cause is not known"


def render(
    judged: Sequence[Judged],
    ordered: Sequence[Judged] = (),
    *,
    pictures: Iterable[str],
) -> str:
    """The page as Markdown; `ordered`: runs in groups, of which the order of strategies is compared too."""
    covered = [j for j in judged if j.mapped.scenario is not None]
    parts = [
        INTRODUCTION,
        "## Sources left out\n",
        LEFT_OUT,
        _left_out([*judged, *ordered]),
        "## Summary\n",
        "Of the same predictions, every row counted.\n",
        _summary(judged),
        "## Aims\n",
        AIMS,
        _aims(judged, ordered),
        "## By group\n",
        "Error: predicted over published, less one; bias: its median. Groups of ten rows and more.\n",
        _groups(judged),
        "## Order of strategies\n",
        ORDER,
        _order([*judged, *ordered]),
        "## Collectives\n",
        COLLECTIVES,
        collectives.table(collectives.read_measured()),
        "## Missed\n",
        _misses(covered),
    ]
    parts.append(SOURCES_TITLE + "\n")
    for name in pictures:
        parts.append(f"![{name}](predicted.{name}.svg)\n")
    for source in dict.fromkeys(j.row.source for j in judged):
        rows = [j for j in covered if j.row.source == source]
        parts.append(f"### {source}\n")
        parts.append(_table(rows) if rows else "No row is covered; the reasons are below.\n")
        parts.append(_assumed(rows))
    parts += ["## Rows that are not covered\n", _not_covered(judged)]
    return "\n".join(parts)


def _left_out(judged: Sequence[Judged]) -> str:
    """By source, and how often the truth lies within what is stated as if the source were not known."""
    table: list[list[str]] = []
    whole, complete = ({name: list[Calibration]() for name in ("memory", "speed")} for _ in range(2))
    for source in dict.fromkeys(one.row.source for one in judged):
        rows = [one for one in judged if one.row.source == source]
        asked = sum(one.memory_bytes is not None or one.tokens_per_second is not None for one in rows)
        own, closed = ({"memory": Calibration(), "speed": Calibration()} for _ in range(2))
        for one in rows:
            unread = one.left_out
            found = (unread.memory_error, unread.speed_error)
            for name, error, width in zip(own, found, stated_errors(unread, source), strict=True):
                for known in (own[name], closed[name])[: 1 if one.row.tier.startswith(OPEN) else 2]:
                    if error is not None:
                        known.add(error, width)
        line = [source, f"{asked} of {len(rows)}"]
        fitted = [[one.memory_error for one in rows], [one.fitted_speed_error for one in rows]]
        for name, of, errors in zip(own, (mean, median), fitted, strict=True):
            whole[name].append(own[name])
            complete[name].append(closed[name])
            known, by_all = own[name], [abs(error) for error in errors if error is not None]
            line += [
                str(len(known.errors)), _percent(of(map(abs, known.errors)) if known.errors else None),
                _percent(of(by_all) if by_all else None),
                _percent(median(known.errors) if known.errors else None),
                _percent(median(known.widths) if known.widths else None),
                f"{known.within} of {len(known.widths)}",
            ]  # fmt: skip
        if asked:
            table.append(line)
    heads = ["from", "asked"]
    for name, middle in (("memory", "mean error"), ("speed", "median error")):
        heads += [f"{name}: rows", middle, "fitted", "bias", "stated", "within"]
    said = [f"- {name}: {_stated(known)}" for name, known in complete.items()]
    said += [f"- {name}, with tier C: {_stated(known)}" for name, known in whole.items()]
    return "\n".join([*said, "", tabulate(table, heads, tablefmt="github", disable_numparse=True)]) + "\n"


@dataclass
class Calibration:
    """Errors of runs, and of those of which an error was stated, how wide it was and how often it held."""

    errors: list[float] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)
    within: int = 0

    def add(self, error: float, width: float | None) -> None:
        self.errors.append(error)
        if width is not None:
            self.widths.append(width)
            self.within += abs(error) <= width


def _stated(sources: Sequence[Calibration]) -> str:
    """Of how many rows, and how often the truth lies within: a source counts once."""
    errors = sum(len(one.errors) for one in sources)
    widths = [width for one in sources for width in one.widths]
    if not widths:
        return "no error stated"
    within = mean(one.within / len(one.widths) for one in sources if one.widths)
    return (
        f"an error is stated for {len(widths) / errors:.0%} of {errors} rows (aim: half), the truth lies "
        f"within it in {within:.0%} of them (each source counted once; aim: 80%), its median is "
        f"{median(widths):.0%} (aim: at most 25%)"
    )


def _summary(judged: Sequence[Judged]) -> str:
    complete = [j for j in judged if j.row.tier == FULLY_SPECIFIED and not j.is_adapted]
    lines: list[tuple[str, Sequence[Judged]]] = [
        ("all rows", judged),
        ("of these full training, fully specified (tier A)", complete),
        ("of these LoRA and QLoRA", [j for j in judged if j.is_adapted]),
    ]
    table = [[name, *_figures(summarize(rows))] for name, rows in lines]
    heads = [
        "rows", "with a prediction", "memory: rows", "mean error", "worst", "fits or not: right",
        "speed: rows", "median error",
    ]  # fmt: skip
    return tabulate(table, heads, tablefmt="github") + "\n"


def _figures(summary: Summary) -> list[str]:
    return [
        f"{summary.asked[0]} of {summary.asked[1]}",
        str(len(summary.memory)),
        _percent(summary.memory_mean),
        _percent(summary.memory_worst),
        f"{_percent(summary.fits_share)} of {len(summary.fits)}" if summary.fits else "n/a",
        str(len(summary.speed)),
        _percent(summary.speed_median),
    ]


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


Grouping = Callable[[Judged], str]
GROUPINGS: dict[str, Grouping] = {
    "GPU": lambda one: one.row.gpu.partition("-")[0],
    "strategy": lambda one: one.mapped.scenario.strategy.family if one.mapped.scenario else "",
    "training": lambda one: "LoRA, QLoRA" if one.is_adapted else "full",
    "tokens of a sample": lambda one: _length(int(one.row.seq_len)),
    "code": lambda one: "compiled" if said("compile", one.row.compile) == "block" else "eager or not said",
    "memory is": lambda one: one.row.statistic,
    "source": lambda one: one.row.source,
}
NAMED = ("GPU", "strategy", "tokens of a sample", "code")
"""Groups whose bias has an aim."""


def _length(tokens: int) -> str:
    return "below 1,024" if tokens < 1024 else "1,024 to 4,096" if tokens <= 4096 else "above 4,096"


def _aims(judged: Sequence[Judged], ordered: Sequence[Judged]) -> str:
    found = {f"{kind} {name}": runs for (kind, name), runs in _grouped(judged).items() if kind in NAMED}
    errors = [one.error for one in collectives.read_measured()]
    return aims.table(list(aims.aims_of(judged, ordered, found, errors)))


def _grouped(judged: Sequence[Judged]) -> dict[tuple[str, str], list[Judged]]:
    """Runs with a scenario by what they are grouped by and the group's name."""
    covered = [j for j in judged if j.mapped.scenario is not None]
    return {
        (kind, name): [one for one in covered if of(one) == name]
        for kind, of in GROUPINGS.items()
        for name in sorted({of(one) for one in covered})
    }


def _groups(judged: Sequence[Judged]) -> str:
    table = []
    for (kind, name), found in _grouped(judged).items():
        memory = [j.memory_error for j in found if j.memory_error is not None]
        speed = [j.speed_error for j in found if j.speed_error is not None]
        if max(len(memory), len(speed)) >= LARGE_GROUP:
            table.append([kind, name, *_bias(memory), *_bias(speed)])
    heads = ["by", "group", "memory: rows", "bias", "mean", "speed: rows", "bias", "mean"]
    return tabulate(table, heads, tablefmt="github", disable_numparse=True) + "\n"


def _bias(errors: Sequence[float]) -> list[str]:
    if len(errors) < LARGE_GROUP:
        return [str(len(errors)), "", ""]
    sizes = [abs(error) for error in errors]
    return [str(len(errors)), f"{median(errors):+.0%}", f"{mean(sizes):.1%}"]


def _order(judged: Sequence[Judged]) -> str:
    """Pairs that differ by over 5 % in one source's figures, by the two strategies."""
    lines = []
    quantities: tuple[Quantity, ...] = ("speed", "memory")
    for quantity in quantities:
        found = order(judged, quantity)
        share, total = by_source(found), sum(count for _, count in found.values())
        lines.append(
            f"- {quantity}: {_percent(share)} right, mean of {len(found)} sources, {total} pairs: "
            + ", ".join(f"{source} {right} of {count}" for source, (right, count) in found.items())
        )
        lines += [f"  - {_wrong(pair, quantity)}" for pair in pairs(judged, quantity) if not pair.is_right]
    return "\n".join(lines) + "\n"


def _wrong(pair: Pair, quantity: Quantity) -> str:
    """A pair in the wrong order, with what is known of it."""
    two = f"{quantity} {pair.larger.strategy}/{pair.smaller.strategy}"
    cause = data_file("causes.yaml").get(pair.source, {}).get(two, UNKNOWN)
    return (
        f"{pair.larger.id} ({pair.larger.strategy}) to {pair.smaller.id} ({pair.smaller.strategy}): "
        f"{pair.published:.2f} published, {pair.predicted:.2f} predicted: {cause}"
    )


def _misses(covered: Sequence[Judged]) -> str:
    """Sources whose figures miss the aims, with what is known of it."""
    lines = []
    for source in dict.fromkeys(one.row.source for one in covered):
        rows = [one for one in covered if one.row.source == source]
        known = data_file("causes.yaml").get(source, {})
        for what, most in (("memory", 0.12), ("speed", 0.3)):
            errors = [(one.memory_error if what == "memory" else one.speed_error, one.row.id) for one in rows]
            off = [(error, name) for error, name in errors if error is not None and abs(error) > most]
            if off:
                low, high = min(off), max(off)
                span = f"{low[0]:+.0%} ({low[1]})" + (
                    f" to {high[0]:+.0%} ({high[1]})" if len(off) > 1 else ""
                )
                cause = known.get(what, UNKNOWN)
                lines.append(f"- {source}, {what}, {len(off)} of {len(rows)} rows: {span}: {cause}")
    return "\n".join(lines) + "\n" + _wrong_fits(covered)


def _wrong_fits(covered: Sequence[Judged]) -> str:
    """Runs that fitted and were predicted not to, or the other way round."""
    wrong = [one for one in covered if one.fits is not None and one.row.fitted not in (None, one.fits)]
    if not wrong:
        return "\nEvery answer about what fits is right.\n"
    named = ", ".join(one.row.id for one in wrong)
    over = [one.device_bytes / one.mapped.scenario.device.memory_bytes for one in wrong
            if one.device_bytes and one.mapped.scenario and one.mapped.scenario.device]  # fmt: skip
    lines = f"\nWrong about what fits, {min(over):.0%} to {max(over):.0%} of the device predicted: {named}."
    return lines + "\n"


def _table(rows: Sequence[Judged]) -> str:
    heads = [
        "row", "model", "strategy", "GPUs", "tokens", "GiB predicted", "published", "error", "statistic",
        "fits", "ran", "tokens/s/GPU predicted", "published", "error",
    ]  # fmt: skip
    return tabulate([_line(one) for one in rows], heads, tablefmt="github", disable_numparse=True) + "\n"


def _line(one: Judged) -> list[str]:
    row = one.row
    return [
        row.id,
        row.model,
        row.strategy,
        f"{row.gpus} {row.gpu.partition(' ')[0]}",
        f"{row.micro_batch} x {row.seq_len}",
        _value(one.memory_bytes, lambda count: f"{count / 2**30:.1f}"),
        row.memory_gib_per_gpu or "",
        _value(one.memory_error, lambda error: f"{error:+.1%}"),
        row.statistic if row.memory_gib_per_gpu else "",
        _value(one.fits, lambda fits: "yes" if fits else "no"),
        _value(row.fitted, lambda ran: "yes" if ran else "no"),
        _value(one.tokens_per_second, lambda rate: f"{rate:,.0f}"),
        _value(row.tokens_per_second, lambda rate: f"{rate:,.0f}"),
        _value(one.speed_error, lambda error: f"{error:+.0%}"),
    ]


def _assumed(rows: Sequence[Judged]) -> str:
    """What was assumed, by rows."""
    assumed: dict[str, int] = {}
    for one in rows:
        for text in one.mapped.assumptions:
            assumed[text] = assumed.get(text, 0) + 1
    return "".join(f"- assumed for {count} rows: {text}\n" for text, count in assumed.items())


def _value(value: Any, text: Callable[[Any], str]) -> str:
    return "" if value is None else text(value)


def _not_covered(judged: Sequence[Judged]) -> str:
    """Reasons with the rows by name."""
    reasons: dict[str, list[str]] = {}
    memory: dict[str, list[str]] = {}
    speed: dict[str, list[str]] = {}
    for one in judged:
        if one.mapped.speed_not_covered is not None:
            speed.setdefault(one.mapped.speed_not_covered, []).append(one.row.id)
        if one.mapped.not_covered is not None:
            reasons.setdefault(one.mapped.not_covered, []).append(one.row.id)
        elif one.memory_reason is not None:
            memory.setdefault(one.memory_reason, []).append(one.row.id)
    lines = [f"- {reason} ({len(ids)}): {', '.join(ids)}" for reason, ids in sorted(reasons.items())]
    lines += [
        f"- no {what}, {reason} ({len(ids)}): {', '.join(ids)}"
        for what, found in (("memory", memory), ("speed", speed))
        for reason, ids in sorted(found.items())
    ]
    return "\n".join(lines) + "\n"


def scatter(judged: Sequence[Judged], source: str) -> Picture | None:
    """Predicted over published, memory and throughput of one source; None: nothing to compare."""
    rows = [j for j in judged if j.row.source == source]
    memory = [(j.row, j.row.memory_bytes, j.memory_bytes) for j in rows if j.memory_error is not None]
    speed = [(j.row, j.row.tokens_per_second, j.tokens_per_second) for j in rows if j.speed_error is not None]
    panels = [
        (title, unit, scale, points)
        for title, unit, scale, points in (
            ("memory", "GiB", 2**30, memory), ("throughput", "tokens/s/GPU", 1, speed),
        )
        if points
    ]  # fmt: skip
    if not panels:
        return None

    caption = f"Predicted over published figures of {source}; dotted: 15 % off"
    counts = ", ".join(f"{len(points)} of {title}" for title, _, _, points in panels)
    return Picture(
        key=source,
        caption=caption,
        alt=f"{caption}: {counts}.",
        chart=lambda: {"hconcat": [_scatter_panel(source, *panel) for panel in panels], "spacing": 40},
    )


def _scatter_panel(source: str, title: str, unit: str, scale: float, points: Any) -> dict[str, Any]:
    values = [
        {"strategy": row.strategy, "published": a / scale, "predicted": b / scale}
        for row, a, b in points
        if a and b
    ]
    ends = [value for row in values for value in (row["published"], row["predicted"])]
    low, high = min(ends) / 1.3, max(ends) * 1.3

    def channel(field: str, name: str) -> dict[str, Any]:
        scale = {"type": "log", "domain": [low, high], "nice": False}
        axis = {"tickCount": 5, "format": ",~f"}
        return {"field": field, "type": "quantitative", "title": name, "scale": scale, "axis": axis}

    x, y = channel("published", f"published, {unit}"), channel("predicted", f"predicted, {unit}")
    lines = [
        {
            "data": {"values": [{"published": at, "predicted": share * at} for at in (low, high)]},
            "mark": {"type": "line", "clip": True, "color": GREY, "strokeWidth": width, "strokeDash": dash},
            "encoding": {"x": x, "y": y},
        }
        for share, width, dash in ((1.0, 1.0, [1, 0]), (0.85, 0.8, [2, 3]), (1.15, 0.8, [2, 3]))
    ]
    strategies = list(dict.fromkeys(row["strategy"] for row in values))
    shapes = [CURVE_SHAPES[index % len(CURVE_SHAPES)] for index in range(len(strategies))]
    colours = [CURVES[index % len(CURVES)] for index in range(len(strategies))]
    named = {"field": "strategy", "type": "nominal", "title": None}
    dots = {
        "data": {"values": values},
        "mark": {"type": "point", "filled": True, "size": 40, "opacity": 0.9},
        "encoding": {
            "x": x,
            "y": y,
            "color": {**named, "scale": {"domain": strategies, "range": colours}},
            "shape": {**named, "scale": {"domain": strategies, "range": shapes}},
        },
    }
    return {"title": f"{source}: {title}", "width": 280, "height": 280, "layer": [*lines, dots]}
