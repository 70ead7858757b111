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
    """The first page of each published report, under the name of its folder."""
    first: dict[str, str] = {}
    for name in ("README.md", "report.md"):
        for page in sorted((ROOT / REPORTS).rglob(name)):
            folder = page.parent.relative_to(ROOT / REPORTS).as_posix()
            if folder != ".":
                first.setdefault(folder, page.relative_to(ROOT).as_posix())
    return [{folder: first[folder]} for folder in sorted(first)]


def decision_nav() -> list[str]:
    """The notes on decisions, in order."""
    return [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs/decisions").glob("0*.md"))]
