"""The page in a browser: nothing is fetched, the answer comes first, rows are sorted, printed."""

import re
from pathlib import Path

import pytest

from .browser import Browser

NARROW, WIDE = (390, 844), (1280, 800)
CONTRAST = """
const luminance = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  const colour = getComputedStyle(element).backgroundColor;
  return colour === "rgba(0, 0, 0, 0)" ? ground(element.parentElement) : colour;
};
return [...document.querySelectorAll("h1, h2, p, li, td, th, th button, a, figcaption, summary, label, code")]
  .filter((element) => element.textContent.trim() && element.checkVisibility())
  .map((element) => {
    const [a, b] = [getComputedStyle(element).color, ground(element)].map(luminance).sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), element.outerHTML.slice(0, 80)];
  }).sort((x, y) => x[0] - y[0])[0];
"""


def test_the_page_asks_for_nothing_but_itself_and_logs_nothing(browser: Browser, page: Path) -> None:
    browser.run("document.getElementById('unfold').click()")
    browser.run("for (const part of document.querySelectorAll('details')) part.open = true")
    assert browser.requests() == [page.as_uri()]
    assert browser.messages() == []


def test_verdict_picture_and_scope_are_on_the_first_screen(browser: Browser) -> None:
    for selector in ("#verdict p", "#verdict tbody tr", ".answer .pictures img"):
        assert browser.box(selector)["bottom"] <= WIDE[1], selector


def test_the_picture_follows_the_verdict_on_a_narrow_screen(window: Browser, page: Path) -> None:
    window.open(page, size=NARROW)
    verdict, picture, results = map(window.box, ("#verdict", ".answer .pictures", "#summary"))
    assert verdict["bottom"] <= picture["top"]
    assert picture["bottom"] <= results["top"]


@pytest.mark.parametrize("size", [NARROW, WIDE])
def test_the_page_never_scrolls_sideways(window: Browser, page: Path, size: tuple[int, int]) -> None:
    window.open(page, size=size)
    window.run("for (const part of document.querySelectorAll('details')) part.open = true")
    assert window.run("return document.documentElement.scrollWidth") == size[0]


@pytest.mark.parametrize("size", [NARROW, WIDE])
def test_no_table_of_the_short_report_is_cut(window: Browser, page: Path, size: tuple[int, int]) -> None:
    window.open(page, size=size)
    wide = "scrollWidth > part.clientWidth).map((part) => part.closest('section').id)"
    tables = "[...document.querySelectorAll('.answer .table, .more .table')]"
    assert window.run(f"return {tables}.length") >= 2
    assert window.run(f"return {tables}.filter((part) => part.{wide}") == []


def test_a_wide_table_names_each_figure_on_a_narrow_screen(window: Browser, page: Path) -> None:
    shown = """return [...document.querySelector('#summary .folds tbody tr').cells].slice(1)
        .map((cell) => getComputedStyle(cell, '::before').content)"""
    window.open(page, size=NARROW)
    assert window.run("return getComputedStyle(document.querySelector('#summary thead')).display") == "none"
    titles = window.run(shown)
    assert len(titles) > 4
    assert all(title.strip('"') for title in titles)
    window.open(page, size=WIDE)
    assert set(window.run(shown)) == {"none"}


def test_first_column_stays_readable_while_a_table_scrolls(window: Browser, page: Path) -> None:
    window.open(page, "#results", size=NARROW)
    window.run("document.querySelector('#results .table').scrollLeft = 400")
    cell = window.box("#results td")
    assert cell["left"] >= 0
    assert 80 <= cell["width"] <= 160
    beneath = "const {x, y} = arguments[0]; return document.elementFromPoint(x + 5, y + 5).textContent"
    window.run("document.querySelector('#results td').scrollIntoView({block: 'center'})")
    assert window.run(beneath, window.box("#results td")) == window.texts("#results td")[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(window: Browser, page: Path, scheme: str) -> None:
    window.open(page, scheme=scheme)
    window.run("for (const part of document.querySelectorAll('main details')) part.open = true")
    contrast, element = window.run(CONTRAST)
    assert contrast >= 4.5, element
    ground = window.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_every_link_leads_to_something_that_is_then_in_view(browser: Browser) -> None:
    addresses = browser.run("return [...new Set([...document.links].map((link) => link.hash.slice(1)))]")
    assert "findings" in addresses
    for address in addresses:
        browser.run("for (const part of document.querySelectorAll('details')) part.open = false")
        browser.click(f'a[href="#{address}"]')
        top = browser.run("return document.getElementById(arguments[0]).getBoundingClientRect().top", address)
        hidden = browser.run("return !document.getElementById(arguments[0]).checkVisibility()", address)
        assert not hidden, address
        assert 0 <= top < WIDE[1], address


def test_a_finding_leads_to_its_entry_in_the_details(browser: Browser) -> None:
    assert any("gradient-scale" in row for row in browser.texts("#verdict tbody tr"))
    browser.click("#verdict a[href='#findings.gradient-scale']")
    assert browser.run("return location.hash") == "#findings.gradient-scale"
    assert any("zero1" in text for text in browser.texts("[id='findings.gradient-scale']"))


def test_a_fragment_opens_its_section_when_the_page_loads(window: Browser, page: Path) -> None:
    window.open(page, "#memory")
    assert window.texts("#memory h3, #memory p")
    assert window.texts("#communication p") == []


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


def test_folded_parts_are_visible_on_paper_without_a_script(window: Browser, page: Path) -> None:
    window.open(page, media="print")
    folded = "return [...document.querySelectorAll('main details:not([open])')].length"
    assert window.run(folded) > 10
    heights = window.run(
        "return [...document.querySelectorAll('main details > :not(summary)')]"
        ".map((part) => [part.getBoundingClientRect().height, part.outerHTML.slice(0, 80)]).sort()"
    )
    assert min(height for height, _ in heights) > 0, heights[0]


def test_paper_holds_what_is_folded_on_the_screen(browser: Browser) -> None:
    text = "\n".join(browser.paper())
    for words in ("Parity levels", "How to read the numbers", "RuntimeError"):
        assert words in text, words
    assert "All sections" not in text
    assert browser.run("return document.querySelectorAll('main details[open]').length") == 0


def test_each_page_of_a_long_table_begins_with_its_head(window: Browser, page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    row = '<tr><td class="long">next</td></tr>\n'
    table = text[text.index('<div class="table">') : text.index("</tbody>")]
    long = tmp_path / "long.html"
    long.write_text(text.replace(table, table + row * 200, 1), encoding="utf-8")
    head = window_titles(table)
    window.open(long)
    pages = [page for page in window.paper() if page.count("next") > 10]
    assert len(pages) > 2
    for shown in pages:
        assert all(title in shown[: shown.index("next")] for title in head)


def window_titles(table: str) -> list[str]:
    """Words of the head of a table."""

    return " ".join(re.findall(r'<button type="button">(.*?)</button>', table)).split()


def test_no_page_ends_with_a_heading(browser: Browser) -> None:
    titles = "main :is(h1, h2, h3, summary)"
    browser.run(f"for (const t of document.querySelectorAll('{titles}')) t.append('\u00a7')")
    pages = browser.paper()
    assert sum(shown.count("\u00a7") for shown in pages) > 20
    for shown in pages:
        assert "\u00a7" not in shown.rstrip().splitlines()[-1]
