"""Links between the repository's Markdown files resolve; addresses elsewhere are well-formed."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.markdown import FILES, NAMES, ROOT, anchors, links


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_link_of_a_file_resolves(path: Path) -> None:
    assert [wrong for target in links(path) if (wrong := broken(path, target))] == []


def broken(path: Path, target: str) -> str | None:
    """What is wrong with a link; None: nothing."""
    address = urlsplit(target)
    if address.scheme:
        well_formed = address.scheme in ("http", "https") and "." in address.netloc and " " not in target
        return None if well_formed else f"'{target}' is no web address"
    linked = (path.parent / unquote(address.path)).resolve() if address.path else path
    if not linked.is_relative_to(ROOT):
        return f"'{target}' leaves the repository"
    if not linked.is_file():
        return f"'{target}' is no file"
    if address.fragment and linked.suffix == ".md" and address.fragment not in anchors(linked):
        return f"'{target}' names no heading of {linked.name}"
    return None


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("nothing.md", "is no file"),
        ("../docs", "is no file"),
        ("memory.md#no-such-heading", "names no heading"),
        ("../../outside.md", "leaves the repository"),
        ("http://nowhere", "is no web address"),
        ("memory.md#expected", None),
        # Generated pages exist in the site only.
        ("reference/commands.md", "is no file"),
    ],
)
def test_what_makes_a_link_broken(target: str, problem: str | None) -> None:
    found = broken(ROOT / "docs" / "planning.md", target)
    assert found is None if problem is None else problem in (found or "")
