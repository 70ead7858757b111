"""Publishes the finding for each planted trap: records, reports and a page of all.

Usage: python -m tests.traps.gallery OUTPUT_FOLDER          (run every trap: minutes)
       python -m tests.traps.gallery OUTPUT_FOLDER --page   (write the page again from what was recorded)
       python -m tests.traps.gallery runs.tar.xz            (run `OTHERS`: minutes; pack their records)
"""

import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

from tabulate import tabulate

from benchmarks.publishing import publish
from harness.judge.comparison import Comparison
from harness.record.store import archive_runs
from tests import kept
from tests.records import published, published_comparison

from .matrix import UNTRACED, Matrix, install, padded_documents
from .planted import CLIPPED, DIVIDED, EXECUTION, OWN_JOBS, TRAPS, UPDATED, Trap, of_the_trap

KINDS = (
    "T28 stage 2", "T33 stages", "T35", "backward in halves", "evaluating in training mode",
    "weight decay of one rank", "buffer cast", "decay added to clipped gradients, DDP",
    "embedding scaled, FSDP", "norm of the shard, ZeRO-1",
    "loss not unscaled, DDP", "weights one step behind", "moments lost, ZeRO-2",
    "part of a rank left, ZeRO-2", "late block skipped on a rank", "decay without gradient",
    "frozen weights trained", "held-out samples dropped", "nothing updated",
    "gradients of a rank x 0.99, bf16",
)  # fmt: skip
OTHERS = [trap for trap in (*DIVIDED, *EXECUTION, *CLIPPED, *UPDATED, *OWN_JOBS) if trap.name in KINDS]
"""Of kinds that the published gallery lacks: their records are frozen beside the tests."""
HERE = Path(__file__).parent
"""Its archive has the records of `OTHERS`."""
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


PUBLISHED = [trap for traps in by_folder().values() for trap in traps]


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


def frozen(trap: Trap) -> Comparison:
    """Of the records that are kept of its job."""
    folder = f"traps/{folder_name(trap)}" if trap in TRAPS else str(HERE)
    (job,) = (record.job_id for record in published(folder) if record.backend.label == trap.shown)
    return _compared(folder, job)


@cache
def _compared(folder: str, job: str) -> Comparison:
    return Comparison(record for record in published(folder) if record.job_id == job)


def freeze(archive: Path) -> None:
    """Run each of `OTHERS` and its reference; pack their records."""
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        install(Path("site").resolve())
        matrix = Matrix(Path(), [UNTRACED], kept.runs())
        for trap in OTHERS:
            matrix.compare([trap.label], trap.world_size, trap.settings)
        archive_runs(matrix.store.runs()[0], archive)


def page(output: Path) -> str:
    """The gallery's page."""
    lines: list[list[str]] = []
    for folder, traps in by_folder().items():
        found = published_comparison(str(output / folder)).findings
        for trap in traps:
            finding = next(f for f in of_the_trap(trap, found) if trap.says in f.message)
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


def main() -> None:
    output = Path(sys.argv[1]).resolve()
    if output.suffix == ".xz":
        return freeze(output)
    if "--page" not in sys.argv:
        run_all(output)
    (output / "README.md").write_text(page(output), encoding="utf-8")


if __name__ == "__main__":
    main()
