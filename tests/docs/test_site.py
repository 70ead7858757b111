"""What the site consists of. `make docs` builds it and fails on every warning."""

from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

from docs.hooks import api
from docs.hooks.hooks import FOLDED, GENERATED
from docs.hooks.tree import report_nav, site_files
from tests.docs.markdown import NAMES, ROOT, links


def pages(nav: list[Any]) -> Iterator[str]:
    """The pages that the navigation names."""
    for entry in nav:
        for item in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages(item) if isinstance(item, list) else [item]


@pytest.fixture(scope="module")
def named() -> list[str]:
    nav = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return [*pages(nav), *pages(report_nav())]


def test_every_page_is_in_the_navigation_once(named: list[str]) -> None:
    assert len(named) == len(set(named))
    written = {name for name in NAMES if not name.startswith("reports/")}
    assert {name for name in named if not name.startswith("reports/")} == written | GENERATED.keys()


def test_contributors_find_the_subject_of_every_page() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| subject | page |\n")[2]
    rows = table.partition("\n\n")[0].splitlines()[1:]
    elsewhere = ("reports/", "docs/labs/")
    pages_of_a_subject = sorted(name for name in NAMES if not name.startswith(elsewhere))
    assert sorted(row.split("`")[1] for row in rows) == pages_of_a_subject


def test_every_report_is_in_the_navigation_or_linked_from_a_page_that_is(named: list[str]) -> None:
    reached = {name for name in named if name.startswith("reports/")}
    for name in list(reached):
        folder = (ROOT / name).parent
        reached |= {
            (folder / target.partition("#")[0]).resolve().relative_to(ROOT).as_posix()
            for target in links(ROOT / name)
            if "://" not in target
        }
    assert {name for name in NAMES if name.endswith("/report.md")} <= reached


def test_the_site_has_every_file_once_and_none_that_git_ignores() -> None:
    files = list(site_files())
    assert len(files) == len(set(files))
    assert set(NAMES) <= set(files)
    assert not [name for name in files if name.startswith(("runs/", "site/", ".venv/"))]


def test_what_reports_fold_is_parsed() -> None:
    folded = FOLDED.sub('<details markdown="1">', "a\n\n<details><summary>b</summary>\n")
    assert folded == 'a\n\n<details markdown="1"><summary>b</summary>\n'


def test_the_example_of_the_python_interface_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(api.HEAD.partition("```python\n")[2].partition("```")[0], {})
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("zero3 2 ") for line in lines)
