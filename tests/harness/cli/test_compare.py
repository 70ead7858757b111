"""`harness compare`: what it runs, prints and writes, and what it refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest

from harness.doctor.self_check import ABOUT_TIME
from harness.record.store import read_record, write_record
from tests.harness.judge.test_rows import COMPARED_KEYS

from .command_line import harness, records, refused
from .conftest import Comparison


def test_compare_succeeds(comparison: Comparison) -> None:
    assert comparison.done.returncode == 0, comparison.done.stderr
    assert [r.status for r in records(comparison.runs)] == ["ok"] * 4


def test_compare_prints_one_document_and_nothing_else(comparison: Comparison) -> None:
    document = json.loads(comparison.done.stdout)
    assert set(document) == {
        "job_id", "job_ids", "rows", "not_comparable", "noise", "repeat_spreads", "settings", "findings",
        "records",
    }  # fmt: skip
    assert [(r["backend"], r["world_size"]) for r in document["rows"]] == [
        ("single", 1), ("ddp", 2), ("zero1", 2)
    ]  # fmt: skip
    assert all(set(row) == COMPARED_KEYS for row in document["rows"])


def test_compared_backends_train_as_the_reference_does(comparison: Comparison) -> None:
    document = json.loads(comparison.done.stdout)
    assert {row["parity"] for row in document["rows"]} <= {"exact", "tight"}
    assert [f for f in document["findings"] if f["id"] not in ABOUT_TIME] == []


def test_compared_backends_measure_speed_memory_and_communication(comparison: Comparison) -> None:
    rows = {row["backend"]: row for row in json.loads(comparison.done.stdout)["rows"]}
    for row in rows.values():
        assert row["tokens_per_second"] > 0
        assert row["model_state_bytes"] > 0
    assert rows["single"]["sent_bytes_per_step"] == 0
    assert rows["ddp"]["sent_bytes_per_step"] >= rows["ddp"]["textbook_sent_bytes_per_step"] > 0
    assert rows["zero1"]["model_state_bytes"] < rows["ddp"]["model_state_bytes"]


def test_compare_shows_the_table_to_the_person_who_waits(comparison: Comparison) -> None:
    assert "[4/4] zero1 on 2 ranks: ok" in comparison.done.stderr
    assert re.search(r"^backend +ranks +status", comparison.done.stderr, flags=re.MULTILINE)


def test_the_repetition_that_measures_rounding_is_not_timed(comparison: Comparison) -> None:
    second = next(line for line in comparison.done.stderr.splitlines() if line.startswith("[2/4]"))
    label = r"single:micro_batch_size=\d,norm=fp32,backward=reordered"
    assert re.fullmatch(rf"\[2/4\] {label} on 1 rank: ok, loss [\d.]+, not timed; about \d+ s left", second)
    (repetition,) = (r for r in records(comparison.runs) if ":" in r.backend.label)
    assert {step.window for step in repetition.steps} == {"warmup"}


def test_compare_writes_the_report_it_was_asked_for(comparison: Comparison) -> None:
    text = (comparison.folder / "report.md").read_text()
    assert "| zero1" in text
    assert (comparison.folder / "report.loss.svg").exists()


def test_second_compare_runs_nothing(comparison: Comparison) -> None:
    before = sorted(comparison.runs.iterdir())
    done = harness(*comparison.arguments, "--json", cwd=comparison.folder)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 cells have a record" in done.stderr
    assert sorted(comparison.runs.iterdir()) == before
    assert json.loads(done.stdout) == json.loads(comparison.done.stdout)


def test_compare_without_json_prints_the_table(comparison: Comparison) -> None:
    done = harness(*comparison.arguments, cwd=comparison.folder)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:5]] == [
        ["single", "1"], ["ddp", "2"], ["zero1", "2"]
    ]  # fmt: skip


def test_compare_runs_only_what_is_missing(comparison: Comparison) -> None:
    before = set(comparison.runs.iterdir())
    done = harness(
        "compare", "--backends", "ddp,accelerate-ddp,zero1", *comparison.arguments[3:], "--json",
        cwd=comparison.folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    new = set(comparison.runs.iterdir()) - before
    assert [read_record(folder / "record.json").backend.name for folder in new] == ["accelerate-ddp"]


def test_fresh_runs_every_cell_again(comparison: Comparison) -> None:
    before = set(comparison.runs.iterdir())
    arguments = ["compare", "--backends", "ddp", *comparison.arguments[3:]]
    done = harness(*arguments, "--fresh", "--strict", "--json", cwd=comparison.folder)
    assert done.returncode == 0, done.stderr
    new = set(comparison.runs.iterdir()) - before
    assert sorted(read_record(f / "record.json").backend.name for f in new) == ["ddp", "single", "single"]


def test_runs_of_one_cell_give_the_same_losses(comparison: Comparison) -> None:
    losses: dict[str, set[tuple[float | None, ...]]] = {}
    for record in records(comparison.runs):
        losses.setdefault(record.cell, set()).add(tuple(step.loss for step in record.steps))
    assert {len(found) for found in losses.values()} == {1}


def test_unknown_backend_of_compare(tmp_path: Path) -> None:
    assert "Did you mean 'ddp'?" in refused(tmp_path, "compare", "--backends", "zero1,dpd")


def test_impossible_batch_of_one_world_size_of_compare(tmp_path: Path) -> None:
    assert "on 3 ranks" in refused(tmp_path, "compare", "--backends", "ddp", "--nproc", "2,3")


def test_report_of_compare_that_cannot_be_written(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = tmp_path / "file" / "report.md"
    done = harness(*comparison.arguments, "--report", report, cwd=comparison.folder)
    assert done.returncode == 1
    assert f"harness: report '{report}' cannot be written" in done.stderr
    assert "unexpected" not in done.stderr


def test_report_in_a_format_that_there_is_not_is_refused_before_any_run(tmp_path: Path) -> None:
    said = refused(tmp_path, "compare", "--backends", "ddp", "--report", "report.pdf")
    assert "report 'report.pdf': '.pdf' names no format; end its name in .md" in said
    assert not (tmp_path / "report.pdf").exists()


def test_two_configurations_are_refused(tmp_path: Path) -> None:
    done = harness("compare", "--config", "a.yaml", "--config", "b.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "2 files given; give one" in done.stderr


def test_empty_list_of_backends_is_refused(tmp_path: Path) -> None:
    assert "--backends is empty" in refused(tmp_path, "compare", "--backends", "")


@pytest.mark.parametrize("sizes", ["0", "two", "2,,4", "2,-1", ""])
def test_compare_refuses_what_is_no_number_of_ranks(tmp_path: Path, sizes: str) -> None:
    assert f"--nproc was given '{sizes}'" in refused(
        tmp_path, "compare", "--backends", "ddp", "--nproc", sizes
    )


def test_a_later_run_in_the_folder_does_not_break_the_report(comparison: Comparison, tmp_path: Path) -> None:
    for name in ("runs", "report.md.runs"):
        shutil.copytree(comparison.folder / name, tmp_path / name)
    for path in comparison.folder.glob("report.*"):
        if path.is_file():
            shutil.copy(path, tmp_path)
    (first, *_) = records(tmp_path / "runs")
    later = first.model_copy(update={"run_id": "later", "created_at": "2099-01-01T00:00:00+00:00"})
    (tmp_path / "runs" / "later").mkdir()
    write_record(tmp_path / "runs" / "later", later)
    done = harness("verify", "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
