"""What the published records show; each behaviour that they hold is named there."""

import pytest

from harness.judge.surprises.rules import surprises
from tests.records import published_comparison


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
    found = surprises(published_comparison(name).comparable)
    assert expected <= {surprise.behaviour.id for surprise in found}
    assert all(surprise.versions for surprise in found)
