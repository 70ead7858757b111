"""Publishes the labs at the tiny scale: their records, what they took, and the hand-outs' tables on one page.

Usage: python -m benchmarks.labs_page docs/labs/tiny [RUNS]
RUNS, the folder of `harness labs run`, is packed anew.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from harness.cli.labs import SPENT
from harness.judge.comparison import Comparison
from harness.labs.definitions import LABS, Lab, Variant
from harness.labs.tables import fill
from harness.record import Record
from harness.record.store import ARCHIVE_NAME, read_runs, write_archive

OF_THE_MACHINE = frozenset({"busy-machine", "slow-rank", "cores-shared", "warmup-too-short"})
"""Findings that say how quiet the machine was, and nothing of the job."""
HEAD = """# Labs at the tiny scale

Every lab on two CPU ranks: small models, shipped data. Losses, bytes and findings are exact; speeds are
those of a machine that other programs kept busy, and are not to be quoted. `make labs` runs all of it. A
test fills in these tables again from the records, which lie next to this page, one archive for each lab
and variant.
"""
PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "peft")
HEADERS = ("lab", "variant", "runs", "processor s", "findings")


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        pack(Path(sys.argv[2]), folder)
    (folder / "README.md").write_text(page(folder), encoding="utf-8")


def pack(runs: Path, folder: Path) -> None:
    """Pack the records of each lab and variant; exits if a run failed."""
    for lab, variant in variants():
        source = runs / f"{lab.name}.{variant}.tiny"
        if not (source / SPENT).is_file():
            continue
        records = {path.parent.name: path for path in sorted(source.glob("*/record.json"))}
        failed = [r.run_id for _, r in read_runs([source])[0] if r.status not in ("ok", "unsupported")]
        if failed or not records:
            raise SystemExit(f"{source}: {', '.join(failed) or 'no runs'}")
        target = folder / f"{lab.name}.{variant}"
        target.mkdir(parents=True, exist_ok=True)
        files = {f"{name}/record.json": path.read_bytes() for name, path in records.items()}
        write_archive(target / ARCHIVE_NAME, files, folder="runs")
        (target / SPENT).write_bytes((source / SPENT).read_bytes())


def variants() -> list[tuple[Lab, Variant]]:
    """Labs that run, with their variants."""
    return [(lab, variant) for lab in LABS if lab.needs_runs for variant in lab.variants]


def published(folder: Path) -> list[tuple[Lab, Variant]]:
    """Those that have records in a folder."""
    return [
        (lab, variant)
        for lab, variant in variants()
        if (folder / f"{lab.name}.{variant}" / ARCHIVE_NAME).is_file()
    ]


def records_of(folder: Path, lab: Lab, variant: Variant) -> list[Record]:
    """What was published of a lab."""
    return [record for _, record in read_runs([folder / f"{lab.name}.{variant}" / ARCHIVE_NAME])[0]]


def findings_of(records: Sequence[Record]) -> list[str]:
    """What the harness has to say of the job, each once."""
    found = (finding.id for finding in Comparison(records).findings)
    return [name for name in dict.fromkeys(found) if name not in OF_THE_MACHINE]


def page(folder: Path) -> str:
    """The page of what is published in a folder."""
    rows, parts, versions = [], [], Counter[str]()
    for lab, variant in published(folder):
        records = records_of(folder, lab, variant)
        spent = json.loads((folder / f"{lab.name}.{variant}" / SPENT).read_text(encoding="utf-8"))
        states = Counter(record.status for record in records)
        rows.append([
            f"[{lab.name}](../{lab.name.removesuffix('-scaling')}.md)", variant,
            ", ".join(f"{count} {status}" for status, count in states.items()),
            f"{spent['processor_seconds']:.0f}",
            ", ".join(f"[{name}](../../findings.md#{name})" for name in findings_of(records)) or "none",
        ])  # fmt: skip
        tables = "\n\n".join(table.markdown() for table in fill(lab, records))
        parts.append(f"## {lab.name}, {variant}\n\n{lab.title}.\n\n{tables}")
        versions.update(_made_with(record) for record in records)
    missing = [
        f"{lab.name} {variant}" for lab, variant in variants() if (lab, variant) not in published(folder)
    ]
    summary = tabulate(rows, headers=HEADERS, tablefmt="github", disable_numparse=True)
    notes = [
        "processor s: user and system time of the command and all its ranks together; on two free cores a "
        "lab takes about as long, or less",
        "findings on how busy the machine was are left out",
        *([f"not published yet: {', '.join(missing)}"] if missing else []),
        *(f"{count} runs: {text}" for text, count in versions.items()),
    ]
    return "\n\n".join([HEAD.strip(), summary, "\n".join(f"- {note}" for note in notes), *parts]) + "\n"


def _made_with(record: Record) -> str:
    """Commit and versions."""
    environment = record.environment
    git = environment.git
    commit = "no checkout" if git is None else f"commit {git.commit[:12]}{', modified' * git.modified}"
    shown = (f"{name} {environment.packages[name]}" for name in PACKAGES if name in environment.packages)
    return ", ".join([commit, *shown])


if __name__ == "__main__":
    main()
