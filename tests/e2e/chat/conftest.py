"""The chat page in a real browser, over a backend that plays what each test wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from client.api.app import build_app
from tests.api_server import served
from tests.e2e.pages import WIDE, watch
from tests.scripted_backend import CARD, ScriptedBackend, saying

FORGET = "() => { localStorage.clear(); sessionStorage.clear(); indexedDB.deleteDatabase('canopy-chat'); }"


@dataclass(frozen=True, slots=True)
class Chat:
    """The page, and the backend behind it.

    Attributes:
        page: the tab, on which nothing is open yet.
        backend: plays its script for every message.
        url: of the server, without a slash at its end.
        errors: all errors of the page so far; a test that expects some takes them out.
    """

    page: Page
    backend: ScriptedBackend
    url: str
    errors: list[str]

    @property
    def input(self) -> Locator:
        """Where a message is written."""
        return self.page.get_by_label("Message", exact=True)

    @property
    def answer(self) -> Locator:
        """The last answer."""
        return self.page.locator("article.is-assistant").last

    def open(self) -> None:
        """Open the page, or load it again."""
        self.page.goto(f"{self.url}/")
        expect(self.page.locator("#state")).not_to_have_text("Asking")
        expect(self.page.locator("#main")).not_to_have_attribute("aria-busy", "true")

    def ask(self, text: str) -> None:
        """Send a message by the keyboard."""
        self.input.fill(text)
        self.input.press("Enter")

    def asked(self, text: str) -> None:
        """Send a message and wait for the end of its answer."""
        before = self.page.locator("article.is-assistant").count()
        self.ask(text)
        expect(self.page.locator("article.is-assistant")).to_have_count(before + 1)
        expect(self.answer).to_have_attribute("aria-busy", "false")


@pytest.fixture(scope="module")
def shared(browser: Browser) -> Iterator[Chat]:
    backend = ScriptedBackend(saying("Hello"))
    with served(build_app(backend)) as url, browser.new_context(timezone_id="UTC", locale="en-GB") as context:
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        page = context.new_page()
        yield Chat(page, backend, url, watch(page, url, expected="status of (401|503)"))
        page.close()


@pytest.fixture
def chat(shared: Chat) -> Iterator[Chat]:
    """The tab that tests share, wide and light, which remembers nothing; a new one would take a second."""
    shared.page.goto(f"{shared.url}/page/favicon.svg")
    shared.page.evaluate(FORGET)
    shared.page.set_viewport_size(WIDE)
    shared.page.emulate_media(color_scheme="light")
    shared.backend.model, shared.backend.others, shared.backend.script = CARD, (), saying("Hello")
    shared.backend.jobs.clear()
    shared.backend.closed = 0
    shared.errors.clear()
    yield shared
    assert shared.errors == []
