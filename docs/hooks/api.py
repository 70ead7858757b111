"""The reference of the Python modules that other programs may import; mkdocstrings reads them."""

from __future__ import annotations

from docs.hooks.records import meaning, record_fields
from docs.hooks.tables import code, table
from harness.job.reference import unit
from harness.judge.facts import METRICS, Fact
from harness.record import EvaluationPart, StepPart

TITLE = "Python API"
TOPICS = {
    "What `import harness` offers": ("harness.api", "harness.api"),
    "Backends": ("harness.backends.base", "harness.backends.registry", "harness.backends.strategy"),
    "Settings and records": ("harness.job.config", "harness.record.store", "harness.record.store"),
    "Comparisons": (
        "harness.judge.comparison",
        "harness.judge.rows",
        "harness.judge.facts",
        "harness.judge.findings.finding",
    ),
    "Reports": ("harness.tell.report", "harness.tell.verify"),
    "Closed forms": ("harness.forms.workload", "harness.forms.terms", "harness.forms.families"),
    "Predictions": (
        "harness.plan.models",
        "harness.plan.question",
        "harness.plan.answer",
        "harness.plan.prediction",
        "harness.plan.step_time",
    ),
}
"""Modules by topic."""
HEAD = """\
# Python API

Generated from the docstrings. The command line and [`import harness`](../commands.md#python) stay; other
modules are what they are made of, and what a backend or an analysis of your own imports. To compare records:

```python
from pathlib import Path

from harness.judge.comparison import Comparison
from harness.record.store import read_runs

runs, problems = read_runs([Path("reports/default/runs.tar.xz")])
comparison = Comparison(record for _, record in runs)
for row in comparison.rows:
    print(row.label, row.record.world.world_size, row.figures["peak_bytes"])
```
"""


def api_page() -> str:
    """The page in Markdown: a directive of mkdocstrings for each module."""
    parts = [HEAD]
    for topic, modules in TOPICS.items():
        parts += [f"## {topic}", *(f"### `{module}`\n\n::: {module}" for module in modules)]
    parts += [
        "## Columns of frames",
        *(f'### `to_frame("{kind}")`\n\n{text}' for kind, text in columns().items()),
    ]
    return "\n\n".join(parts) + "\n"


OF_A_RUN = {
    "backend": "label of the cell",
    "ranks": "number of ranks",
    "repeat": "number of the repeat, from 0",
    "job_id": "digest of the job: only runs of one job are compared",
    "status": "how the run ended",
    "reason": "why it has no whole result",
    "run_id": "name of its folder",
    "parity": "level of its training, see the glossary",
    "parity_reason": "why the level is this one",
    "not_judged": "amounts without a closed form",
    "same_job": "whether the run may be compared",
}
"""Columns of a run beside its figures."""
OF_OTHERS = {
    "steps": StepPart,
    "evaluations": EvaluationPart,
    "facts": Fact,
}
OF_FINDINGS = {
    "id": "`harness explain ID` has cause and fix",
    "backends": "labels of the cells concerned",
    "message": "the finding in a sentence",
    "values": "the figures behind it",
}


def columns() -> dict[str, str]:
    """A table of columns for each kind of frame."""
    figures = [[code(one.key), one.unit, one.meaning] for one in METRICS]
    found = {"runs": [*([code(name), "", meant] for name, meant in OF_A_RUN.items()), *figures]}
    first = [[code(name), "", OF_A_RUN[name]] for name in ("run_id", "backend", "ranks", "repeat")]
    for kind, model in OF_OTHERS.items():
        fields = record_fields(model)
        found[kind] = [*first, *([code(n), unit(n), meaning(model, n, of)] for n, of, _ in fields)]
    found["findings"] = [[code(name), "", meant] for name, meant in OF_FINDINGS.items()]
    return {kind: table(["column", "unit", "meaning"], rows) for kind, rows in found.items()}
