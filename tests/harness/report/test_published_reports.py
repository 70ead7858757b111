"""Published reports carry what they were computed from, and this code still computes the same."""

import subprocess
from pathlib import Path

import pytest

from tests.harness.cli.command_line import harness
from tests.traps.gallery import page

pytestmark = pytest.mark.long(seconds=80)

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = sorted(path.parent for path in (ROOT / "reports").rglob("report.md"))


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: str(folder.relative_to(ROOT / "reports")))
def test_records_lie_beside_a_published_report_and_git_keeps_them(folder: Path) -> None:
    records = list(folder.glob("runs/*/record.json"))
    assert records
    if (ROOT / ".git").exists():
        asked = subprocess.run(["git", "check-ignore", *records], cwd=ROOT, capture_output=True, check=False)
        assert (asked.returncode, asked.stdout) == (1, b"")


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: str(folder.relative_to(ROOT / "reports")))
def test_a_published_report_holds(folder: Path) -> None:
    for report in sorted(path.name for path in folder.glob("report.*") if path.suffix in (".md", ".html")):
        done = harness("verify", report, cwd=folder)
        assert done.returncode == 0, f"{report}: render it again: {done.stdout}{done.stderr}"


def test_the_gallery_is_what_its_records_give() -> None:
    """Every trap is still named, in the words that are published."""
    folder = ROOT / "reports" / "traps"
    assert (folder / "README.md").read_text(encoding="utf-8") == page(folder)
