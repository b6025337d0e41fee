"""The system's browser, and pages in it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@contextmanager
def started_browser(path: str | None) -> Iterator[Any]:
    """A browser of the system, or the one that `playwright install chromium` brought."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser can be started: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@contextmanager
def silent_page(path: str | None) -> Iterator[Any]:
    """A page that must say nothing in the console, and must not fail."""
    messages: list[str] = []
    with started_browser(path) as browser:
        page = browser.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        yield page
        assert not messages
