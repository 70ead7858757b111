"""The gallery and the first screen of README.md follow from the published reports."""

from pathlib import Path

import pytest

from benchmarks.published_reports import PUBLISHED, Published
from benchmarks.reports_page import page, with_results

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "reports"


def test_the_gallery_is_what_the_reports_give() -> None:
    assert (REPORTS / "README.md").read_text(encoding="utf-8") == page(REPORTS)


def test_readme_opens_with_the_default_report() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == with_results(text, REPORTS)
    assert "| ddp |" in text.split("## Start")[0]


def test_readme_shows_first_what_carries_over_and_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (head,) = (line for line in text.splitlines() if line.startswith("| strategy "))
    assert head.index("model states") < head.index("sent") < head.index("parity") < head.index("speed")
    assert len(text.split()) <= 900


def test_every_folder_of_reports_is_in_the_gallery() -> None:
    folders = {path.name for path in REPORTS.iterdir() if path.is_dir()} - {"predictions"}
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
