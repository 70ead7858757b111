"""docs/findings.md and its list of hypotheses, as `findings.toml` and `causes.toml` have them.

Usage: python -m benchmarks.findings_page
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from harness.judge.agreement.causes import HYPOTHESES
from harness.judge.findings.finding import PARTS, ROLES, role_of
from harness.judge.wording import entries

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "findings.md"
LIST = DOCS / "findings" / "hypotheses.csv"
HEAD = """\
# Findings

Warnings that `compare` and reports print below the figures; `harness explain ID` shows an entry. Ids are
stable. 'The values' are the figures behind an entry, `values` of `findings` in `compare --json`.
[The list of hypotheses](findings/hypotheses.csv) has every cause of a divergence: its signs, what else it
predicts, and which facts refute it.
"""


def page() -> str:
    """The page, an index by role and an entry for each kind."""
    lines = [HEAD]
    for role, heading in ROLES.items():
        links = ", ".join(f"[{kind}](#{kind})" for kind in sorted(entries()) if role_of(kind) == role)
        lines.append(f"- **{heading}**: {links}")
    for kind, entry in entries().items():
        lines.append(f"\n## {kind}\n\n{entry['title']}. {entry['cause']}\n")
        lines += [f"- {part.capitalize()}: {entry[part]}" for part in PARTS[2:] if part in entry]
    return "\n".join(lines) + "\n"


def hypotheses() -> str:
    """Each with the facts that it is held against."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("finding", "sentence", "specific", "signs", "predicts", "refuted by"))
    for one in HYPOTHESES:
        facts = (one.signs, one.predicts, one.refuted_by)
        rows.writerow((one.kind, one.name, one.specific, *map(_words, facts)))
    return text.getvalue()


def _words(facts: Iterable[str]) -> str:
    return "; ".join(name.removeprefix("record.").replace("_", " ") for name in facts)


def write() -> None:
    LIST.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    LIST.write_text(hypotheses(), encoding="utf-8")


if __name__ == "__main__":
    write()
