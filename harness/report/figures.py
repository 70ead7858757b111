"""How the metrics are written for people: columns of tables and labels of axes."""

from __future__ import annotations

from collections.abc import Callable

from harness.judge.metrics import BY_KEY, Metric, Unit
from harness.report.document import Column
from harness.report.formats import megabytes, milliseconds, number, scientific, short

_UNITS: dict[Unit, tuple[str, Callable[[float | None], str]]] = {
    "tokens/s": ("tokens/s", number),
    "samples/s": ("samples/s", number),
    "seconds": ("ms", milliseconds),
    "bytes": ("MB", megabytes),
    "nats/token": ("nats per token", scientific),
    "relative": ("relative", scientific),
    "step": ("step", short),
}
"""The unit that people read, and the text of a value in it."""


def figure_text(metric: Metric, value: float | None) -> str:
    """A value of the metric without its unit; None as n/a."""
    return _UNITS[metric.unit][1](value)


def figure_column(
    key: str, title: str | None = None, *, optional: bool = False, only_values: bool = False
) -> Column:
    """The column of a metric, under the metric's own title where none is given."""
    metric = BY_KEY[key]
    show = _UNITS[metric.unit][1]
    return Column(key, title or metric.title, show, optional=optional, only_values=only_values)


def axis_label(key: str) -> str:
    """'throughput (tokens/s)': the name of a metric and the unit in which it is drawn."""
    metric = BY_KEY[key]
    return f"{metric.name} ({_UNITS[metric.unit][0]})"


BASE = "ddp"
"""Ratios are those to this backend on the same ranks."""
