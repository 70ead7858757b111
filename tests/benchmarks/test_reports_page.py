"""The gallery and the first screen of README.md follow from the published reports."""

import json
from pathlib import Path

import pytest

from benchmarks.published_reports import PUBLISHED, Published
from benchmarks.reports_page import page, with_results
from benchmarks.sent_packages import FOLDER, NONE, problems, section, sent
from harness.record.store import ARCHIVE_NAME, archive_runs, read_runs
from harness.tell.report import write_report
from tests.records import make_record, written

A100 = "NVIDIA A100-SXM4-80GB"
ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "reports"


def test_the_gallery_is_what_the_reports_give() -> None:
    assert (REPORTS / "README.md").read_text(encoding="utf-8") == page(REPORTS)


def test_readme_opens_with_the_default_report() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == with_results(text, REPORTS)
    assert "| ddp |" in text.split("## On GPUs")[0]


def test_readme_shows_first_what_carries_over_and_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (head,) = (line for line in text.splitlines() if line.startswith("| strategy "))
    assert head.index("model states") < head.index("sent") < head.index("parity") < head.index("speed")
    assert len(text.split()) <= 900


def test_every_folder_of_reports_is_in_the_gallery() -> None:
    folders = {path.name for path in REPORTS.iterdir() if path.is_dir()} - {"predictions", FOLDER}
    assert folders == {published.name for published in PUBLISHED}


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.name)
def test_an_entry_has_question_answer_picture_command_and_link(published: Published) -> None:
    entry = next(
        part
        for part in page(REPORTS).split("### ")
        if f"]({published.name}/{published.page})" in part.split("\n")[0]
    )
    title, answer, picture, command = entry.strip().split("\n\n")[:4]
    assert title.startswith("[")
    assert answer.endswith(".")
    assert 'alt="' in picture
    assert command.startswith("`")


def package(reports: Path, device: str, *, is_stub: bool = False) -> Path:
    """What a user sends of a machine with this device, as far as it is checked."""
    folder = reports / FOLDER / "2xa100"
    record = make_record(label="ddp")
    ranks = [rank.model_copy(update={"device_name": device}) for rank in record.ranks]
    ((file, _),) = written(reports / "made", record.model_copy(update={"ranks": ranks}))
    archive = folder / "at-size" / ARCHIVE_NAME
    archive.parent.mkdir(parents=True)
    runs = archive_runs(read_runs([file])[0], archive)
    write_report(runs, archive.with_name("report.md"), folders=[archive])
    document = {
        "devices": [A100, A100], "is_stub": is_stub, "torch": "torch 2.13.0+cu130", "failed": ["norm"],
    }  # fmt: skip
    (folder / "doctor.json").write_text(json.dumps(document))
    return folder


def test_a_package_that_was_sent_is_shown_with_its_machine(tmp_path: Path) -> None:
    assert problems(package(tmp_path, A100)) == []
    link = "[at-size](gpu/2xa100/at-size/report.md)"
    assert section(tmp_path).splitlines()[-1] == f"- 2 x {A100}, torch 2.13.0+cu130: failed: norm; {link}"


def test_a_package_of_other_devices_or_edited_records_is_refused(tmp_path: Path) -> None:
    assert "ran on CUDA stub" in problems(package(tmp_path / "other", "CUDA stub"))[0]
    assert problems(package(tmp_path / "stub", A100, is_stub=True)) == ["doctor.json names no GPU"]
    edited = package(tmp_path / "edited", A100)
    report = edited / "at-size" / "report.md"
    report.write_text(report.read_text(encoding="utf-8").replace("| ddp", "| fsdp", 1), encoding="utf-8")
    assert problems(edited)


def test_packages_that_users_sent_hold() -> None:
    assert {folder.name: found for folder in sent(REPORTS) if (found := problems(folder))} == {}


def test_while_nobody_has_sent_one_the_pages_say_so() -> None:
    shown = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    nothing = "It has not run on a GPU yet: its measurements are of CPU ranks"
    assert (nothing in shown, NONE in page(REPORTS)) == (not sent(REPORTS), not sent(REPORTS))
