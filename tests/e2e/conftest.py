"""The health page in a real browser, from a server whose state each test sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from benchmarks.operations import page_states
from benchmarks.operations.page_server import PageServer
from tests.e2e.pages import ARGUMENTS, CHROMIUM, PATIENCE_S, WIDE, watch


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_S * 1_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def one_server() -> Iterator[PageServer]:
    with PageServer(page_states.serving()).running() as server:
        yield server


@pytest.fixture
def server(one_server: PageServer) -> PageServer:
    one_server.show(page_states.serving())
    return one_server


@dataclass(frozen=True, slots=True)
class Tab:
    """A browser tab.

    Attributes:
        page: the tab.
        errors: all errors of the page so far.
    """

    page: Page
    errors: list[str]


@pytest.fixture(scope="module")
def tab(browser: Browser, one_server: PageServer) -> Iterator[Tab]:
    with browser.new_context(timezone_id="UTC", locale="en-GB") as context:
        page = context.new_page()
        yield Tab(page, watch(page, one_server.url))


@pytest.fixture
def page(tab: Tab, server: PageServer) -> Iterator[Page]:
    """The tab that tests share, blank, wide and light; a new tab would take a second."""
    tab.page.goto("about:blank")
    tab.page.set_viewport_size(WIDE)
    tab.page.emulate_media(color_scheme="light")
    tab.errors.clear()
    yield tab.page
    assert tab.errors == []


@pytest.fixture
def failing_page(browser: Browser, server: PageServer) -> Iterator[Page]:
    """A new tab, in which failures of the service may reach the console."""
    with browser.new_context(viewport=WIDE) as context:
        errors = watch(page := context.new_page(), server.url, expected="503|TypeError")
        yield page
        page.close()
    assert errors == []
