"""Headings sort rows within their ranks, by value and by meaning."""

import pytest

from .browser import Browser

PARITIES = ("exact", "tight", "diverged", "unjudged")


@pytest.fixture
def results(browser: Browser) -> Browser:
    browser.click("a[href='#results']")
    return browser


def column(browser: Browser, title: str) -> tuple[int, list[str]]:
    """Number of a column of the results from 1, and its cells from top to bottom."""
    titles = browser.texts("#results table:first-of-type th")
    number = titles.index(title) + 1
    return number, browser.run(
        "return [...document.querySelector('#results table').querySelectorAll("
        f"'td:nth-child({number})')].map((cell) => cell.textContent)"
    )


def click(browser: Browser, title: str) -> str | None:
    """Click a heading of the results; how it says the table is sorted."""
    number, _ = column(browser, title)
    browser.click(f"#results th:nth-child({number}) button")
    return browser.run(
        f"return document.querySelector('#results th:nth-child({number})').getAttribute('aria-sort')"
    )


def test_parity_is_sorted_by_meaning_within_ranks(results: Browser) -> None:
    assert click(results, "parity") == "ascending"
    _, ranks = column(results, "ranks")
    assert ranks == ["1"] + ["2"] * 6 + ["4"] * 6
    _, found = column(results, "parity")
    for first in (1, 7):
        places = [PARITIES.index(parity) for parity in found[first : first + 6]]
        assert places == sorted(places)
        assert len(set(places)) == len(PARITIES)


@pytest.mark.parametrize("clicks", [1, 2])
def test_numbers_are_sorted_by_value_and_unknown_ones_come_last(results: Browser, clicks: int) -> None:
    for _ in range(clicks):
        click(results, "tokens/s")
    _, found = column(results, "tokens/s")
    for first in (1, 7):
        *known, last = found[first : first + 6]
        values = [float(text.replace(",", "")) for text in known]
        assert last == "n/a"
        assert values == sorted(values, reverse=clicks == 2)
        assert len(set(values)) > 3


def test_ranks_are_sorted_as_groups_and_a_third_click_restores_the_order(results: Browser) -> None:
    _, before = column(results, "backend")
    assert click(results, "ranks") == "ascending"
    assert click(results, "ranks") == "descending"
    _, ranks = column(results, "ranks")
    assert ranks == ["4"] * 6 + ["2"] * 6 + ["1"]
    assert click(results, "ranks") is None
    assert column(results, "backend")[1] == before


def test_a_heading_works_by_keyboard(results: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    results.run("document.querySelector('#results th button').focus()")
    results.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert column(results, "backend")[1][1:7] == sorted(column(results, "backend")[1][1:7])
    assert results.run("return document.querySelector('#results th').ariaSort") == "ascending"
