"""Writes the page: one file that needs nothing else."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from harness.errors import HarnessError
from harness.files import write_atomically
from harness.plan.adapters import require_all_trained
from harness.plan.estimate.picture import sizes_to_draw
from harness.plan.estimate.question import Question
from harness.plan.page.coefficients import page_data

HEADERS = (
    "peak", "at", "needed", "left", "fits", "sent", "to nodes", "computing", "communication", "exposed",
    "step", "tokens/s", "MFU %", "h", "kWh",
)  # fmt: skip


def check_page(path: Path) -> None:
    """Raise HarnessError for a file that is no HTML page."""
    if path.suffix != ".html":
        raise HarnessError(f"--report was given '{path}'; give a name that ends with .html")


def write_page(asked: Question, path: Path) -> None:
    """Write the page for a question; of a single number of ranks, over powers of two up to it."""
    check_page(path)
    require_all_trained(asked.experiment.job(), "what the page draws")
    text = page(page_data(sizes_to_draw(asked)))
    try:
        write_atomically(path, text)
    except OSError as error:
        raise HarnessError(f"--report {path} cannot be written: {error.strerror}") from error


def page(data: dict[str, Any]) -> str:
    """The text of the page."""
    folder = files(__package__)
    scripts = [folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    report_style = files("harness.tell.writers").joinpath("report.css").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True).from_string(
        folder.joinpath("page.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(
        data=data,
        headers=HEADERS,
        reasons=_reasons(data),
        style=Markup(report_style + folder.joinpath("page.css").read_text(encoding="utf-8")),
        # Within a script element only these could end it.
        json=Markup(json.dumps(data).replace("<", "\\u003c")),
        script=Markup("\n".join(scripts)),
    )


SCRIPTS = ("page.js", "charts.js", "interface.js")


def _reasons(data: dict[str, Any]) -> list[str]:
    """Why figures are n/a, each once."""
    found: dict[str, list[str]] = {}
    for label, by_size in data["rows"].items():
        for row in by_size.values():
            for key in ("memory_unknown", "speed_unknown"):
                if row.get(key):
                    found.setdefault(f"{key.partition('_')[0]} n/a: {row[key]}", []).append(label)
    return [f"{', '.join(dict.fromkeys(labels))}: {reason}" for reason, labels in found.items()]
