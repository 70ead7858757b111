"""docs/faults.md and its list hold what tests plant, each with a finding and a test that exist."""

from __future__ import annotations

from pathlib import Path

from benchmarks.packed_page import between
from harness.judge.wording import entries

from .page import listed, page, rows

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "faults.md"
LIST = ROOT / "docs" / "faults" / "planted.csv"


def test_the_page_is_what_the_lists_give(update_golden: bool) -> None:
    held = DOCUMENT.read_text(encoding="utf-8")
    written = between(held, "<!-- traps -->", "<!-- end of traps -->", page())
    if update_golden:
        DOCUMENT.write_text(written, encoding="utf-8")
        LIST.write_text(listed(), encoding="utf-8")
    assert update_golden or (held == written and LIST.read_text(encoding="utf-8") == listed())


def test_every_mistake_has_a_name_of_its_own_a_finding_and_a_test_that_exist() -> None:
    names = [row[0] for row in rows()]
    assert sorted(set(names)) == sorted(names)
    for *_, finding, test in rows():
        file, _, function = test.strip("`").partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")
        assert finding.strip("`") in {"unsupported", *entries()}
