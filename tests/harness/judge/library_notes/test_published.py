"""What the published records show; each library note that they hold is named there."""

import pytest

from harness.judge.library_notes import library_notes
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
    found = library_notes(published_comparison(name).comparable)
    assert expected <= {note.library_note.id for note in found}
    assert all(note.versions for note in found)
