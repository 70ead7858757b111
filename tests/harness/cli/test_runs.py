"""`harness list`, `show` and `clean`: the runs of a folder."""

import json
from pathlib import Path

import pytest

from harness.record import ErrorPart
from harness.record.store import write_record
from harness.tell.formats import WIDTH
from tests.records import make_record

from .command_line import harness, refused


def put(folder: Path, run_id: str, **changes: object) -> Path:
    run = folder / "runs" / run_id
    run.mkdir(parents=True)
    return write_record(run, make_record(run_id=run_id, **changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path, "one-aaa", cell="1")
    put(tmp_path, "two-bbb", label="zero3:offload=cpu,stage3_prefetch_bucket_size=1000000", cell="2")
    error = ErrorPart(kind="ValueError", message="it broke", rank=1)
    put(
        tmp_path,
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
    put(folder, "zz-one-again", cell="1", created_at="2099-01-01T00:00:00+00:00")
    done = harness("clean", cwd=folder)
    assert done.returncode == 0
    assert "one-aaa: replaced by a later run" in done.stdout
    assert "n2: failed" in done.stdout
    assert "two-bbb" not in done.stdout
    assert len([*(folder / "runs").iterdir()]) == 4


def test_clean_removes_what_failed_and_keeps_what_a_report_lists(folder: Path) -> None:
    put(folder, "zz-one-again", cell="1", created_at="2099-01-01T00:00:00+00:00")
    assert harness("report", "runs/one-aaa", "-o", "runs/report.csv", cwd=folder).returncode == 0
    done = harness("clean", "--yes", cwd=folder)
    assert "1 run kept for a report in runs" in done.stderr
    left = {path.parent.name for path in (folder / "runs").glob("*/record.json")}
    assert left == {"one-aaa", "two-bbb", "zz-one-again"}
    harness("clean", "--yes", "--reports", cwd=folder)
    assert not (folder / "runs/one-aaa").exists()


def test_clean_takes_links_away_not_what_they_lead_to_and_any_time_of_a_record(folder: Path) -> None:
    put(folder, "naive", cell="3", created_at="2020-01-01T00:00:00")
    put(folder, "odd", cell="4", created_at="yesterday")
    (folder / "runs/naive").rename(folder / "elsewhere")
    (folder / "runs/naive").symlink_to(folder / "elsewhere")
    done = harness("clean", "--yes", "--older-than", "1000", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "naive: older than 1000 days" in done.stdout
    assert not (folder / "runs/naive").is_symlink()
    assert (folder / "elsewhere/record.json").exists()
    assert (folder / "runs/odd").exists()
