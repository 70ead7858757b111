"""Each repair in tests/gpu_stub/README.md names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests/gpu_stub/README.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| fault")]
CITED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_each_row_says_before_source_after_and_test() -> None:
    assert len(ROWS) > 20
    for row in ROWS:
        _, before, source, after, tests = (cell.strip() for cell in row.strip("|").split(" | "))
        assert before
        assert source in {"stub", "code"}
        assert after
        assert CITED.search(tests) or tests.strip("| ") == "the same"


@pytest.mark.parametrize(("file", "name"), sorted({found for row in ROWS for found in CITED.findall(row)}))
def test_a_named_test_exists(file: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / file).read_text()
