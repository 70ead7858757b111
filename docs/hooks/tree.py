"""Which files of the repository the site shows: its tree is the repository's, so a link works in both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORTS = "reports"
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "configs/README.md",
    "slurm/README.md",
    "docs/**/*.md",
    "reports/**/*.md",
)
FILES = (
    "docs/*.css",
    "docs/communication/*.csv",
    "docs/faults/*.csv",
    "docs/findings/*.csv",
    "docs/notebooks/*.ipynb",
    "docs/labs/**/*.xz",
    "docs/own-backend/*.py",
    "docs/own-backend/*.toml",
    "configs/*.yaml",
    "slurm/**/*.yaml",
    "reports/**/*.svg",
    "reports/**/*.html",
    "reports/**/*.json",
    "reports/**/*.xz",
)
"""Files next to the pages."""


def site_files() -> Iterator[str]:
    """Paths of the pages and of the files next to them, relative to the repository."""
    for pattern in (*PAGES, *FILES):
        yield from (path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob(pattern)))


def report_nav() -> list[dict[str, str]]:
    """The published reports and pages on several of them, under the names of their folders.

    A report that the page of a folder above links is left out.
    """
    root = ROOT / REPORTS
    pages = {page.parent: page for page in root.rglob("README.md") if page.parent != root}
    entries = {folder.relative_to(root).as_posix(): page for folder, page in pages.items()}
    for report in root.rglob("report.md"):
        above = [folder for folder in (report.parent, *report.parent.parents) if folder in pages]
        if not any(f"]({report.relative_to(f).as_posix()}" in pages[f].read_text("utf-8") for f in above):
            name = report.parent.relative_to(root).as_posix()
            entries[f"{name}, report" if name in entries else name] = report
    return [{name: entries[name].relative_to(ROOT).as_posix()} for name in sorted(entries)]
