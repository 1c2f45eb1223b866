"""A real browser's pages, watched."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import ConsoleMessage, Dialog, Error, Page, Request, ViewportSize

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--renderer-process-limit=1",
]
"""With the limit it starts no process in advance, which a test would then seem to leave behind."""
WIDE: ViewportSize = {"width": 1280, "height": 900}
NARROW: ViewportSize = {"width": 390, "height": 844}
PATIENCE_S = 20
"""For what must happen, on a machine that has other work."""

in_browser = pytest.mark.needs_program("chromium", "chromium")


def watch(page: Page, url: str, expected: str = "(?!)") -> list[str]:
    """Errors of a page, as they come: all but those that match `expected`."""
    errors: list[str] = []

    def logged(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and re.search(expected, message.text) is None:
            errors.append(message.text)

    def thrown(error: Error) -> None:
        errors.append(f"{error}")

    def opened(dialog: Dialog) -> None:
        errors.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def asked(request: Request) -> None:
        if not request.url.startswith(url):
            errors.append(f"asks {request.url}")

    page.set_default_timeout(PATIENCE_S * 1_000)
    page.on("console", logged)
    page.on("pageerror", thrown)
    page.on("dialog", opened)
    page.on("request", asked)
    return errors


def grave_findings(page: Page) -> list[str]:
    """What axe-core calls serious or critical, with the element."""
    found = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {rule['nodes'][0]['html']}" for rule in found if rule["impact"] in {"serious", "critical"}]
