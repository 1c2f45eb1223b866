"""A snapshot of a live service, on a plain static host below a path, in a real browser: whole, and never live."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from benchmarks.operations import page_states
from benchmarks.operations.page_server import PageServer
from tests.e2e.pages import NARROW, grave_findings, in_browser, watch
from tests.e2e.programs import run

TAKEN = datetime.fromtimestamp(page_states.AT, UTC)


class Host(http.server.SimpleHTTPRequestHandler):
    """A static host that says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A static host with a snapshot of three models at /team/swarm/."""
    folder = tmp_path_factory.mktemp("host")
    with PageServer(page_states.several()).running() as server:
        done = run("swarm.cli", "health", "--snapshot", str(folder / "team" / "swarm"), "--url", server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "snapshot of 3 models" in done.stdout
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Host, directory=str(folder))) as hosting:
        thread = threading.Thread(target=hosting.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{hosting.server_port}/team/swarm/", folder / "team" / "swarm"
        hosting.shutdown()
        thread.join()


@in_browser
def test_a_snapshot_says_that_it_is_one_and_of_when(browser: Browser, host: tuple[str, Path]) -> None:
    url, _ = host
    with browser.new_context(timezone_id="UTC", locale="en-GB", viewport=NARROW) as context:
        page = context.new_page()
        errors = watch(page, url)
        page.clock.install(time=TAKEN + timedelta(minutes=3))
        page.goto(url)
        expect(page.locator(".word")).to_have_text(["Broken", "Serving", "Serving"])
        expect(page.locator(".since").first).to_have_text("at 21 Sept, 14:13, for 12 s")
        expect(page.locator("#banners")).to_contain_text("This is a snapshot of 21 Sept, 14:13, 3 min old")
        expect(page.locator(".source").first).to_have_text("Snapshot, 3 min old")
        expect(page).to_have_title("broken, snapshot of 21 Sept, 14:13 · Canopy")
        expect(page.locator("#still")).to_have_count(0)
        expect(page.locator("#history .strip")).to_have_count(2)
        expect(page.locator("#history .strip").first).to_have_attribute("aria-label", re.compile("24 hours: .*serving"))
        assert grave_findings(page) == []
        page.clock.fast_forward("20:00")
        expect(page.locator(".word").first).to_have_text("Last known: Broken")
        expect(page.locator("#banners")).to_contain_text("may not be true any more")
        assert page.locator(".verdict.is-broken, .verdict.is-serving").count() == 0
        assert errors == []
        page.close()


@in_browser
def test_without_a_script_it_says_the_verdict_too(browser: Browser, host: tuple[str, Path]) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        for url in (host[0], (host[1] / "index.html").as_uri()):
            page.goto(url)
            expect(page.locator("#still")).to_contain_text("This is a snapshot of 21 September 2026, 14:13 UTC")
            expect(page.locator("#still article").first).to_contain_text("At that time: broken")
            expect(page.locator("#still code")).to_contain_text("node serve demo-target --layers 4-8")
            expect(page.locator("#loading")).to_be_hidden()
        page.close()
