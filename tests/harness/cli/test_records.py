"""`harness list`, `show`, `clean`, `report` and `verify`, mostly on records that were never run."""

import json
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.record import ErrorPart
from harness.record.store import write_record
from harness.tell.formats import WIDTH
from tests.patience import SECONDS
from tests.records import make_effective, make_record, make_steps, saved

from .command_line import HARNESS, environment, harness, refused
from .conftest import Compared


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(tmp_path / "runs", "one-aaa", cell="1")
    saved(
        tmp_path / "runs", "two-bbb", label="zero3:offload=cpu,stage3_prefetch_bucket_size=1000000", cell="2"
    )
    error = ErrorPart(kind="ValueError", message="it broke", rank=1)
    saved(
        tmp_path / "runs",
        "three-ccc-20261123-055417-fsdp1-hybrid-grad-op-n2",
        label="ddp",
        status="failed",
        error=error,
    )
    return tmp_path


def test_list_fits_the_width_and_cuts_nothing(folder: Path) -> None:
    done = harness("list", cwd=folder)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= WIDTH
    begins = lines[0].index("backend")
    shown = "".join(line[begins : lines[0].index("ranks")].strip() for line in lines)
    assert "zero3:offload=cpu,stage3_prefetch_bucket_size=1000000" in shown


def test_wide_list_has_a_line_for_each_run_and_says_why_one_failed(folder: Path) -> None:
    shown = harness("list", "--runs", "runs", "--wide", cwd=folder).stdout
    assert "zero3:offload=cpu,stage3_prefetch_bucket_size=1000000" in shown
    assert "ValueError (rank 1): it broke" in shown
    assert len(shown.splitlines()) == 2 + 3


def test_list_is_filtered_by_backend_and_status(folder: Path) -> None:
    def ids(*arguments: str) -> list[str]:
        document = json.loads(harness("list", "--json", *arguments, cwd=folder).stdout)
        return [run["run_id"].partition("-")[0] for run in document["runs"]]

    assert ids() == ["one", "three", "two"]
    assert ids("--backend", "zero3") == ["two"]
    assert ids("--status", "failed") == ["three"]
    assert ids("--job", "nothing") == []


def test_show_finds_a_run_by_a_part_of_its_name(folder: Path) -> None:
    done = harness("show", "bbb", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("two-bbb\n")
    assert "backend  zero3:offload=cpu" in done.stdout
    assert "Non-default settings" in done.stdout


def test_show_says_why_a_run_failed(folder: Path) -> None:
    assert "why      ValueError (rank 1): it broke" in harness("show", "three", cwd=folder).stdout


def test_show_json_is_the_record(folder: Path) -> None:
    done = harness("show", "runs/one-aaa", "--json", cwd=folder)
    assert json.loads(done.stdout) == json.loads((folder / "runs/one-aaa/record.json").read_text())


def test_show_of_no_run_and_of_several(folder: Path) -> None:
    assert "has 'two-bbc' in its name. Did you mean 'two-bbb'?" in refused(folder, "show", "two-bbc")
    assert "'e-' names 2 runs (one-aaa, three-" in refused(folder, "show", "e-")


def test_clean_lists_what_it_would_remove_and_removes_nothing(folder: Path) -> None:
    saved(folder / "runs", "zz-one-again", cell="1", created_at="2099-01-01T00:00:00+00:00")
    done = harness("clean", cwd=folder)
    assert done.returncode == 0
    assert "one-aaa: replaced by a later run" in done.stdout
    assert "n2: failed" in done.stdout
    assert "two-bbb" not in done.stdout
    assert len([*(folder / "runs").iterdir()]) == 4


def test_clean_removes_what_failed_and_keeps_what_a_report_lists(folder: Path) -> None:
    saved(folder / "runs", "zz-one-again", cell="1", created_at="2099-01-01T00:00:00+00:00")
    assert harness("report", "runs/one-aaa", "-o", "runs/report.csv", cwd=folder).returncode == 0
    done = harness("clean", "--yes", cwd=folder)
    assert "1 run kept for a report in runs" in done.stderr
    left = {path.parent.name for path in (folder / "runs").glob("*/record.json")}
    assert left == {"one-aaa", "two-bbb", "zz-one-again"}
    harness("clean", "--yes", "--reports", cwd=folder)
    assert not (folder / "runs/one-aaa").exists()


def test_clean_takes_links_away_not_what_they_lead_to_and_any_time_of_a_record(folder: Path) -> None:
    saved(folder / "runs", "naive", cell="3", created_at="2020-01-01T00:00:00")
    saved(folder / "runs", "odd", cell="4", created_at="yesterday")
    (folder / "runs/naive").rename(folder / "elsewhere")
    (folder / "runs/naive").symlink_to(folder / "elsewhere")
    done = harness("clean", "--yes", "--older-than", "1000", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "naive: older than 1000 days" in done.stdout
    assert not (folder / "runs/naive").is_symlink()
    assert (folder / "elsewhere/record.json").exists()
    assert (folder / "runs/odd").exists()


def write_runs(folder: Path, *, seconds: float = 0.5) -> Path:
    for record in (make_record(), make_record(label="ddp", steps=make_steps(seconds=seconds))):
        directory = folder / record.run_id
        directory.mkdir(parents=True)
        write_record(directory, record)
    return folder


def test_report_that_was_just_written_holds(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    assert harness("report", write_runs(tmp_path / "runs"), "-o", report, cwd=tmp_path).returncode == 0
    done = harness("verify", report, cwd=tmp_path)
    assert done.returncode == 0
    assert "holds; 2 records unchanged" in done.stdout


def test_changed_report_exits_with_1_and_names_the_line(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    harness("report", write_runs(tmp_path / "runs"), "-o", report, cwd=tmp_path)
    text = report.read_text()
    report.write_text(text.replace("2,048", "4,096", 1))
    line = text[: text.index("2,048")].count("\n") + 1
    done = harness("verify", report, cwd=tmp_path)
    assert done.returncode == 1
    assert f"report.md, line {line}: reads" in done.stdout
    document = json.loads(harness("verify", report, "--json", cwd=tmp_path).stdout)
    assert document["holds"] is False
    assert [problem["line"] for problem in document["problems"]] == [line]


def test_file_that_is_no_report_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes")
    done = harness("verify", tmp_path / "notes.md", cwd=tmp_path)
    assert done.returncode == 1
    assert "carries no list of its records" in done.stderr
    assert harness("verify", tmp_path / "none.md", cwd=tmp_path).returncode == 1


@pytest.mark.parametrize(
    ("name", "begins"),
    [("r.md", "# "), ("r.html", "<!doctype html>"), ("r.csv", "backend,"), ("r.json", "{"), ("r.tex", "% "),
     ("r", "# ")],
)  # fmt: skip
def test_ending_of_the_name_tells_the_format(tmp_path: Path, name: str, begins: str) -> None:
    assert (
        harness("report", write_runs(tmp_path / "runs"), "-o", tmp_path / name, cwd=tmp_path).returncode == 0
    )
    assert (tmp_path / name).read_text().startswith(begins)


def test_format_can_be_given(tmp_path: Path) -> None:
    harness(
        "report", write_runs(tmp_path / "runs"), "-o", tmp_path / "r.txt", "--format", "json", cwd=tmp_path
    )
    assert json.loads((tmp_path / "r.txt").read_text())["title"]


def test_fall_beyond_the_limit_exits_with_3(tmp_path: Path) -> None:
    before = write_runs(tmp_path / "a")
    after = write_runs(tmp_path / "b", seconds=0.6)
    arguments = ["report", before, after, "--baseline", "-o", tmp_path / "r.md", "--fail-on"]
    done = harness(*arguments, "tokens_per_second<-3%", cwd=tmp_path)
    assert done.returncode == 3
    assert "fail-on: ddp on 2 ranks: tokens_per_second changed by -16.7 %" in done.stderr
    assert (tmp_path / "r.md").exists()
    assert harness(*arguments, "tokens_per_second<-30%", cwd=tmp_path).returncode == 0


def test_condition_that_cannot_be_read_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "a")
    done = harness(
        "report", runs, runs, "--baseline", "-o", tmp_path / "r.md", "--fail-on", "speed>1", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "peak_bytes>+5%,tokens_per_second<-3%" in done.stderr
    assert not (tmp_path / "r.md").exists()


def test_baseline_needs_two_sides_and_conditions_need_a_baseline(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "a")
    assert (
        "two sets of runs, 1 given"
        in harness("report", runs, "--baseline", "-o", tmp_path / "r.md", cwd=tmp_path).stderr
    )
    done = harness("report", runs, "-o", tmp_path / "r.md", "--fail-on", "peak_bytes>+5%", cwd=tmp_path)
    assert done.returncode == 1
    assert "give --baseline" in done.stderr


def test_report_with_an_archive_holds_without_the_folder_of_runs(tmp_path: Path) -> None:
    runs, report = write_runs(tmp_path / "runs"), tmp_path / "out" / "report.md"
    assert harness("report", runs, "-o", report, "--archive", cwd=tmp_path).returncode == 0
    shutil.rmtree(runs)
    assert harness("verify", report, cwd=tmp_path).returncode == 0
    again = report.with_name("again.md")
    assert harness("report", report.with_name("runs.tar.xz"), "-o", again, cwd=tmp_path).returncode == 0
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
    done = harness("report", runs, "-o", tmp_path / "r.md", "--archive", cwd=tmp_path)
    assert done.returncode == 1
    assert "--archive needs readable records; fix or remove: record" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_archive_with_a_baseline_is_refused(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs")
    done = harness("report", runs, runs, "--baseline", "--archive", "-o", tmp_path / "r.md", cwd=tmp_path)
    assert done.returncode == 1
    assert "give two archives" in done.stderr


def test_archived_runs_are_exported_for_tracking(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs")
    harness("report", runs, "-o", tmp_path / "r.md", "--archive", cwd=tmp_path)
    done = harness(
        "export",
        "tracking",
        tmp_path / "runs.tar.xz",
        "--to",
        "tensorboard",
        "-o",
        tmp_path / "board",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "runs logged for tensorboard" in done.stderr


def test_report_of_a_folder_of_runs(comparison: Compared, tmp_path: Path) -> None:
    done = harness("report", comparison.runs, "-o", tmp_path / "out" / "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "## Results" in (tmp_path / "out" / "report.md").read_text()


def test_report_of_what_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{}")
    assert "is not a record of this harness" in refused(tmp_path, "report", "record.json", "-o", "report.md")


def test_report_that_cannot_be_written(comparison: Compared, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(tmp_path, "report", comparison.runs, "-o", "file/report.md")


def test_report_does_not_replace_a_record(tmp_path: Path) -> None:
    path = saved(tmp_path / "runs", "one")
    before = path.read_bytes()
    link = tmp_path / "innocent.json"
    link.symlink_to(path)
    for output, why in ((path, "would replace record.json"), (link, "is a symbolic link")):
        done = harness("report", "runs", "-o", output, cwd=tmp_path)
        assert done.returncode == 1
        assert why in done.stderr
    assert path.read_bytes() == before


def test_report_without_the_reference_but_with_its_noise_run(tmp_path: Path) -> None:
    saved(tmp_path / "runs", "noise", label="single:micro_batch_size=4,norm=fp32")
    saved(tmp_path / "runs", "ddp", label="ddp")
    done = harness("report", "runs", "-o", "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.loss.svg").exists()


def test_odd_record_is_passed_over_by_name(tmp_path: Path) -> None:
    saved(tmp_path / "runs", "sound")
    effective = make_effective(optimizer_groups=[{"betas": 7, "eps": [], "weight_decay": {}}])
    odd = make_record(label="ddp").backend.model_copy(update={"effective": effective})
    saved(tmp_path / "runs", "odd", label="ddp", backend=odd)
    saved(tmp_path / "runs", "odder", label="fsdp", steps=make_steps(changes={1: {"step": 0}}), ranks=[])
    done = harness("report", "runs", "-o", "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "unexpected" not in done.stderr
    assert "sound" in (tmp_path / "report.manifest.json").read_text()


def test_report_of_no_readable_record_fails(tmp_path: Path) -> None:
    for name in ("one", "two"):
        saved(tmp_path / "runs", name).write_text("{")
    done = harness("report", "runs", "-o", "report.md", cwd=tmp_path)
    assert done.returncode == 1
    assert "none of 2 records can be read" in done.stderr
    assert not (tmp_path / "report.md").exists()


def test_report_that_does_not_fit_on_the_disk_leaves_the_old_one(tmp_path: Path) -> None:
    saved(tmp_path / "runs", "one")
    assert harness("report", "runs", "-o", "report.md", cwd=tmp_path).returncode == 0
    before = {path.name: path.read_bytes() for path in tmp_path.glob("report*")}
    saved(tmp_path / "runs", "two", label="ddp")
    done = subprocess.run(
        [*HARNESS, "report", "runs", "-o", "report.md"], cwd=tmp_path, env=environment(), text=True,
        capture_output=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )  # fmt: skip
    assert done.returncode == 1
    assert "report" in done.stderr
    assert "cannot be written: File too large" in done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.glob("report*")} == before
    assert not list(tmp_path.glob(".report*"))


@pytest.mark.parametrize("output", ["/dev/full", "/dev/zero", "/dev/null", "fifo"])
def test_report_into_a_pipe_or_device_is_refused(tmp_path: Path, output: str) -> None:
    saved(tmp_path / "runs", "one")
    os.mkfifo(tmp_path / "fifo")
    done = harness("report", "runs", "-o", output, "--format", "md", cwd=tmp_path)
    assert done.returncode == 1
    assert "is a pipe or device" in done.stderr


def test_report_through_a_link_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "runs", "one")
    (tmp_path / "kept").write_text("before")
    (tmp_path / "report.md").symlink_to("kept")
    done = harness("report", "runs", "-o", "report.md", cwd=tmp_path)
    assert done.returncode == 1
    assert "is a symbolic link; give the file itself" in done.stderr
    assert (tmp_path / "kept").read_text() == "before"


def test_configuration_to_fill_in_is_not_written_into_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    done = harness("settings", "--write", "fifo", cwd=tmp_path)
    assert done.returncode == 1
    assert "is a pipe or device" in done.stderr


def test_pipe_among_the_records_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path / "runs", "one")
    (tmp_path / "runs" / "two").mkdir()
    os.mkfifo(tmp_path / "runs" / "two" / "record.json")
    done = harness("report", "runs", "-o", "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 records" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("show", "fifo"),
        ("report", "fifo", "-o", "report.md"),
        ("verify", "fifo"),
        ("diagnose", "fifo", "fifo"),
    ],
)
def test_pipe_in_place_of_a_record_is_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    os.mkfifo(tmp_path / "fifo")
    done = harness(*words, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert re.search(r"fifo'? cannot be read: it is not a plain file$", line)


@pytest.mark.parametrize("given", ["/dev/zero", "/dev/null", "fifo"])
def test_pipe_or_device_as_configuration_or_data_is_refused(tmp_path: Path, given: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    done = harness("run", "--backend", "ddp", "--config", given, cwd=tmp_path)
    assert done.returncode == 1
    assert "it is not a plain file" in done.stderr
    data = ["--set", "data.source=text", "--set", f"data.path={given}"]
    done = harness("run", "--backend", "ddp", *data, cwd=tmp_path)
    assert done.returncode == 1
    assert "is a pipe or device" in done.stderr


def test_reports_of_two_formats_keep_their_pictures(tmp_path: Path) -> None:
    saved(tmp_path / "runs", "one")
    saved(tmp_path / "runs", "two", label="ddp")
    for name in ("x.md", "x.tex"):
        assert harness("report", "runs", "-o", name, cwd=tmp_path).returncode == 0
    assert harness("verify", "x.md", cwd=tmp_path).returncode == 0
    assert harness("verify", "x.tex", cwd=tmp_path).returncode == 0


def test_report_on_a_pipe_whose_reader_is_gone_ends(tmp_path: Path) -> None:
    saved(tmp_path / "runs", "one")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*HARNESS, "report", "runs", "-o", "/dev/stdout"], cwd=tmp_path, env=environment(), stdout=writer,
        stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == "harness: report '/dev/stdout' cannot be written: Broken pipe\n"


def test_report_on_standard_output_writes_no_other_file(tmp_path: Path) -> None:
    saved(tmp_path / "runs", "one")
    before = set(os.listdir("/dev"))
    done = subprocess.run(
        [*HARNESS, "report", "runs", "-o", "-"], cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# ")
    assert "pictures and tables next to it are left out" in done.stderr
    assert {name for name in set(os.listdir("/dev")) - before if name.startswith("stdout")} == set()
    assert not (tmp_path / "-").exists()


def test_a_dash_is_no_name_of_a_folder(tmp_path: Path) -> None:
    done = harness("report", "-", "-o", "x.md", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'-' cannot be a standard stream here; give a path" in done.stderr
