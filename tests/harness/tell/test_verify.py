"""A report and what may be done to it, its records, its pictures: `verify` names each edit."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.record import Record, store
from harness.tell.manifest import Manifest, digest
from harness.tell.report import details_name, write_report
from harness.tell.verify import Verification, pictures_within, verify
from harness.tell.writers.html import data_address
from tests.records import LOSSES, make_record, make_steps, make_weights, saved, written

pytestmark = pytest.mark.long(seconds=40)
Runs = list[tuple[Path, Record]]


def write_runs(folder: Path, slower: float = 0.0) -> Runs:
    """Three repeats of two backends and a reference."""
    records = [make_record()]
    for label, seconds in (("ddp", 0.5), ("fsdp", 0.6)):
        records += [
            make_record(
                label=label, repeat=n, run_id=f"run-{label}-{n}",
                steps=make_steps([loss + 1e-6 for loss in LOSSES], seconds=seconds + n / 100 + slower),
                final_weights=make_weights("c" * 64),
            )
            for n in range(3)
        ]  # fmt: skip
    return written(folder / "runs", *records)


def edit(path: Path, old: str, new: str) -> int:
    """Replace the first occurrence; returns the number of its line."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return text[: text.index(old)].count("\n") + 1


def point_to_the_list(folder: Path) -> int:
    """Have report.md name the digest of its list of records as it is now; returns the number of its line."""
    digest = hashlib.sha256((folder / "report.manifest.json").read_bytes()).hexdigest()
    text = (folder / "report.md").read_text(encoding="utf-8")
    given = text.rpartition('"sha256":"')[2].partition('"')[0]
    return edit(folder / "report.md", given, digest)


def found(result: Verification) -> list[str]:
    return [str(problem) for problem in result.problems]


def line_of_picture(folder: Path, key: str) -> str:
    """Where a report shows a picture: 'README.md, line 7'."""
    lines = (folder / "README.md").read_text(encoding="utf-8").split("\n")
    (number,) = [number for number, line in enumerate(lines, 1) if f"](report.{key}.svg)" in line]
    return f"README.md, line {number}"


FORMS = ("md", "html", "csv", "json")


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report in every format, of runs in a folder and in an archive, by the name of either."""
    folders = {name: tmp_path_factory.mktemp("reports") for name in ("runs", store.ARCHIVE_NAME)}
    for name, folder in folders.items():
        runs = write_runs(folder)
        if name == store.ARCHIVE_NAME:
            runs = store.archive_runs(runs, folder / name)
            shutil.rmtree(folder / "runs")
        for form in FORMS:
            write_report(runs, folder / f"report.{form}", folders=[folder / name])
    return folders


@pytest.fixture
def copy(reports: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(reports["runs"], tmp_path / "copy"))


class Stored:
    """A copy of the report, and its records by their path in the folder or archive of runs."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.runs = folder, name, folder / name
        if self.runs.is_dir():
            paths = sorted(self.runs.rglob(store.RECORD_NAME))
            self.records = {path.relative_to(self.runs).as_posix(): path.read_bytes() for path in paths}
        else:
            found = store.read_archive(self.runs, named=store.RECORD_NAME)
            self.records = {path.removeprefix("runs/"): data for path, data in found.items()}

    def found(self) -> Verification:
        """What is found once the records are stored as they are now."""
        if self.runs.is_file():
            store.write_archive(self.runs, self.records, folder="runs")
        else:
            shutil.rmtree(self.runs)
            for name, data in self.records.items():
                (self.runs / name).parent.mkdir(parents=True)
                (self.runs / name).write_bytes(data)
        return verify(self.folder / "report.md")


@pytest.fixture(params=["runs", store.ARCHIVE_NAME])
def stored(request: pytest.FixtureRequest, reports: dict[str, Path], tmp_path: Path) -> Stored:
    return Stored(Path(shutil.copytree(reports[request.param], tmp_path / "copy")), request.param)


RUN = f"run-ddp-1/{store.RECORD_NAME}"


@pytest.mark.parametrize("form", FORMS)
def test_report_that_moved_with_its_records_holds(stored: Stored, form: str) -> None:
    result = verify(stored.folder / f"report.{form}")
    assert found(result) == result.notes == []
    assert "7 records unchanged" in result.summary


def test_records_that_are_stored_again_hold_and_space_in_one_is_an_edit(stored: Stored) -> None:
    assert found(stored.found()) == []
    stored.records[RUN] += b"\n"
    (problem,) = stored.found().problems
    assert f"record {stored.name}/{RUN} was changed" in problem.what
    assert problem.line is not None
    assert "run-ddp-1" in (stored.folder / problem.file).read_text().splitlines()[problem.line - 1]


def test_edited_record_is_named_and_so_is_what_it_changes(stored: Stored) -> None:
    document = json.loads(stored.records[RUN])
    document["steps"][2]["seconds"] = 0.1
    stored.records[RUN] = json.dumps(document).encode()
    problems = found(stored.found())
    assert any(f"record {stored.name}/{RUN} was changed" in problem for problem in problems)
    assert any("the records give" in problem for problem in problems)


def test_removed_record_is_named(stored: Stored) -> None:
    del stored.records[RUN]
    result = stored.found()
    assert f"record {stored.name}/{RUN} is missing" in found(result)[0]
    assert "not computed again" in result.notes[0]


@pytest.mark.parametrize("job_id", ["0123456789ab", "b" * 12])
def test_foreign_record_is_named(stored: Stored, job_id: str) -> None:
    stored.records[f"more/{store.RECORD_NAME}"] = (
        make_record(run_id="more", job_id=job_id).model_dump_json().encode()
    )
    (problem,) = stored.found().problems
    assert f"record {stored.name}/more/{store.RECORD_NAME} lies next to the records" in problem.what


def test_record_taken_out_of_report_and_list_alike_is_still_beside(stored: Stored) -> None:
    """Whoever drops an unwelcome run must delete its record too."""
    listed = stored.folder / "report.manifest.json"
    (entry,) = re.findall(rf'\{{\s*"path": "{stored.name}/run-ddp-1/[^}}]*\}},\s*', listed.read_text())
    edit(listed, entry, "")
    point_to_the_list(stored.folder)
    assert any(f"{stored.name}/{RUN} lies next to" in problem for problem in found(stored.found()))


@pytest.mark.parametrize("form", FORMS)
def test_one_digit_in_a_table_is_named_by_its_line(copy: Path, form: str) -> None:
    report = copy / f"report.{form}"
    (digit, *_) = re.findall(r"\b1,?67[89]\b", report.read_text())
    line = edit(report, digit, digit.replace("6", "5", 1))
    (problem,) = verify(report).problems
    assert (problem.file, problem.line) == (report.name, line)
    assert "the records give" in problem.what


@pytest.mark.parametrize(
    ("change", "place", "says"),
    [
        (lambda row: row + row.replace("fsdp", "best"), 1, "does not follow from the records"),
        (lambda row: "", -1, "missing"),
    ],
    ids=["added", "removed"],
)
def test_added_and_removed_rows_are_named(
    change: Callable[[str], str], place: int, says: str, copy: Path
) -> None:
    (row,) = lines_of(copy / "report.md", "| fsdp ")
    line = edit(copy / "report.md", f"{row}\n", change(f"{row}\n"))
    (problem,) = verify(copy / "report.md").problems
    assert problem.line == line + place
    assert says in problem.what


def test_other_job_beside_chosen_records_is_a_note_and_the_same_job_a_problem(tmp_path: Path) -> None:
    write_report(write_runs(tmp_path), tmp_path / "report.md")
    for run_id, job_id in (("other", "b" * 12), ("same", "0123456789ab")):
        saved(tmp_path / "runs", run_id, job_id=job_id)
    result = verify(tmp_path / "report.md")
    assert ["runs/same/record.json" in problem for problem in found(result)] == [True]
    assert ["runs/other/record.json" in note for note in result.notes] == [True]


def test_record_that_was_left_out_when_the_report_was_written_is_stated_in_it(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    report = write_report(runs[:-1], tmp_path / "report.md")
    details = report.with_name(details_name(report)).read_text()
    assert "1 other record lies in the same folder, not part of this report" in details
    result = verify(report)
    assert found(result) == []
    assert any("1 record in the same folder: not part of the report" in note for note in result.notes)


def test_a_picture_and_details_that_are_missing_or_replaced_are_named(copy: Path) -> None:
    """Of a report that was renamed, which holds."""
    report, picture = copy / "README.md", copy / "report.loss.svg"
    (copy / "report.md").rename(report)
    assert found(verify(report)) == []
    place = line_of_picture(copy, "loss")
    picture.unlink()
    assert found(verify(report)) == [f"{place}: report.loss.svg is missing next to the report"]
    run = (copy / "runs" / "run-single-n1" / "record.json", make_record())
    shutil.copy(write_report([run], copy / "other.md").with_suffix(".loss.svg"), picture)
    assert found(verify(report)) == [f"{place}: report.loss.svg is not the picture that the records give"]
    (copy / "report.details.md").unlink()
    assert any("report.details.md is missing next to the report" in one for one in found(verify(report)))


def test_edited_picture_within_html_is_named(copy: Path) -> None:
    text = (copy / "report.html").read_text()
    code = re.search(r"base64,([A-Za-z0-9+/]{400})", text)
    assert code
    line = edit(copy / "report.html", code[1], code[1][:-1] + ("A" if code[1][-1] != "A" else "B"))
    assert [problem.line for problem in verify(copy / "report.html").problems] == [line]


@pytest.mark.parametrize(("pixels", "holds"), [(1, True), (3, False)])
def test_a_picture_within_html_may_be_drawn_with_another_version_of_the_font(
    copy: Path, pixels: int, holds: bool
) -> None:
    """As whoever has that version writes it: with the digest of what they drew."""
    path = copy / "report.html"
    text = path.read_text()
    picture = pictures_within(text)[0]
    widened = re.sub(
        rb'width="(\d+)"', lambda found: b'width="%d"' % (int(found[1]) + pixels), picture, count=1
    )
    assert digest(picture) in text
    path.write_text(
        text.replace(data_address(picture), data_address(widened)).replace(digest(picture), digest(widened))
    )
    assert (found(verify(path)) == []) == holds


@pytest.mark.parametrize(
    ("pattern", "replace", "holds"),
    [
        (r'width="(\d+)"', lambda found: f'width="{int(found[1]) + 1}"', True),
        (r'width="(\d+)"', lambda found: f'width="{int(found[1]) + 3}"', False),
        (r">(\d[\d.]*)</text>", lambda found: f">{float(found[1]) + 1}</text>", False),
        (r'd="M([\d.]+)', lambda found: f'd="M{float(found[1]) + 1}', False),
        (r'"#(\w)', lambda found: f'"#{int(found[1], 16) ^ 1:x}', False),
    ],
)
def test_svg_holds_with_another_version_of_the_font_and_not_with_other_values(
    copy: Path, pattern: str, replace: Callable[[re.Match[str]], str], holds: bool
) -> None:
    path = copy / "report.loss.svg"
    changed, count = re.subn(pattern, replace, path.read_text(), count=1)
    assert count == 1
    path.write_text(changed)
    problems = found(verify(copy / "report.md"))
    assert problems == [] if holds else any("is not the picture" in problem for problem in problems)


def drawn_by_another(folder: Path) -> None:
    for name, times in (("report.manifest.json", 1), ("report.details.md", 1), ("report.html", 2)):
        text = (folder / name).read_text()
        changed = re.sub(r"(vl-convert-python )[\w.]+\w", r"\g<1>1.2.3", text)
        assert changed.count("1.2.3") == times
        (folder / name).write_text(changed)
    point_to_the_list(folder)


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_pictures_of_another_renderer_are_compared_by_what_they_show(copy: Path, name: str) -> None:
    drawn_by_another(copy)
    result = verify(copy / name)
    assert found(result) == []
    assert "drawn by vl-convert-python 1.2.3" in result.notes[0]
    (copy / "report.loss.svg").write_text("<svg/>")
    text = (copy / "report.html").read_text()
    (copy / "report.html").write_text(re.sub(r"(base64,)[A-Za-z0-9+/=]+", r"\1PHN2Zy8+", text))
    assert found(verify(copy / name))


def test_what_is_no_report_is_said_to_be_so(copy: Path) -> None:
    with pytest.raises(HarnessError, match=r"checked with the report it belongs to; verify .*report\.md"):
        verify(copy / "report.details.md")
    with pytest.raises(HarnessError, match=r"is a folder; give the report .* such as .*report\.md"):
        verify(copy)


@pytest.mark.parametrize("change", [lambda text: "", lambda text: re.sub("harness-report.*", "", text)])
def test_file_without_its_list_of_records_is_no_report(copy: Path, change: Callable[[str], str]) -> None:
    path = copy / "report.md"
    path.write_text(change(path.read_text()))
    with pytest.raises(HarnessError, match="carries no list of its records"):
        verify(path)


def test_list_of_records_that_is_missing_or_was_changed_or_damaged_is_named(copy: Path) -> None:
    listed = copy / "report.manifest.json"
    edit(listed, '"question": "all"', '"question":  "all"')
    problems = found(verify(copy / "report.md"))
    assert "report.manifest.json, the list of records, was changed" in problems[0]
    edit(listed, '"sha256":', '"sha":')
    with pytest.raises(HarnessError, match="cannot be read"):
        verify(copy / "report.md")
    listed.unlink()
    with pytest.raises(HarnessError, match=r"needs '.*report\.manifest\.json', which lists its records"):
        verify(copy / "report.md")


def test_report_that_holds_its_list_of_records_needs_no_file_of_it(copy: Path) -> None:
    """A report written to a stream, or before the list was a file of its own."""
    text, listed = (copy / "report.md").read_text(), copy / "report.manifest.json"
    inline = Manifest.model_validate_json(listed.read_text()).line()
    listed.unlink()
    (copy / "report.md").write_text(re.sub(r"harness-report: \{.*\}", lambda _: inline, text))
    assert found(verify(copy / "report.md")) == []


def test_record_that_goes_while_it_is_reported_is_listed_as_it_was_read(tmp_path: Path) -> None:
    ((path, _), *_) = runs = store.read_runs([write_runs(tmp_path)[0][0].parents[1]])[0]
    path.rename(tmp_path / "gone")
    report = write_report(runs, tmp_path / "report.md")
    (tmp_path / "gone").rename(path)
    assert found(verify(report)) == []


@pytest.mark.parametrize("suffix", FORMS)
def test_report_with_a_baseline_is_verified_too(tmp_path: Path, suffix: str) -> None:
    before, after = write_runs(tmp_path / "before"), write_runs(tmp_path / "after", slower=0.2)
    report = write_report(after, tmp_path / f"report.{suffix}", baseline=before)
    assert found(verify(report)) == []
    edit(report, "not judged", "within noise")
    assert found(verify(report))


def test_a_lost_cell_of_a_baseline_is_verified(tmp_path: Path) -> None:
    before, after = write_runs(tmp_path / "before"), write_runs(tmp_path / "after")
    kept = [run for run in after if run[1].backend.label != "ddp"]
    report = write_report(kept, tmp_path / "report.md", baseline=before)
    assert found(verify(report)) == []
    edit(report, "Lost: ddp on 2 ranks: absent after", "Lost: ddp on 2 ranks: failed after")
    assert found(verify(report))


def test_baseline_that_is_also_the_other_side_is_computed_again(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    result = verify(write_report(runs, tmp_path / "report.md", baseline=runs))
    assert found(result) == result.notes == []
    assert "tables" in result.summary


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
                "not ranked: 3 rounds": "not ranked: 5 rounds",
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


def test_status_that_only_the_list_of_records_tells_is_checked(copy: Path) -> None:
    """The list and the table that is made of it agree; the record does not."""
    text = (copy / "report.manifest.json").read_text()
    changed = re.sub(r'("run_id": "run-ddp-1",\s*"status": )"ok"', r'\1"failed"', text)
    (copy / "report.manifest.json").write_text(changed)
    point_to_the_list(copy)
    edit(copy / "report.details.md", "| run-ddp-1 | ok |", "| run-ddp-1 | failed |")
    (problem,) = verify(copy / "report.md").problems
    assert "is of run run-ddp-1, ok; listed as run run-ddp-1, failed" in problem.what


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
    for name, listed in (("report.md", "report.manifest.json"), ("report.html", "report.html")):
        digest = re.findall(r'svg": ?"([0-9a-f]{64})', (copy / listed).read_text())[0]
        line = edit(copy / listed, digest, "0" * 64)
        if listed != name:
            line = point_to_the_list(copy)
        problems = verify(copy / name).problems
        assert [(p.line, "digests" in p.what) for p in problems] == [(line, True)]


@pytest.mark.parametrize("suffix", FORMS)
def test_name_that_looks_like_a_list_of_records_is_none(suffix: str, tmp_path: Path) -> None:
    line = 'harness-report: {"records": []}'
    record = make_record(command=["harness", f'\n<!-- {line} -->\n{line}\n "harness-report": {{}}\n'])
    report = write_report(written(tmp_path / "runs", record), tmp_path / f"report.{suffix}")
    assert found(verify(report)) == []


def test_converted_line_ends_are_one_problem_and_so_is_a_picture_that_is_not_shown(copy: Path) -> None:
    shutil.copy(copy / "report.loss.svg", copy / "report.weak-scaling.svg")
    (problem,) = verify(copy / "report.md").problems
    assert "picture report.weak-scaling.svg is named as one of this report" in problem.what
    assert not verify(copy / "report.html").problems
    (copy / "report.weak-scaling.svg").unlink()
    for name in ("report.md", "report.html"):
        path = copy / name
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
        (problem,) = found(verify(path))
        assert problem.startswith(f"{name}, line 1: lines end in CRLF")


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


@pytest.mark.parametrize("damage", [None, b"", b"no archive"])
def test_archive_that_is_missing_or_damaged_is_one_line(
    damage: bytes | None, reports: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(reports[store.ARCHIVE_NAME], tmp_path, dirs_exist_ok=True)
    (tmp_path / store.ARCHIVE_NAME).unlink()
    if damage is not None:
        (tmp_path / store.ARCHIVE_NAME).write_bytes(damage)
    with pytest.raises(HarnessError, match=rf"archive '.*{store.ARCHIVE_NAME}' (is|cannot)") as error:
        verify(tmp_path / "report.md")
    assert "\n" not in str(error.value)
