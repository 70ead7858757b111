"""Pictures are drawn again for the cells that the filter shows, and come back as they were."""

from pathlib import Path
from urllib.parse import unquote

from selenium.webdriver.support.wait import WebDriverWait

from .browser import SECONDS, Browser


def sources(browser: Browser, drawings: int) -> list[str]:
    """Address of each picture once the page has drawn so often."""
    drawn = f"return Number(document.documentElement.dataset.drawn) >= {drawings}"
    WebDriverWait(browser.driver, SECONDS).until(lambda _: browser.run(drawn))
    return list(browser.run("return [...document.querySelectorAll('figure img')].map((image) => image.src)"))


def test_pictures_hold_only_the_cells_that_are_shown(window: Browser, page: Path) -> None:
    window.open(page)
    whole, *_ = sources(window, 1)
    window.open(page, "#?backend=ddp&backend=zero3")
    drawn = [unquote(source) for source in sources(window, 1)]
    assert len(drawn) > 3
    assert drawn[0] != whole
    assert ">zero3<" in drawn[0]
    for picture in drawn:
        assert picture.startswith("data:image/svg+xml,<svg")
        assert ">zero2<" not in picture
        assert ">fsdp1<" not in picture
    sizes = window.run("return [...document.querySelectorAll('figure img')].map((i) => i.naturalWidth)")
    assert min(sizes) > 100
    assert window.messages() == []
    assert window.requests() == [page.as_uri()]


def test_reset_brings_the_verified_pictures_back(window: Browser, page: Path) -> None:
    window.open(page)
    whole = sources(window, 1)
    window.click("#choices input[name=ranks][value='4']")
    assert sources(window, 2) != whole
    assert any("hides" in text for text in window.texts("figure .left-out"))
    window.click("nav > button[type=reset]")
    assert sources(window, 3) == whole
    assert window.texts("figure .left-out") == []


def test_a_picture_of_no_shown_cell_is_not_drawn(window: Browser, page: Path) -> None:
    window.open(page, "#?backend=fsdp")
    sources(window, 1)
    assert window.run("return [...document.querySelectorAll('figure img')].every((image) => image.hidden)")
    assert window.messages() == []
