"""Published reports carry what they were computed from, and this code still computes the same."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.published_reports import MOST_MEGABYTES
from benchmarks.publishing import REPORTS, render_again
from harness.record.store import ARCHIVE_NAME, RECORD_NAME, read_archive
from harness.tell.first_page import MOST_PICTURES, MOST_WORDS
from tests.gpu_stub.gallery import page as stub_page
from tests.harness.cli.command_line import harness
from tests.traps.gallery import page

pytestmark = pytest.mark.long(seconds=80)

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = sorted(path.parent for path in (ROOT / "reports").rglob("report.md"))


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: str(folder.relative_to(ROOT / "reports")))
def test_records_lie_beside_a_published_report_and_git_keeps_them(folder: Path) -> None:
    records = read_archive(folder / ARCHIVE_NAME, named=RECORD_NAME)
    assert records
    if (ROOT / ".git").exists():
        archive = folder / ARCHIVE_NAME
        asked = subprocess.run(["git", "check-ignore", archive], cwd=ROOT, capture_output=True, check=False)
        assert (asked.returncode, asked.stdout) == (1, b"")


def test_published_reports_are_small_and_hold_each_picture_once() -> None:
    files = [path for path in (ROOT / "reports").rglob("*") if path.is_file() and "runs" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= MOST_MEGABYTES * 1_000_000
    assert {path.suffix for path in files} == {".md", ".html", ".svg", ".json", ".xz"}


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: str(folder.relative_to(ROOT / "reports")))
def test_a_published_report_is_read_in_minutes(folder: Path) -> None:
    """Alternative texts count as words; marks of tables and the hidden list of records do not."""
    text = (folder / "report.md").read_text(encoding="utf-8")
    shown = re.sub(r"^<!-- harness-report: .* -->$", "", text, flags=re.MULTILINE)
    assert sum(any(map(str.isalnum, word)) for word in shown.split()) <= MOST_WORDS
    assert shown.count("![") <= MOST_PICTURES


def test_published_reports_have_titles_of_their_own() -> None:
    own = [folder for folder in PUBLISHED if ROOT / "reports" / "gpu" not in folder.parents]
    titles = [(folder / "report.md").read_text(encoding="utf-8").partition("\n")[0] for folder in own]
    assert sorted(set(titles)) == sorted(titles)


@pytest.mark.exhaustive
def test_a_report_that_is_rendered_again_has_the_same_bytes(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ROOT / "reports" / "traps" / "1-rank", tmp_path / "copy"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert render_again(tmp_path) == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: str(folder.relative_to(ROOT / "reports")))
def test_a_published_report_holds(folder: Path) -> None:
    for report in (name for name in REPORTS if (folder / name).is_file()):
        done = harness("verify", report, cwd=folder)
        assert done.returncode == 0, f"{report}: `make reports` renders it again: {done.stdout}{done.stderr}"


@pytest.mark.exhaustive
def test_the_gallery_is_what_its_records_give() -> None:
    """Every trap is still named, in the words that are published."""
    folder = ROOT / "reports" / "traps"
    assert (folder / "README.md").read_text(encoding="utf-8") == page(folder)


@pytest.mark.exhaustive
def test_the_page_of_the_cuda_stub_is_what_its_records_and_counts_give() -> None:
    """Made only if the stub of NCCL counted the bytes that every record says."""
    folder = ROOT / "reports" / "gpu-stub"
    assert (folder / "README.md").read_text(encoding="utf-8") == stub_page(folder)
