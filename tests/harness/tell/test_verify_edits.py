"""Edits of a report, its list of records, its records and its pictures: each is named."""

import re
import shutil
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.record.store import write_record
from harness.tell.report import write_report
from harness.tell.verify import verify
from tests.harness.tell.published import edit, found, line_of_picture, point_to_the_list, write_runs
from tests.records import LOSSES, make_record, make_steps


def lines_of(path: Path, beginning: str) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith(beginning)]


def test_rows_in_another_order_are_named(copy: Path) -> None:
    for name, begin in (("report.md", "| {} | "), ("report.details.md", "| {} | 2 | ok")):
        ddp, fsdp = (lines_of(copy / name, begin.format(label))[0] for label in ("ddp", "fsdp"))
        line = edit(copy / name, f"{ddp}\n{fsdp}", f"{fsdp}\n{ddp}")
        problems = [problem for problem in verify(copy / "report.md").problems if problem.file == name]
        assert {line - 1, line + 1} == {problem.line for problem in problems}


@pytest.mark.parametrize(
    ("suffix", "edits"),
    [
        (
            "details.md",
            {
                "| peak MB/rank (spread) |": "| peak GB/rank (spread) |",
                "| least | most |": "| most | least |",
                "speed: each cell": "speed: no cell",
                "MB is 1e6 bytes": "MB is 1e9 bytes",
                "parameter_dtype: float32": "parameter_dtype: bfloat16",
                "<details><summary>ddp, 2 ranks": "<details open><summary>ddp, 2 ranks",
                "harness compare --backends ddp": "harness compare --backends ddp --set training.seed=1",
                "## Results": "## Results <!-- of the best -->, best",
                "# Details": "\ufeff# Details",
                "| fsdp | 2 |": "| fsdp\u200b | 2 |",
                "## Records\n": "## Records\r\n",
            },
        ),
        (
            "md",
            {
                "| peak MB/rank |": "| peak GB/rank |",
                "CPU ranks over gloo": "GPU ranks over nccl",
                "largest difference of a loss": "least difference of a loss",
                "report.loss.svg": "report.memory.svg",
                "details.md#records": "details.md#job",
                "## Results": "## Results <!-- of the best -->, best",
                "# model": "\ufeff# model",
                "| fsdp | ": "| fsdp\u200b | ",
                " -->\n": " -->",
            },
        ),
        (
            "html",
            {
                "<th scope": "<th hidden scope",
                "display: block": "display: none",
                "upwards ? order : -order": "upwards ? -order : order",
                'data-value="': 'data-value="9',
                "default-src 'none'": "default-src *",
                '"ranks":2': '"ranks":4',
                'id="vega">H4s': 'id="vega">H4t',
                'data-cells="1"': 'data-cells="2"',
                'name="backend" value="ddp"': 'name="backend" value="fsdp"',
                "</html>": "<p>Approved.</html>",
            },
        ),
    ],
)
def test_every_other_edit_is_named(suffix: str, edits: dict[str, str], copy: Path) -> None:
    path = copy / f"report.{suffix}"
    lines = {(path.name, edit(path, old, new)) for old, new in edits.items()}
    report = copy / path.name.replace(".details", "")
    assert {(problem.file, problem.line) for problem in verify(report).problems} == lines


def test_details_are_checked_with_their_report(copy: Path) -> None:
    with pytest.raises(HarnessError, match=r"checked with the report it belongs to; verify .*report\.md"):
        verify(copy / "report.details.md")


def test_missing_details_are_named(copy: Path) -> None:
    (copy / "report.details.md").unlink()
    (problem,) = found(verify(copy / "report.md"))
    assert "report.details.md is missing next to the report" in problem


def test_removed_finding_is_named(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    worse = make_record(label="zero1", steps=make_steps([loss + 1 for loss in LOSSES]), run_id="worse")
    (tmp_path / "runs" / "worse").mkdir()
    runs.append((write_record(tmp_path / "runs" / "worse", worse), worse))
    report = write_report(runs, tmp_path / "report.md")
    for name, begin in (
        ("report.md", "| Warning: diverged | zero1"),
        ("report.details.md", "- **diverged**: zero1"),
    ):
        path = report.with_name(name)
        (finding,) = lines_of(path, begin)
        line = edit(path, f"{finding}\n", "")
        problems = [problem for problem in verify(report).problems if problem.file == path.name]
        assert any(p.line in (line - 1, line) and "missing" in p.what for p in problems)


def test_status_that_only_the_list_of_records_tells_is_checked(copy: Path) -> None:
    """The list and the table that is made of it agree; the record does not."""
    text = (copy / "report.manifest.json").read_text()
    changed = re.sub(r'("run_id": "run-ddp-1",\s*"status": )"ok"', r'\1"failed"', text)
    (copy / "report.manifest.json").write_text(changed)
    point_to_the_list(copy)
    edit(copy / "report.details.md", "| run-ddp-1 | ok |", "| run-ddp-1 | failed |")
    (problem,) = verify(copy / "report.md").problems
    assert "is of run run-ddp-1, ok; listed as run run-ddp-1, failed" in problem.what


def test_record_replaced_by_another_under_its_name_is_named(copy: Path) -> None:
    path = copy / "runs" / "run-ddp-1"
    better = make_record(label="ddp", run_id="run-ddp-1", repeat=1, steps=make_steps(seconds=0.1))
    write_record(path, better)
    assert "record runs/run-ddp-1/record.json was changed" in found(verify(copy / "report.md"))[0]


@pytest.mark.parametrize("baseline", [False, True])
def test_run_that_counts_twice_is_named(baseline: bool, tmp_path: Path) -> None:
    """Copies of one good run would pass for repeats."""
    runs = write_runs(tmp_path)
    shutil.copytree(tmp_path / "runs" / "run-ddp-0", tmp_path / "runs" / "again")
    twice = [*runs, (tmp_path / "runs" / "again" / "record.json", runs[1][1])]
    report = write_report(twice, tmp_path / "report.md", baseline=runs if baseline else [])
    (problem,) = verify(report).problems
    assert "again/record.json is of the same run as runs/run-ddp-0/record.json" in problem.what


def test_digests_of_pictures_that_were_edited_are_named(copy: Path) -> None:
    """Else --pictures-by-digest would accept another picture later."""
    for name, listed in (("report.md", "report.manifest.json"), ("report.html", "report.html")):
        digest = re.findall(r'svg": ?"([0-9a-f]{64})', (copy / listed).read_text())[0]
        line = edit(copy / listed, digest, "0" * 64)
        if listed != name:
            line = point_to_the_list(copy)
        problems = verify(copy / name).problems
        assert [(p.line, "digests" in p.what) for p in problems] == [(line, True)]


def test_png_that_shows_something_else_than_its_first_frame_is_named(copy: Path) -> None:
    from PIL import Image

    path = copy / "report.loss.png"
    with Image.open(path) as image:
        true = image.convert("RGBA")
    for changes in (
        {"save_all": True, "append_images": [Image.new("RGBA", true.size, "red")]},
        {"icc_profile": b"another profile"},
    ):
        true.save(path, **changes)
        line = line_of_picture(copy, "loss", "report.tex")
        what = f"{line}: {path.name} is not the picture that the records give"
        assert found(verify(copy / "report.tex")) == [what]


@pytest.mark.parametrize("suffix", ["md", "html", "csv", "json", "tex"])
def test_name_that_looks_like_a_list_of_records_is_none(suffix: str, tmp_path: Path) -> None:
    line = 'harness-report: {"records": []}'
    record = make_record(
        command=["harness", f'\n<!-- {line} -->\n% {line}\n{line}\n "harness-report": {{}}\n']
    )
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    report = write_report([(write_record(path, record), record)], tmp_path / f"report.{suffix}")
    assert found(verify(report)) == []


def test_converted_line_ends_are_one_problem(copy: Path) -> None:
    for name in ("report.md", "report.html", "report.tex"):
        path = copy / name
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
        (problem,) = found(verify(path))
        assert problem.startswith(f"{name}, line 1: lines end in CRLF")


def test_a_folder_is_told_from_a_report(copy: Path) -> None:
    with pytest.raises(HarnessError, match=r"is a folder; give the report in it, such as .*report\.md"):
        verify(copy)


def test_a_picture_that_the_report_does_not_show_is_named(copy: Path) -> None:
    for name, suffix in (("report.md", "svg"), ("report.tex", "png")):
        shutil.copy(copy / f"report.loss.{suffix}", copy / f"report.weak-scaling.{suffix}")
        (problem,) = verify(copy / name).problems
        assert f"picture report.weak-scaling.{suffix} is named as one of this report" in problem.what
    assert not verify(copy / "report.html").problems


def test_records_that_were_left_out_are_told(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    write_report(runs[:-1], tmp_path / "report.md")
    result = verify(tmp_path / "report.md")
    assert not result.problems
    assert any("1 record in the same folder: not part of the report" in note for note in result.notes)


def test_a_report_that_is_written_again_removes_pictures_that_it_no_longer_shows(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    report = write_report(runs, tmp_path / "report.md")
    before = {path.name for path in tmp_path.glob("report.*.svg")}
    shutil.copy(tmp_path / "report.loss.svg", tmp_path / "report.notes.svg")
    (tmp_path / "report.time.svg").write_bytes(b"mine")
    write_report(runs[:1], report)
    after = {path.name for path in tmp_path.glob("report.*.svg")}
    shown = {f"{name}.svg" for name in re.findall(r"\((report[^)]*)[.]svg\)", report.read_text())}
    assert shown < before
    assert after == shown | {"report.notes.svg"} | ({"report.time.svg"} - shown)
