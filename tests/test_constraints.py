"""The pinned versions install under every Python 3.11, that of Debian 12 included."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
PINNED = re.findall(r"^([\w.-]+)==", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
OLDEST = "3.11.2"
"""Debian 12's; `requires-python` says 3.11."""


@pytest.mark.parametrize("name", PINNED)
def test_a_pinned_version_takes_the_oldest_python(name: str) -> None:
    try:
        required = distribution(name).metadata.get("Requires-Python") or ""
    except PackageNotFoundError:
        pytest.skip("not installed: this environment leaves an extra out, or is another system's")
    assert OLDEST in SpecifierSet(required), f"{name} needs Python {required}: pin an older version"
