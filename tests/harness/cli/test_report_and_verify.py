"""`harness report` and `harness verify`, mostly on records that were never run."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from harness.cli import harness
from harness.record.store import write_record
from tests.records import make_record, make_steps

from .command_line import harness as harness_in_folder
from .command_line import refused
from .conftest import Comparison


def write_runs(folder: Path, *, seconds: float = 0.5) -> Path:
    for record in (make_record(), make_record(label="ddp", steps=make_steps(seconds=seconds))):
        directory = folder / record.run_id
        directory.mkdir(parents=True)
        write_record(directory, record)
    return folder


def call(*arguments: object) -> Result:
    return CliRunner().invoke(harness, [str(argument) for argument in arguments])


def test_report_that_was_just_written_holds(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    assert call("report", write_runs(tmp_path / "runs"), "-o", report).exit_code == 0
    done = call("verify", report)
    assert done.exit_code == 0
    assert "holds; 2 records unchanged" in done.stdout


def test_changed_report_exits_with_1_and_names_the_line(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    call("report", write_runs(tmp_path / "runs"), "-o", report)
    text = report.read_text()
    report.write_text(text.replace("2,048", "4,096", 1))
    line = text[: text.index("2,048")].count("\n") + 1
    done = call("verify", report)
    assert done.exit_code == 1
    assert f"report.md, line {line}: reads" in done.stdout
    document = json.loads(call("verify", report, "--json").stdout)
    assert document["holds"] is False
    assert [problem["line"] for problem in document["problems"]] == [line]


def test_file_that_is_no_report_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes")
    done = call("verify", tmp_path / "notes.md")
    assert done.exit_code == 1
    assert "carries no list of its records" in done.stderr
    assert call("verify", tmp_path / "none.md").exit_code == 1


@pytest.mark.parametrize(
    ("name", "begins"),
    [("r.md", "# "), ("r.html", "<!doctype html>"), ("r.csv", "backend,"), ("r.json", "{"), ("r.tex", "% "),
     ("r", "# ")],
)  # fmt: skip
def test_ending_of_the_name_tells_the_format(tmp_path: Path, name: str, begins: str) -> None:
    assert call("report", write_runs(tmp_path / "runs"), "-o", tmp_path / name).exit_code == 0
    assert (tmp_path / name).read_text().startswith(begins)


def test_format_can_be_given(tmp_path: Path) -> None:
    call("report", write_runs(tmp_path / "runs"), "-o", tmp_path / "r.txt", "--format", "json")
    assert json.loads((tmp_path / "r.txt").read_text())["title"]


def test_fall_beyond_the_limit_exits_with_3(tmp_path: Path) -> None:
    before = write_runs(tmp_path / "a")
    after = write_runs(tmp_path / "b", seconds=0.6)
    arguments = ["report", before, after, "--baseline", "-o", tmp_path / "r.md", "--fail-on"]
    done = call(*arguments, "tokens_per_second<-3%")
    assert done.exit_code == 3
    assert "fail-on: ddp on 2 ranks: tokens_per_second changed by -16.7 %" in done.stderr
    assert (tmp_path / "r.md").exists()
    assert call(*arguments, "tokens_per_second<-30%").exit_code == 0


def test_condition_that_cannot_be_read_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "a")
    done = call("report", runs, runs, "--baseline", "-o", tmp_path / "r.md", "--fail-on", "speed>1")
    assert done.exit_code == 1
    assert "peak_bytes>+5%,tokens_per_second<-3%" in done.stderr
    assert not (tmp_path / "r.md").exists()


def test_baseline_needs_two_sides_and_conditions_need_a_baseline(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "a")
    assert "two sets of runs, 1 given" in call("report", runs, "--baseline", "-o", tmp_path / "r.md").stderr
    done = call("report", runs, "-o", tmp_path / "r.md", "--fail-on", "peak_bytes>+5%")
    assert done.exit_code == 1
    assert "give --baseline" in done.stderr


def test_report_with_an_archive_holds_without_the_folder_of_runs(tmp_path: Path) -> None:
    runs, report = write_runs(tmp_path / "runs"), tmp_path / "out" / "report.md"
    assert call("report", runs, "-o", report, "--archive").exit_code == 0
    shutil.rmtree(runs)
    assert call("verify", report).exit_code == 0
    again = report.with_name("again.md")
    assert call("report", report.with_name("runs.tar.xz"), "-o", again).exit_code == 0
    for ending in ("md", "manifest.json"):
        named = again.with_suffix(f".{ending}").read_text().replace("again.", "report.")
        shown = [
            re.sub('"sha256":".*"', "", text)
            for text in (named, report.with_suffix(f".{ending}").read_text())
        ]
        assert shown[0] == shown[1]


def test_archive_leaves_no_record_out(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs")
    (runs / "broken").mkdir()
    (runs / "broken" / "record.json").write_text("{")
    done = call("report", runs, "-o", tmp_path / "r.md", "--archive")
    assert done.exit_code == 1
    assert "--archive needs readable records; fix or remove: record" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_archive_with_a_baseline_is_refused(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs")
    done = call("report", runs, runs, "--baseline", "--archive", "-o", tmp_path / "r.md")
    assert done.exit_code == 1
    assert "give two archives" in done.stderr


def test_archived_runs_are_exported_for_tracking(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs")
    call("report", runs, "-o", tmp_path / "r.md", "--archive")
    done = call(
        "export", "tracking", tmp_path / "runs.tar.xz", "--to", "tensorboard", "-o", tmp_path / "board"
    )
    assert done.exit_code == 0, done.stderr
    assert "runs logged for tensorboard" in done.stderr


def test_report_of_a_folder_of_runs(comparison: Comparison, tmp_path: Path) -> None:
    done = harness_in_folder("report", comparison.runs, "-o", tmp_path / "out" / "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "## Results" in (tmp_path / "out" / "report.md").read_text()


def test_report_of_what_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{}")
    assert "is not a record of this harness" in refused(tmp_path, "report", "record.json", "-o", "report.md")


def test_report_that_cannot_be_written(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(tmp_path, "report", comparison.runs, "-o", "file/report.md")
