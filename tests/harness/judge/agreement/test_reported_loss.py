"""Where the loss that a rank reports first leaves the one it computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.judge.agreement.divergence_causes import altered_step


def record(*ranks: tuple[list[Any], list[Any]]) -> Any:
    parts = [SimpleNamespace(loss_sums=given, computed_loss_sums=own) for given, own in ranks]
    return SimpleNamespace(ranks=parts, steps=[None] * 3)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])], None),
        ([([1.0, 2.0, 3.0], [1.0, 2.0, 3.0 * (1 + 5e-7)])], None),
        ([([1.0, 2.0, 3.0], [1.0, 2.0, 3.0 * (1 + 5e-6)])], 2),
        ([([1.0, 2.0, 3.0],) * 2, ([1.0, 5.0, 3.0], [1.0, 2.0, 4.0])], 1),
        ([([1.0, 2.0, 3.0],) * 2, ([1.0], [9.0])], 0),
        ([([1.0, 2.0, 3.0],) * 2, ([1.0, 5.0], [1.0])], None),
        # A step in which a rank has no number is not judged.
        ([([None, 2.0, 3.0], [1.0, 2.0, 3.0]), ([1.0, 2.0, 9.0], [7.0, 2.0, 3.0])], 2),
        ([([1.0, 2.0, 3.0], [])], None),
        ([], None),
    ],
)
def test_first_altered_step(ranks: list[tuple[list[Any], list[Any]]], expected: int | None) -> None:
    assert altered_step(record(*ranks)) == expected
