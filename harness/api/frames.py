"""Tables for pandas, which comes with `datasets`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, get_args

from harness.backends.explain import choices
from harness.errors import HarnessError
from harness.judge.comparison import Comparison
from harness.judge.metrics import METRICS
from harness.judge.rows import Row

if TYPE_CHECKING:
    from pandas import DataFrame

Kind = Literal["runs", "steps", "evaluations", "findings"]
FINDING = ("id", "backends", "message", "values")


def frame(comparison: Comparison, kind: Kind) -> DataFrame:
    """One table of a comparison. Raises HarnessError for a kind that does not exist."""
    from pandas import DataFrame

    match kind:
        case "runs":
            lines = [dict(row.figures) for row in comparison.rows]
            lines = [
                line | {"same_job": row.is_comparable}
                for line, row in zip(lines, comparison.rows, strict=True)
            ]
            table = DataFrame(lines)
            return table.astype({metric.key: "float64" for metric in METRICS if metric.key in table})
        case "steps":
            return DataFrame(
                [_run(row) | asdict(step) for row in comparison.rows for step in row.record.steps]
            )
        case "evaluations":
            return DataFrame(
                [_run(row) | done.model_dump() for row in comparison.rows for done in row.record.eval]
            )
        case "findings":
            return DataFrame([found.as_json() for found in comparison.findings], columns=list(FINDING))
    raise HarnessError(f"table '{kind}' is unknown; available: {choices(str(kind), get_args(Kind))}")


def _run(row: Row) -> dict[str, Any]:
    """What tells the runs of a comparison apart."""
    record = row.record
    return {
        "run_id": record.run_id,
        "backend": row.label,
        "world_size": record.world.world_size,
        "repeat": record.repeat,
    }
