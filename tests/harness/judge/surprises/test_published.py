"""What the published records show; each behaviour that they hold is named there."""

from pathlib import Path

import pytest

from harness.judge.comparison import Comparison
from harness.judge.surprises import surprises
from harness.record.record_files import ARCHIVE_NAME
from harness.record.store import read_runs

REPORTS = Path(__file__).parents[4] / "reports"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "default",
            {
                "gradients-all-reduced", "transport-emulates", "clipping-set-by-harness", "gathers-by-module",
                "second-fp32-copy", "root-not-resharded", "weights-cut-between-steps",
                "gradients-cut-at-stage-1", "persistent-reduction-bucket",
            },
        ),
        ("explain-clipping", {"clipped-by-default"}),
        ("explain-master-weights", {"masters-in-low-precision", "gradients-add-up-in-fp32"}),
    ],
)  # fmt: skip
def test_published_records_show_what_surprises(name: str, expected: set[str]) -> None:
    runs, problems = read_runs([REPORTS / name / ARCHIVE_NAME])
    assert not problems
    found = surprises(Comparison(record for _, record in runs).comparable)
    assert expected <= {surprise.behaviour.id for surprise in found}
    assert all(surprise.versions for surprise in found)
