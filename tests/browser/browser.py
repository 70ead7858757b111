"""A headless Chromium and what tests ask it."""

import base64
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

ARGUMENTS = (
    "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--disable-background-networking", "--no-first-run",
)  # fmt: skip
SECONDS = 60
"""For what a page does by itself."""
PROGRAMS = ("chromium", "chromedriver")


def unmet() -> str | None:
    """Why there is no browser here, and how to get it; None where there is one."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"install {' and '.join(missing)}: apt-get install chromium chromium-driver" if missing else None


class Browser:
    """One window. Each `open` begins with empty logs."""

    def __init__(self) -> None:
        options = ChromeOptions()
        options.binary_location = str(shutil.which(PROGRAMS[0]))
        # Chromium refuses its sandbox to root.
        for argument in (*ARGUMENTS, *(["--no-sandbox"] if os.geteuid() == 0 else [])):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=Service(str(shutil.which(PROGRAMS[1]))))

    def close(self) -> None:
        self.driver.quit()

    def open(
        self,
        page: Path,
        fragment: str = "",
        *,
        size: tuple[int, int] = (1280, 800),
        media: str = "",
        scheme: str = "light",
    ) -> None:
        """Load a page in a window of this size, as on this medium; none: screen, and paper when printed."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        self.driver.get("about:blank")
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(f"{page.as_uri()}{fragment}")
        # chromedriver 150 returns before the page has loaded in about one of a hundred cases.
        loaded = "return location.href.startsWith(arguments[0]) && document.readyState === 'complete'"
        WebDriverWait(self.driver, SECONDS).until(lambda _: self.run(loaded, page.as_uri()))

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns; a promise is awaited."""
        return self.driver.execute_script(script, *arguments)

    def click(self, selector: str) -> None:
        """Click the first element that matches, in view or not."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def texts(self, selector: str) -> list[str]:
        """Text of every visible element that matches."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility())"
            ".map((e) => e.textContent)"
        )
        return list(self.run(script, selector))

    def box(self, selector: str) -> dict[str, float]:
        """Place of the first element that matches, in pixels of the window."""
        return dict(
            self.run("return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", selector)
        )

    def messages(self) -> list[str]:
        """What the page wrote to the console, errors included."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since `open`, itself included, data within it not."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [address for address in sent if not address.startswith("data:")]

    def paper(self) -> list[str]:
        """Text of each page on paper."""
        import io

        from pypdf import PdfReader

        printed = self.driver.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
        pages: Sequence[Any] = PdfReader(io.BytesIO(base64.b64decode(printed["data"]))).pages
        return [page.extract_text() for page in pages]
