"""Publishes the finding for each planted trap: records, reports and a page of all.

Usage: python -m tests.traps.gallery OUTPUT_FOLDER          (run every trap: minutes)
       python -m tests.traps.gallery OUTPUT_FOLDER --page   (write the page again from what was recorded)
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.publishing import publish
from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.record.store import ARCHIVE_NAME, read_runs

from .matrix import ABOUT_TIME, Matrix, install, padded_documents
from .planted import TRAPS, Trap

DOCUMENTS = "documents.jsonl"
PAGE = """\
# The trap gallery: are mistakes named?

All {count} deliberate mistakes of this page are named by the finding of their kind.

Each line is a backend with a defect,
compared with the reference on one process. Numbered traps have occurred in public. 'unseen' are kinds of
defects for which no finding was written, 'late' are defects that begin after three correct steps.

Each job has a folder with its records and one report of all its mistakes. The findings are in the report's
section 'Findings'; runs that are not the same job have their own table there. The job is a Llama of two
blocks on CPU ranks over gloo, 6 steps; ignore all figures of speed.

`make gallery` runs everything again; a test compares this page with the records. The page omits T19, T20 and
T25, which need a GPU, a library's logger or fp16, and T23, two jobs in one table; tests plant these in
records.

"""


def folder_name(trap: Trap) -> str:
    """Folder of the job in which a trap shows."""
    parts = [f"{trap.world_size} rank{'s' if trap.world_size > 1 else ''}"]
    parts += [
        "tied" if setting.startswith("model.config") else setting.partition(".")[2].replace("=", "-")
        for setting in trap.settings
    ]
    return "-".join([*parts, *(["padded"] if trap.padded else [])]).replace(" ", "-").replace("_", "-")


def by_folder() -> dict[str, list[Trap]]:
    """The traps of each job; those that only differ in precision appear once."""
    found: dict[str, list[Trap]] = {}
    for trap in TRAPS:
        if not trap.name.endswith("in bf16"):
            found.setdefault(folder_name(trap), []).append(trap)
    return found


def run_all(output: Path) -> None:
    """Run every trap and its reference; replace the folder by their records and reports."""
    with tempfile.TemporaryDirectory() as name:
        # Elsewhere, since records say if the checkout was clean; relative paths, since records keep them.
        os.chdir(name)
        padded_documents(Path(DOCUMENTS))
        install(Path("site").resolve())
        made = Path("made")
        for folder, traps in by_folder().items():
            settings = traps[0].settings
            if traps[0].padded:
                settings += ("data.source=jsonl", f"data.path={DOCUMENTS}")
            labels = list(
                dict.fromkeys(label for trap in traps for label in (*trap.compared_with, trap.label))
            )
            Matrix(Path(folder)).compare(labels, traps[0].world_size, settings)
            publish(Path(folder, "runs"), made / folder)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(made, output)


def page(output: Path) -> str:
    """The gallery's page. Raises ValueError if a trap is not named as it should be."""
    lines: list[list[str]] = []
    for folder, traps in by_folder().items():
        found = Comparison(record for _, record in read_runs([output / folder / ARCHIVE_NAME])[0]).findings
        for trap in traps:
            finding = _named(trap, found)
            job = f"[{folder.replace('-', ' ')}]({folder}/report.md)"
            lines.append([trap.name, trap.what, job, f"`{finding.id}`", finding.message.replace("|", "\\|")])
    order = [trap.name for trap in TRAPS]
    lines.sort(
        key=lambda line: (line[0].split()[0] if line[0].startswith("T") else "U", order.index(line[0]))
    )
    headers = ("trap", "what was done", "job", "finding", "what the report says")
    return (
        PAGE.replace("{count}", str(len(lines)))
        + tabulate(lines, headers=headers, tablefmt="pipe", disable_numparse=True)
        + "\n"
    )


def _named(trap: Trap, found: Sequence[Finding]) -> Finding:
    """The finding that must name the trap, of its own backend."""
    label = trap.label.replace("=true", "=True")
    own = [f for f in found if label in f.backends and f.id not in ABOUT_TIME]
    named = [f for f in own if f.id == trap.finding and trap.says in f.message]
    if not named:
        raise ValueError(f"{trap.name}: {trap.finding} was not found of {label}, but {[f.id for f in own]}")
    return named[0]


def main() -> None:
    output = Path(sys.argv[1]).resolve()
    if "--page" not in sys.argv:
        run_all(output)
    (output / "README.md").write_text(page(output), encoding="utf-8")


if __name__ == "__main__":
    main()
