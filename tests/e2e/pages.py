"""Pages in a real browser, and the errors that they cause."""

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
"""The process limit keeps it from starting processes in advance, which would look left behind by a test."""
WIDE: ViewportSize = {"width": 1280, "height": 900}
NARROW: ViewportSize = {"width": 390, "height": 844}
PATIENCE_S = 20
"""Generous, since the machine may be busy."""

in_browser = pytest.mark.needs_program("chromium", "chromium")


def watch(page: Page, url: str, expected: str = "(?!)") -> list[str]:
    """A list that gathers a page's errors from now on, except those that match `expected`."""
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
            errors.append(f"requests {request.url}")

    page.set_default_timeout(PATIENCE_S * 1_000)
    page.on("console", logged)
    page.on("pageerror", thrown)
    page.on("dialog", opened)
    page.on("request", asked)
    return errors


def grave_findings(page: Page) -> list[str]:
    """What axe-core rates serious or critical, with the first element."""
    found = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {rule['nodes'][0]['html']}" for rule in found if rule["impact"] in {"serious", "critical"}]
