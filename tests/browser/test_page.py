"""The page: nothing fetched or logged, the answer on the first screen, every link leads somewhere."""

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
    for name in ("unfold", "filter"):
        browser.run("document.getElementById(arguments[0]).click()", name)
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
