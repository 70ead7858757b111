"""The reference of the Python modules that other programs may import; mkdocstrings reads them."""

from __future__ import annotations

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
    return "\n\n".join(parts) + "\n"
