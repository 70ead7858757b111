"""On paper everything is open, heads of tables are on each page, headings are not alone."""

from pathlib import Path

from .browser import Browser


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
    import re

    return " ".join(re.findall(r'<button type="button">(.*?)</button>', table)).split()


def test_no_page_ends_with_a_heading(browser: Browser) -> None:
    titles = "main :is(h1, h2, h3, summary)"
    browser.run(f"for (const t of document.querySelectorAll('{titles}')) t.append('\u00a7')")
    pages = browser.paper()
    assert sum(shown.count("\u00a7") for shown in pages) > 20
    for shown in pages:
        assert "\u00a7" not in shown.rstrip().splitlines()[-1]
