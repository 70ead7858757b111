"""Columns, texts and orders by speed of the tables; the main table: one line per backend and world size."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from harness.judge.agreement.parity import Parity
from harness.judge.comparison import Comparison
from harness.judge.facts import BY_KEY, SENT, SPEED, STEP, Metric, Unit, metrics_in
from harness.judge.quantities import counts_samples, unjudged_amounts
from harness.judge.rows import BASE, CellRuns, JudgedRun, reason
from harness.judge.run_conditions import is_deterministic
from harness.judge.statistics import (
    EQUAL,
    LEVEL,
    NO_FIGURES,
    Ranking,
    Ratio,
    interval_runs,
    median_interval,
    percentile_95,
    value_range,
)
from harness.judge.wording import both, counted
from harness.record import Record
from harness.tell import formats
from harness.tell.document import Block, Column, Paragraph, Section, Shown, Table, plain
from harness.tell.formats import (
    NOT_AVAILABLE,
    megabytes,
    milliseconds,
    number,
    one_line,
    percent,
    scientific,
    short,
    times,
)

ONE_SESSION = "one session: day-to-day variation is not included"
OPEN = "~"
RATIO = f"ratio to the base in the same round, {percent(LEVEL)} interval"
BOLD = f"bold: faster, slower, or equal within {percent(EQUAL)}"
UNDECIDED = f"{OPEN}: undecided"
LEGEND = f"{RATIO}; {BOLD}; {UNDECIDED}"


def ratio_column(orders: Iterable[Ranking]) -> Column:
    """'speed / ddp', or by the first cell that is listed where that was the base."""
    return Column("speed_ratio", f"speed / {bases_words(orders)}", number)


def bases_words(orders: Iterable[Ranking]) -> str:
    """'ddp'; 'the first' where places have several bases."""
    bases = {order.base.partition(" (")[0] for order in orders if len(order.names) > 1} or {BASE}
    return one_line(bases.pop()) if len(bases) == 1 else "the first"


def ratio_cell(order: Ranking | None, label: str) -> Shown | None:
    """'0.38 (0.33 to 0.44)', marked where it is open; None where the cell is compared with none."""
    if order is None or len(order.names) < 2 or label not in order.names:
        return None
    if label == order.base:
        return Shown(1.0, "1")
    return shown_ratio(order.ratio(label, order.base))


def shown_ratio(ratio: Ratio, show: Callable[[float], str] = times) -> Shown | None:
    """A ratio with its interval, marked where it is open; None of cells that share no round."""
    if ratio.middle is None:
        return None
    mark = OPEN if ratio.order == "open" else ""
    return Shown(ratio.middle, f"{mark}{ratio_text(ratio, show)}", is_strong=not mark)


def ratio_text(ratio: Ratio, show: Callable[[float], str] = times) -> str:
    """'0.38 (0.33 to 0.44)'; n/a without a round in common.

    Where an order is shown, an interval that is rounded to 1 does not read as if it held it: '0.33 to <1.00'.
    """
    if ratio.middle is None:
        return NOT_AVAILABLE
    if ratio.extent is None:
        return show(ratio.middle)
    low, high = show(ratio.extent.low), show(ratio.extent.high)
    low = f">{low}" if ratio.order == "faster" and low == show(1.0) else low
    high = f"<{high}" if ratio.order == "slower" and high == show(1.0) else high
    return f"{show(ratio.middle)} ({low} to {high})"


def unranked_words(order: Ranking) -> str:
    """Why cells are in no order: 'not ranked: 3 rounds; give --repeats 6'."""
    return f"not ranked: {counted(order.rounds, 'round')}; give --repeats {interval_runs()}"


def sessions_words(sessions: int) -> str:
    """What the sessions of a comparison mean for its intervals."""
    if sessions < 2:
        return ONE_SESSION
    return f"{sessions} sessions: cells are compared within each, and an order must hold in all of them"


_TEXTS: dict[Unit, Callable[[float | None], str]] = {
    "tokens/s": number,
    "samples/s": number,
    "seconds": milliseconds,
    "bytes": megabytes,
    "loss": lambda value: NOT_AVAILABLE if value is None else f"{value:.7g}",
    "nats/token": scientific,
    "relative": scientific,
    "step": short,
}
"""The text of a value in the unit that people read."""


def figure_text(metric: Metric, value: float | None) -> str:
    """A value of the metric without its unit; None as n/a."""
    return _TEXTS[metric.unit](value)


def figure_column(
    key: str, title: str | None = None, *, optional: bool = False, only_values: bool = False
) -> Column:
    """The column of a metric, under the metric's own title where none is given."""
    metric = BY_KEY[key]
    show = _TEXTS[metric.unit]
    return Column(key, title or metric.title, show, optional=optional, only_values=only_values)


_FILE = tomllib.loads(files(__package__).joinpath("tables.toml").read_text(encoding="utf-8"))
LABELS = (Column("backend", "backend", align="left"), Column("world_size", "ranks"))


def table_columns(name: str) -> tuple[Column, ...]:
    """Columns of a table of `tables.toml`; the name of another table stands for its columns."""
    found: list[Column] = []
    for row in _FILE["columns"][name]:
        if isinstance(row, str):
            found += LABELS if row == "labels" else table_columns(row)
            continue
        row = dict(row)
        if "metric" in row:
            found.append(figure_column(row.pop("metric"), **row))
            continue
        key, show = row.pop("key"), row.pop("show", None)
        shown = plain if show is None else getattr(formats, show)
        found.append(Column(key, row.pop("title", key), shown, **row))
    return tuple(found)


def table(
    key: str, rows: Sequence[Sequence[Any]], columns: str | Sequence[Column] = "", *more: Column,
    caption: str = "",
) -> Table | None:  # fmt: skip
    """A table of these rows; None without any. `columns`: a name in `tables.toml`, else that of the table."""
    if not rows:
        return None
    shown = table_columns(columns or key) if isinstance(columns, str) else columns
    return Table(key=key, columns=[*shown, *more], rows=rows, caption=caption)


def blocks_of(*given: Block | str | None) -> list[Block]:
    """The blocks, texts as paragraphs; what is None or empty is left out."""
    return [Paragraph(one) if isinstance(one, str) else one for one in given if one]


def section(key: str, title: str, *given: Block | str | None) -> Section | None:
    """A section of what is given; None where that is only text."""
    has_content = any(one and not isinstance(one, str) for one in given)
    return Section(key, title, blocks_of(*given)) if has_content else None


def with_job(columns: Sequence[Column], several: bool) -> Sequence[Column]:
    """The columns after one of the job, where there are several jobs."""
    return (Column("job_id", "job", align="left"), *columns) if several else columns


def row_of(columns: Sequence[Column], one: Any) -> list[Any]:
    """What a dictionary or an object has under the columns' keys."""
    return [one[c.key] if isinstance(one, Mapping) else getattr(one, c.key) for c in columns]


def prose(name: str, /, **given: object) -> str:
    """A text of `tables.toml`, with what is given for its names."""
    return Template(_FILE["texts"][name]).substitute(given)


def phrase(name: str, /, **given: object) -> str:
    """A few words of the first page, likewise."""
    return Template(_FILE["phrases"][name]).substitute(given)


def title_text(name: str, /, **given: object) -> str:
    """What a report asks, likewise."""
    return Template(_FILE["titles"][name]).substitute(given)


PROCESS_MEMORY: Mapping[str, Mapping[str, Any]] = _FILE["process_memory"]
"""Title, meaning and fields of each figure of memory beyond live tensors."""
PARITY_WORDS: Mapping[str, Mapping[str, str]] = _FILE["parity"]
"""What each level means: `short` for a terminal, `means` for a report."""
PARITY_ALSO: Mapping[str, str] = _FILE["parity_also"]
"""By option of the reference's repetition."""
ANSWERS: Mapping[str, Mapping[str, str]] = _FILE["answers"]
"""Question and section of the evidence of each row of the first page."""


RESULTS = metrics_in("results", "data")
SPEEDS = {*NO_FIGURES, *(metric.key for metric in RESULTS if metric.is_timed)}
"""Columns of the results that are figures of speed."""
AMOUNTS = ("peak_bytes", SENT)
"""Columns of the results that closed forms judge."""
NOT_COMPARABLE = "not comparable: these runs are not the same job, so the tables leave them out"
WITHOUT_FORM = "†"
AT_ONCE = "*"


def legend(shown: Sequence[Table], groups: Iterable[CellRuns], *, terminal: bool = False) -> list[str]:
    """What ratios, marks and parity levels in tables of these cells mean, only of what they have."""
    people = [one.for_people() for one in shown]
    texts = [text for one in people for row in one.texts() for text in row]
    parities = {text.removesuffix(AT_ONCE) for text in texts}
    columns = [column for one in people for column in zip(one.columns, *one.values(), strict=True)]
    titles = {column.key: column.title for column, *of in columns if any(value is not None for value in of)}
    is_open = any(text.startswith(OPEN) for text in texts)
    speed = "; ".join([RATIO, *([] if terminal else [BOLD]), *([UNDECIDED] if is_open else [])])
    samples = sorted({group.at_once for group in groups if group.at_once})
    notes = {
        phrase("legend_base"): any(key.endswith("_of_ddp") for key in titles),
        phrase("legend_unknown"): NOT_AVAILABLE in texts,
        phrase("legend_speed", legend=speed): "speed_ratio" in titles,
        phrase("legend_speed_up", title=titles.get("speed_up")): "speed_up" in titles,
        phrase("legend_rounds"): {"speed_ratio", SPEED} <= titles.keys(),
        **{
            phrase("legend_parity", level=level, short=of["short"]): level in parities
            and (terminal or level != "unjudged")
            for level, of in PARITY_WORDS.items()
        },
        phrase("legend_no_form", mark=WITHOUT_FORM): any(WITHOUT_FORM in text for text in texts),
        phrase("legend_at_once", mark=AT_ONCE, samples=" or ".join(map(str, samples))): (
            any(text.endswith(AT_ONCE) for text in texts)
        ),
    }
    return [note for note, applies in notes.items() if applies]


def not_comparable_table(comparison: Comparison) -> Table | None:
    """Every field in which a run is not the same job, with both values; None where all are."""
    body = []
    for row in comparison.not_comparable.rows:
        other = row.same_job_as
        for difference in row.judgement.not_same_job:
            given, value = both(difference.given, difference.reference)
            body.append(
                [
                    *row.cell,
                    row.record.repeat,
                    difference.field,
                    Shown(difference.given, given),
                    Shown(difference.reference, value),
                    other.label if other is not None else None,
                ]
            )
    return table("not_comparable", body)


def results_table(comparison: Comparison, *, speeds: bool = True) -> Table:
    """One line per job, backend and world size; without `speeds` no figure that a busy machine changes."""
    groups = comparison.groups
    jobs = list(dict.fromkeys(group.record.job_id for group in groups))
    columns = with_job(_columns(comparison), len(jobs) > 1)
    body = []
    for group in groups:
        line = _line(group, comparison.rankings.get(group.place))
        body.append(line if len(jobs) < 2 else [group.record.job_id, *line])
    kept = [n for n, column in enumerate(columns) if speeds or column.key not in SPEEDS]
    return Table(
        key="results",
        columns=[columns[place] for place in kept],
        rows=[[line[place] for place in kept] for line in body],
    )


def spread_table(comparison: Comparison) -> Table | None:
    """How far runs and steps spread; None where nothing was timed."""
    body = []
    for group in comparison.groups:
        seconds = group.step_seconds
        if not seconds:
            continue
        rates = group.values(SPEED)
        interval, extent = median_interval(rates), value_range(rates)
        body.append(
            [
                *group.cell,
                len(rates),
                group.figures["samples_per_second"],
                group.figures[SPEED],
                extent.low if extent else None,
                extent.high if extent else None,
                interval.low if interval else None,
                interval.high if interval else None,
                group.spread.sessions,
                group.spread.within,
                group.spread.between,
                len(seconds),
                group.figures[STEP],
                percentile_95(seconds),
                min(seconds),
                max(seconds),
            ]
        )
    return table("spread", body)


def cell_line(row: JudgedRun) -> str:
    """One finished cell in one line, for a person who waits."""
    record = row.record
    head = f"{row.cell}: {record.status}"
    why = reason(record)
    if why:
        return f"{head}: {why}"
    values = row.figures
    loss = record.last_loss
    parts = [head, f"loss {number(loss)}"]
    if values[STEP] is None:
        parts.append("not timed")
    else:
        parts.append(rate_text(record, values[SPEED]))
        parts.append(f"step {milliseconds(values[STEP])} ms")
    if values["peak_bytes"] is not None:
        parts.append(f"peak {megabytes(values['peak_bytes'])} MB")
    if not is_deterministic(record):
        parts.append("kernels not deterministic")
    return ", ".join(parts)


def rate_text(record: Record, rate: float | None) -> str:
    """'1,724 tokens/s'; samples/s where the data is no text."""
    return f"{number(rate)} {'samples' if counts_samples(record) else 'tokens'}/s"


def speed_title(comparison: Comparison) -> str:
    ran = [row.record for row in comparison.rows if row.record.steps]
    return "samples/s" if ran and all(map(counts_samples, ran)) else "tokens/s"


def _columns(comparison: Comparison) -> list[Column]:
    """Columns of the results: the metrics of the main table, then those for programs only."""
    columns = [*LABELS, Column("status", "status", align="left")]
    for metric in RESULTS:
        title = speed_title(comparison) if metric.key == SPEED else metric.title
        title += " (spread)" if _has_spread(metric) else ""
        columns.append(figure_column(metric.key, title, only_values="results" not in metric.shown))
        if metric.key == SPEED:
            base, _, *more = (Column(key, key, only_values=True) for key in NO_FIGURES)
            columns += [base, ratio_column(comparison.rankings.values()), *more]
    return [*columns, Column("parity", "parity", align="left")]


def _line(group: CellRuns, order: Ranking | None) -> list[Any]:
    line = [*group.cell, group.status]
    is_unjudged = bool(unjudged_amounts(group.record))
    for metric in RESULTS:
        value, spread = group.figures[metric.key], ""
        if _has_spread(metric):  # the largest value, and how far the smallest lies below it
            values = group.pool(metric)
            value = max(values, default=None)
            spread = f" ({figure_text(metric, value - min(values))})" if value is not None else ""
        mark = WITHOUT_FORM if is_unjudged and metric.key in AMOUNTS else ""
        is_plain = value is None or not (spread or mark)
        line.append(value if is_plain else Shown(value, f"{figure_text(metric, value)}{mark}{spread}"))
        if metric.key == SPEED:
            figures = dict(NO_FIGURES) if order is None else order.figures(group.label)
            line += (figures | {"speed_ratio": ratio_cell(order, group.label)}).values()
    return [*line, parity_cell(group)]


def parity_cell(group: CellRuns) -> Parity | Shown:
    """Marked where another reference than the whole batch judged it."""
    marked = group.at_once and group.parity != "unjudged"
    return Shown(group.parity, f"{group.parity}{AT_ONCE}") if marked else group.parity


def _has_spread(metric: Metric) -> bool:
    """Whether a cell shows the largest of many values, which says nothing about the others."""
    return metric.pool is not None and metric.aggregate is max
