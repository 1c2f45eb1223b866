"""The health service's page in a real browser when answers are missing, late or wrong."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from benchmarks.operations import page_states
from benchmarks.operations.page_server import PageServer
from tests.e2e.pages import grave_findings, in_browser


@in_browser
def test_history_that_is_not_read_yet_is_nobody_elses(page: Page, server: PageServer) -> None:
    server.show(page_states.several())
    strip = page.locator("#history .strip").first
    with server.history_withheld():
        page.goto(server.url)
        expect(strip).to_have_attribute("aria-label", "24 hours: not read yet")
        assert grave_findings(page) == []
    expect(strip).to_have_attribute("aria-label", re.compile(r"24 hours: \d.*\sserving"))
    with server.history_withheld():
        page.locator(".verdict", has_text="Qwen").get_by_role("button", name="Show details").click()
        expect(strip).to_have_attribute("aria-label", "24 hours: not read yet")
        expect(strip.locator(".is-unknown")).to_have_count(96)
    expect(strip).to_have_attribute("aria-label", re.compile(r"24 hours: \d.*\sserving"))


@in_browser
def test_history_that_is_not_answered_is_asked_for_again(failing_page: Page, server: PageServer) -> None:
    failing_page.clock.install()
    failing_page.route("**/api/v1/history*", lambda route: route.fulfill(status=503))
    failing_page.goto(server.url)
    history = failing_page.locator("#history")
    expect(history).to_contain_text("History could not be read: it answered 503.")
    failing_page.unroute("**/api/v1/history*")
    failing_page.clock.fast_forward(5_000)
    server.show(page_states.later(page_states.serving()))
    expect(history).to_contain_text("serving")
    expect(history).not_to_contain_text("could not be read")


@in_browser
def test_silence_is_said_and_ends(failing_page: Page, server: PageServer) -> None:
    failing_page.clock.install()
    failing_page.goto(server.url)
    expect(failing_page.locator(".source").first).to_have_text("Live")
    server.down()
    expect(failing_page.locator(".source").first).not_to_have_text("Live")
    failing_page.clock.fast_forward(16_000)
    expect(failing_page.locator("#banners")).to_contain_text("No update for")
    expect(failing_page.locator(".word")).to_have_text("Last known: Serving")
    expect(failing_page).to_have_title("? stale · Canopy")
    expect(failing_page.locator("#details")).to_have_class("details is-old")
    server.show(page_states.later(page_states.serving()))
    failing_page.clock.fast_forward(6_000)  # the stream stays refused: asking finds it again
    expect(failing_page.locator(".word")).to_have_text("Serving")
    expect(failing_page.locator("#banners")).to_be_empty()
    expect(failing_page.locator("#announcer")).to_have_text("Updates arrive again.")


@in_browser
def test_a_service_that_never_answered_is_asked_again(failing_page: Page, server: PageServer) -> None:
    server.down()
    failing_page.goto(server.url)
    expect(failing_page.locator("#trouble")).to_contain_text("it answered 503")
    assert grave_findings(failing_page) == []
    server.show(page_states.serving())
    failing_page.get_by_role("button", name="Try again now").click()
    expect(failing_page.locator(".word")).to_have_text("Serving")
    expect(failing_page.locator("#trouble")).to_be_hidden()


@in_browser
def test_a_state_that_cannot_be_drawn_is_said(failing_page: Page, server: PageServer) -> None:
    failing_page.goto(server.url)
    expect(failing_page.locator(".word")).to_have_text("Serving")
    after = page_states.later(page_states.serving())
    del after["models"][0]["replicas"]
    server.show(after)
    expect(failing_page.locator("#fault")).to_contain_text("could not draw the newest state")
    server.show(page_states.later(page_states.serving(), 1))
    expect(failing_page.locator("#fault")).to_be_hidden()


@in_browser
def test_a_stream_that_says_nothing_any_more_is_opened_anew(page: Page, server: PageServer) -> None:
    page.add_init_script(
        """
        window.opened = [];
        window.EventSource = class extends EventTarget {  // one that never breaks and never says anything
            constructor(url) {
                super();
                this.readyState = 1;
                opened.push(url);
                setTimeout(() => this.dispatchEvent(new Event("open")));
            }
            close() { opened.push("closed"); }
        };"""
    )
    page.clock.install()
    page.goto(server.url)
    expect(page.locator(".word")).to_have_text("Serving")
    page.clock.run_for(18_000)
    assert page.evaluate("opened") == ["api/v1/stream"]
    page.clock.run_for(4_000)
    assert page.evaluate("opened") == ["api/v1/stream", "closed", "api/v1/stream"]
