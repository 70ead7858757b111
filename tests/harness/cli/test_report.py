"""`harness report`: of records that there are, and of none."""

from pathlib import Path

from .command_line import harness, refused
from .conftest import Comparison


def test_report_of_a_folder_of_runs(comparison: Comparison, tmp_path: Path) -> None:
    done = harness("report", comparison.runs, "-o", tmp_path / "out" / "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "## Results" in (tmp_path / "out" / "report.md").read_text()


def test_report_of_nothing(tmp_path: Path) -> None:
    assert "holds no record" in refused(tmp_path, "report", "none", "-o", "report.md")


def test_report_of_what_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{}")
    assert "is not a record of this harness" in refused(tmp_path, "report", "record.json", "-o", "report.md")


def test_report_that_cannot_be_written(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(tmp_path, "report", comparison.runs, "-o", "file/report.md")
