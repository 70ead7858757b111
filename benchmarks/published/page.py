"""The page of predicted against published figures: tables, pictures, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tabulate import tabulate

from benchmarks.published.judge import FULLY_SPECIFIED, Judged, Summary, summarize
from harness.tell.document import Picture
from harness.tell.pictures.curves import SHAPES
from harness.tell.pictures.drawing import CURVES, GREY

INTRODUCTION = """\
# Predictions for published runs

Training runs that others measured on GPUs and published, and what `harness estimate` predicts for the same
settings. `{data}` holds the figures with repository, commit, path and line.
`python -m benchmarks.published {data} {folder}`
writes this page again.

- Predictions come from the closed forms, the traced activations and the time model of this commit, with
  published constants of the hardware (`harness/plan/constants.py`). Two of these, the shares of the
  matrix rate that training sustains on A100 and H100, were estimated from rows here. Rows of the same source
  and model are marked with * and count in the first line of the summary alone.
- Memory: the allocator's peak is predicted. A published 'reserved' figure lies 5 to 15 % above it; a
  'device' figure is compared with peak, context and NCCL's buffers together.
- Rows of tier A say everything that decides memory and speed, those of tier B lack one of the two or link a
  setting, and those of tier C leave something open, so that only order and ratios count.
- Runs by other code (nanotron, FMS, llm-foundry) are predicted as if our job ran the same
  settings. Their kernels and data loaders are their own.
"""
SOURCES_TITLE = "## By source"


def render(judged: Sequence[Judged], *, data: str, folder: str, pictures: Iterable[str]) -> str:
    """The page as Markdown."""
    covered = [j for j in judged if j.mapped.scenario is not None]
    parts = [
        INTRODUCTION.format(data=data, folder=folder),
        "## Summary\n",
        _summary(judged),
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


def _summary(judged: Sequence[Judged]) -> str:
    fresh = [j for j in judged if not j.used_for_constants]
    same_loss = [j for j in fresh if j.mapped.other_code is None]
    complete = [j for j in fresh if j.row.tier == FULLY_SPECIFIED]
    complete_same = [j for j in complete if j.mapped.other_code is None]
    lines: list[tuple[str, Sequence[Judged]]] = [
        ("all rows", judged),
        ("rows that no constant was estimated from", fresh),
        ("of these, loss computed as in our job", same_loss),
        ("fully specified (tier A), no constant from it", complete),
        ("of these, loss computed as in our job", complete_same),
    ]
    table = [[name, *_figures(summarize(rows))] for name, rows in lines]
    heads = [
        "rows", "with a prediction", "memory: rows", "mean error", "worst", "fits or not: right",
        "speed: rows", "median error", "order of strategies right, mean of sources",
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
        f"{_percent(summary.order_share)} of {summary.order_pairs}" if summary.order_pairs else "n/a",
    ]


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def _misses(covered: Sequence[Judged]) -> str:
    """Rows off by more than the aims, by name, with what is known of them."""
    lines = ["\nRows whose memory is off by over 10 % or whose speed by over 30 %:\n"]
    for one in covered:
        for what, error, most in (("memory", one.memory_error, 0.1), ("speed", one.speed_error, 0.3)):
            if error is not None and abs(error) > most:
                known = one.mapped.other_code if what == "memory" else KNOWN_SPEED.get(one.row.id)
                lines.append(f"- {one.row.id}, {what} {error:+.0%}" + (f": {known}" if known else ""))
    return "\n".join(lines) + "\n" + _wrong_fits(covered)


def _wrong_fits(covered: Sequence[Judged]) -> str:
    """Runs that fitted and were predicted not to, or the other way round."""
    wrong = [one for one in covered if one.fits is not None and one.row.fitted not in (None, one.fits)]
    if not wrong:
        return "\nEvery answer about what fits is right.\n"
    reasons = dict.fromkeys(one.mapped.other_code for one in wrong if one.mapped.other_code)
    named = ", ".join(one.row.id for one in wrong)
    over = [one.device_bytes / one.mapped.scenario.device.memory_bytes for one in wrong
            if one.device_bytes and one.mapped.scenario and one.mapped.scenario.device]  # fmt: skip
    lines = f"\nWrong about what fits, {min(over):.0%} to {max(over):.0%} of the device predicted: {named}."
    return lines + "".join(f" {reason[0].upper()}{reason[1:]}." for reason in reasons) + "\n"


KNOWN_SPEED = {
    "ultrascale-playbook-013": "half the speed of the same run with ZeRO-1, which sends as much; the source "
    "has configurations that it measured twice 1.7 apart",
    "llm-foundry-080": "30 % below the source's run of half the sequence length",
    "llm-foundry-120": "slower in the source than the run of twice its sequence length",
    "llm-foundry-121": "slower in the source than the run of four times its sequence length",
}
"""Row -> what the source itself shows that no model of the settings can tell."""


def _table(rows: Sequence[Judged]) -> str:
    heads = [
        "row", "model", "strategy", "GPUs", "tokens", "GiB predicted", "published", "error", "statistic",
        "fits", "ran", "tokens/s/GPU predicted", "published", "error",
    ]  # fmt: skip
    return tabulate([_line(one) for one in rows], heads, tablefmt="github", disable_numparse=True) + "\n"


def _line(one: Judged) -> list[str]:
    row = one.row
    return [
        row.id + ("*" if one.used_for_constants else ""),
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
    for one in judged:
        if one.mapped.not_covered is not None:
            reasons.setdefault(one.mapped.not_covered, []).append(one.row.id)
        elif one.memory_reason is not None:
            memory.setdefault(one.memory_reason, []).append(one.row.id)
    lines = [f"- {reason} ({len(ids)}): {', '.join(ids)}" for reason, ids in sorted(reasons.items())]
    lines += [
        f"- memory alone, {reason} ({len(ids)}): {', '.join(ids)}" for reason, ids in sorted(memory.items())
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
    shapes = [SHAPES[index % len(SHAPES)] for index in range(len(strategies))]
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
