"""The filter hides rows everywhere, is kept in the address, and can be reset."""

from pathlib import Path

import pytest

from harness.tell.sections.choice import NONE_FITS

from .browser import Browser


def choose(browser: Browser, name: str, *values: str) -> None:
    """Leave only these values of a dimension chosen."""
    browser.click(f'button[data-choose="none"][aria-label^="{name}"]')
    for value in values:
        browser.click(f'#choices input[name="{name}"][value="{value}"]')


def cells(browser: Browser) -> set[tuple[str, str]]:
    """Backend and ranks of each visible row of the results."""
    browser.run("document.getElementById('results').closest('details').open = true")
    rows = browser.run(
        "return [...document.querySelectorAll('#results table:first-of-type tbody tr')]"
        ".filter((row) => row.checkVisibility()).map((row) => [...row.cells].map((c) => c.textContent))"
    )
    return {(row[0], row[1]) for row in rows}


def test_rows_of_every_table_follow_the_filter(browser: Browser) -> None:
    assert browser.texts("#filter output") == ["13 of 13 cells shown"]
    choose(browser, "backend", "ddp", "zero3")
    choose(browser, "ranks", "4")
    assert browser.texts("#filter output") == ["2 of 13 cells shown"]
    assert cells(browser) == {("ddp", "4"), ("zero3", "4")}
    browser.run("for (const part of document.querySelectorAll('main details')) part.open = true")
    shown = browser.texts("tr[data-cells] td")
    assert {"ddp", "zero3"} <= set(shown)
    assert not {"single", "zero1", "zero2", "fsdp", "fsdp1"} & set(shown)
    assert "The filter hides 11 of 13 rows." in browser.texts(".left-out")


def test_thresholds_of_a_decision_are_never_filtered(browser: Browser) -> None:
    browser.run("for (const part of document.querySelectorAll('details')) part.open = true")
    before = browser.texts("#choice table:first-of-type tr")
    assert any(row.endswith(NONE_FITS) for row in before)
    choose(browser, "backend", "zero1")
    assert browser.texts("#choice table:first-of-type tr") == before


def test_the_address_keeps_the_filter_and_links_do_not_lose_it(window: Browser, page: Path) -> None:
    window.open(page)
    choose(window, "backend", "zero3")
    window.click("a[href='#memory']")
    address = window.run("return location.hash")
    assert address == "#memory?backend=zero3"
    window.open(page, address)
    assert window.texts("#filter output") == ["2 of 13 cells shown"]
    assert cells(window) == {("zero3", "2"), ("zero3", "4")}
    assert window.texts("#memory p")


def test_reset_shows_everything_again(window: Browser, page: Path) -> None:
    window.open(page, "#results?ranks=2")
    assert len(cells(window)) == 6
    assert window.texts("#filtered")
    window.click("nav > button[type=reset]")
    assert len(cells(window)) == 13
    assert window.texts("#filter output") == ["13 of 13 cells shown"]
    assert window.run("return location.hash") == "#results"
    assert window.texts("#filtered, nav > button, .left-out") == []


@pytest.mark.parametrize("fragment", ["#?ranks=", "#?ranks=7", "#?backend=%3Cb%3E"])
def test_an_address_of_no_cell_shows_none_and_says_so(window: Browser, page: Path, fragment: str) -> None:
    window.open(page, fragment)
    assert window.texts("#filter output") == ["0 of 13 cells shown"]
    assert cells(window) == set()
    assert window.messages() == []
