"""One representative of each kind in every run of the tests; the other cases wait for the exhaustive one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

EXHAUSTIVE = pytest.mark.exhaustive


def first(few: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`, all but those of `few` marked; each of `few` must be among them."""
    cases = list(cases)
    assert all(case in cases for case in few), [case for case in few if case not in cases]
    return [case if case in few else _marked(case) for case in cases]


def _marked(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=EXHAUSTIVE)
