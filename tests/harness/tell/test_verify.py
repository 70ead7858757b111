import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.record.store import write_record
from harness.tell.manifest import Manifest, digest
from harness.tell.report import SUFFIXES, details_name, write_report
from harness.tell.verify import pictures_within, same_picture, verify
from harness.tell.writers.html import data_address
from tests.harness.tell.published import edit, found, line_of_picture, point_to_the_list, write_runs
from tests.records import make_record

pytestmark = pytest.mark.long(seconds=10)


@pytest.mark.parametrize("name", ["report.md", "report.html", "report.csv", "report.json", "report.tex"])
def test_untouched_report_holds(published: Path, name: str) -> None:
    result = verify(published / name)
    assert found(result) == []
    assert result.notes == []


def test_report_that_moved_with_its_records_holds(copy: Path) -> None:
    assert found(verify(copy / "report.md")) == []


def test_renamed_report_holds(copy: Path) -> None:
    (copy / "report.md").rename(copy / "README.md")
    assert found(verify(copy / "README.md")) == []


@pytest.mark.parametrize("name", ["report.md", "report.html", "report.csv", "report.json", "report.tex"])
def test_one_digit_in_a_table_is_named_by_its_line(copy: Path, name: str) -> None:
    text = (copy / name).read_text()
    digit = next(re.finditer(r"\b1,?67[89]\b", text)).group()
    line = edit(copy / name, digit, digit.replace("6", "5", 1))
    result = verify(copy / name)
    assert [problem.line for problem in result.problems] == [line]
    assert result.problems[0].file == name
    assert "the records give" in result.problems[0].what


def test_an_answer_that_was_changed_is_named(copy: Path) -> None:
    line = edit(copy / "report.md", "not ranked: 3 of 6 rounds", "not ranked: 5 of 6 rounds")
    assert found(verify(copy / "report.md"))[0].startswith(f"report.md, line {line}: reads")


def test_added_row_is_named(copy: Path) -> None:
    text = (copy / "report.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| fsdp "))
    line = edit(copy / "report.md", row, f"{row}\n{row.replace('fsdp', 'best')}")
    (problem,) = verify(copy / "report.md").problems
    assert problem.line == line + 1
    assert "does not follow from the records" in problem.what


def test_removed_row_is_named(copy: Path) -> None:
    text = (copy / "report.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| fsdp "))
    line = edit(copy / "report.md", f"{row}\n", "")
    (problem,) = verify(copy / "report.md").problems
    assert problem.line == line - 1
    assert "missing" in problem.what


def test_edited_record_is_named_and_so_is_what_it_changes(copy: Path) -> None:
    path = copy / "runs" / "run-ddp-1" / "record.json"
    document = json.loads(path.read_text())
    document["steps"][2]["seconds"] = 0.1
    path.write_text(json.dumps(document))
    problems = found(verify(copy / "report.md"))
    assert any("record runs/run-ddp-1/record.json was changed" in problem for problem in problems)
    assert any("the records give" in problem for problem in problems)


def test_space_in_a_record_is_an_edit(copy: Path) -> None:
    path = copy / "runs" / "run-ddp-1" / "record.json"
    path.write_text(path.read_text() + "\n")
    (problem,) = verify(copy / "report.md").problems
    assert "was changed" in problem.what
    assert problem.line is not None
    assert "run-ddp-1" in (copy / problem.file).read_text().splitlines()[problem.line - 1]


def test_removed_record_is_named(copy: Path) -> None:
    shutil.rmtree(copy / "runs" / "run-ddp-1")
    result = verify(copy / "report.md")
    assert "record runs/run-ddp-1/record.json is missing" in found(result)[0]
    assert "not computed again" in result.notes[0]


def test_foreign_record_is_named(copy: Path) -> None:
    directory = copy / "runs" / "another"
    directory.mkdir()
    write_record(directory, make_record(run_id="another", job_id="b" * 12))
    (problem,) = verify(copy / "report.md").problems
    assert "runs/another/record.json" in problem.what


def test_other_job_beside_chosen_records_is_a_note_and_the_same_job_a_problem(tmp_path: Path) -> None:
    write_report(write_runs(tmp_path), tmp_path / "report.md")
    for run_id, job_id in (("other", "b" * 12), ("same", "0123456789ab")):
        (tmp_path / "runs" / run_id).mkdir()
        write_record(tmp_path / "runs" / run_id, make_record(run_id=run_id, job_id=job_id))
    result = verify(tmp_path / "report.md")
    assert ["runs/same/record.json" in problem for problem in found(result)] == [True]
    assert ["runs/other/record.json" in note for note in result.notes] == [True]


def test_record_that_was_left_out_when_the_report_was_written_is_stated_in_it(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    report = write_report(runs[:-1], tmp_path / "report.md")
    details = report.with_name(details_name(report)).read_text()
    assert "1 other record lies in the same folder, not part of this report" in details
    assert found(verify(report)) == []


@pytest.mark.parametrize(("name", "suffix"), [("report.md", "svg"), ("report.tex", "png")])
def test_replaced_picture_is_named(copy: Path, name: str, suffix: str) -> None:
    run = (copy / "runs" / "run-single-n1" / "record.json", make_record())
    other = write_report([run], copy / name.replace("report", "other"))
    shutil.copy(other.with_suffix(f".loss.{suffix}"), copy / f"report.loss.{suffix}")
    line = line_of_picture(copy, "loss", name)
    what = f"{line}: report.loss.{suffix} is not the picture that the records give"
    assert found(verify(copy / name)) == [what]


def test_edited_picture_within_html_is_named(copy: Path) -> None:
    text = (copy / "report.html").read_text()
    code = re.search(r"base64,([A-Za-z0-9+/]{400})", text)
    assert code
    line = edit(copy / "report.html", code[1], code[1][:-1] + ("A" if code[1][-1] != "A" else "B"))
    assert [problem.line for problem in verify(copy / "report.html").problems] == [line]


def test_missing_picture_is_named(copy: Path) -> None:
    for name, picture in (("report.md", "report.loss.svg"), ("report.tex", "report.loss.png")):
        (copy / picture).unlink()
        assert found(verify(copy / name)) == [
            f"{line_of_picture(copy, 'loss', name)}: {picture} is missing next to the report"
        ]


def test_png_that_was_only_compressed_again_holds(copy: Path) -> None:
    from PIL import Image

    with Image.open(copy / "report.loss.png") as image:
        pixels = image.copy()
    pixels.save(copy / "report.loss.png", compress_level=1)
    assert found(verify(copy / "report.tex")) == []


def edit_picture(folder: Path, pattern: str, replace: Callable[[re.Match[str]], str]) -> None:
    path = folder / "report.loss.svg"
    changed, count = re.subn(pattern, replace, path.read_text(), count=1)
    assert count == 1
    path.write_text(changed)


def test_svg_drawn_with_another_version_of_the_font_holds(copy: Path) -> None:
    edit_picture(copy, r'width="(\d+)"', lambda found: f'width="{int(found[1]) + 1}"')
    assert found(verify(copy / "report.md")) == []
    assert same_picture("a.svg", b'<g x="1"><text>5</text>', b'<g x="2.5"><text>5</text>')


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
    ("pattern", "replace"),
    [
        (r'width="(\d+)"', lambda found: f'width="{int(found[1]) + 3}"'),
        (r">(\d[\d.]*)</text>", lambda found: f">{float(found[1]) + 1}</text>"),
        (r'd="M([\d.]+)', lambda found: f'd="M{float(found[1]) + 1}'),
        (r'"#(\w)', lambda found: f'"#{int(found[1], 16) ^ 1:x}'),
    ],
)
def test_svg_of_other_values_does_not_hold(copy: Path, pattern: str, replace) -> None:
    edit_picture(copy, pattern, replace)
    assert any("is not the picture" in problem.what for problem in verify(copy / "report.md").problems)


def drawn_by_another(folder: Path) -> None:
    for name, times in (("report.manifest.json", 1), ("report.details.md", 1), ("report.html", 2)):
        text = (folder / name).read_text()
        changed = re.sub(r"(vl-convert-python )[\w.]+\w", r"\g<1>1.2.3", text)
        assert changed.count("1.2.3") == times
        (folder / name).write_text(changed)
    point_to_the_list(folder)


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_pictures_of_another_renderer_are_not_called_replaced(copy: Path, name: str) -> None:
    drawn_by_another(copy)
    (problem,) = verify(copy / name).problems
    assert "drawn by vl-convert-python 1.2.3" in problem.what
    assert "--pictures-by-digest" in problem.what
    result = verify(copy / name, pictures_by_digest=True)
    assert found(result) == []
    assert "by their digests only" in result.notes[0]


def test_digest_of_a_replaced_picture_of_another_renderer_does_not_fit(copy: Path) -> None:
    drawn_by_another(copy)
    (copy / "report.loss.svg").write_text("<svg/>")
    text = (copy / "report.html").read_text()
    (copy / "report.html").write_text(re.sub(r"(base64,)[A-Za-z0-9+/=]+", r"\1PHN2Zy8+", text))
    for name in ("report.md", "report.html"):
        assert "digest" in found(verify(copy / name, pictures_by_digest=True))[0]


@pytest.mark.parametrize("change", [lambda text: "", lambda text: re.sub("harness-report.*", "", text)])
def test_file_without_its_list_of_records_is_no_report(copy: Path, change: Callable[[str], str]) -> None:
    path = copy / "report.md"
    path.write_text(change(path.read_text()))
    with pytest.raises(HarnessError, match="carries no list of its records"):
        verify(path)


def test_list_of_records_that_was_damaged_is_an_error(copy: Path) -> None:
    edit(copy / "report.manifest.json", '"sha256":', '"sha":')
    with pytest.raises(HarnessError, match="cannot be read"):
        verify(copy / "report.md")


def test_list_of_records_that_is_missing_or_was_changed_is_named(copy: Path) -> None:
    listed = copy / "report.manifest.json"
    edit(listed, '"question": "all"', '"question":  "all"')
    problems = found(verify(copy / "report.md"))
    assert "report.manifest.json, the list of records, was changed" in problems[0]
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


def test_record_taken_out_of_report_and_list_alike_is_still_beside(copy: Path) -> None:
    """Whoever drops an unwelcome run must delete its record too."""
    path = copy / "report.manifest.json"
    text = path.read_text()
    path.write_text(re.sub(r'\{\s*"path": "runs/run-ddp-1/[^}]*\},\s*', "", text))
    point_to_the_list(copy)
    path = copy / "report.md"
    assert any("runs/run-ddp-1/record.json" in p and "lies next to" in p for p in found(verify(path)))


def test_every_ending_of_a_report_has_a_format() -> None:
    assert set(SUFFIXES.values()) == {"md", "html", "csv", "json", "latex"}


@pytest.mark.parametrize("suffix", ["md", "html", "csv", "json", "tex"])
def test_report_with_a_baseline_is_verified_too(tmp_path: Path, suffix: str) -> None:
    before, after = write_runs(tmp_path / "before"), write_runs(tmp_path / "after", slower=0.2)
    report = write_report(after, tmp_path / f"report.{suffix}", baseline=before)
    assert found(verify(report)) == []
    edit(report, "not judged", "within noise")
    assert found(verify(report))


def test_baseline_that_is_also_the_other_side_is_computed_again(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    result = verify(write_report(runs, tmp_path / "report.md", baseline=runs))
    assert found(result) == result.notes == []
    assert "tables" in result.summary
