"""Representatives of each kind in every run of the tests; other cases wait for a longer one."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

EXHAUSTIVE = pytest.mark.exhaustive
COSTLY = pytest.mark.costly


def first(few: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`, all but those of `few` exhaustive; each of `few` must be among them."""
    return _marked(few, cases, EXHAUSTIVE)


def cheap(few: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`, all but those of `few` costly; each of `few` must be among them."""
    return _marked(few, cases, COSTLY)


def _marked(few: Collection[Any], cases: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    cases = list(cases)
    assert all(case in cases for case in few), [case for case in few if case not in cases]
    return [case if case in few else pytest.param(*_values(case), marks=mark) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
