"""The health service's page in a real browser, against a service that says what each test needs.

Every page is watched: an error on its console (a violated content-security policy is one), an exception, or a request
to anybody but its own server fails the test.
"""

from __future__ import annotations

import re
from typing import Literal

import pytest
from playwright.sync_api import Page, ViewportSize, expect

from benchmarks.operations import page_states
from benchmarks.operations.page_server import PAGE, PageServer
from tests.e2e.pages import NARROW, WIDE, grave_findings, in_browser

Scheme = Literal["light", "dark"]
VIEWS: list[tuple[ViewportSize, Scheme]] = [(WIDE, "light"), (NARROW, "dark"), (WIDE, "dark"), (NARROW, "light")]
STATES = {
    "broken": VIEWS,
    "serving": VIEWS[:1],
    "degraded": VIEWS[1:2],
    "empty": VIEWS[1:2],
    "dht_only": VIEWS[2:3],
    "several": VIEWS[3:],
}
OPEN_UNITS = 1.4
"""CPU of the page's own thread until a thousand machines are shown and a click is answered. The unit is what WORK takes
in the same browser: 1.1 s where the aim is 2 s in all. Time would count the tests that run beside this one."""
UPDATE_UNITS = 0.3
"""The same for one update, of which two come each second."""
WORK = """() => {
  const list = document.createElement("ul");
  for (let row = 0; row < 10000; row++) {
    list.append(Object.assign(document.createElement("li"), { textContent: `row ${row}` }));
  }
  document.body.append(list);
  const height = list.offsetHeight;
  list.remove();
  return height;
}"""


def test_the_files_need_no_inline_code_and_no_other_server() -> None:
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), path
    index = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|<script>|\sstyle=|\son\w+=", index)
    modules = {path.name for path in PAGE.glob("*.js")} - {"app.js"}
    assert set(re.findall(r'modulepreload" href="page/([^"]+)"', index)) == modules
    assert all((PAGE / name).exists() for name in re.findall(r'href="page/([^"]+)"', index))


@in_browser
@pytest.mark.parametrize("name", STATES)
def test_every_state_is_legible_to_everybody(page: Page, server: PageServer, name: str) -> None:
    state = getattr(page_states, name)()
    server.show(state)
    page.goto(server.url)
    expect(page.locator("#loading")).to_be_hidden()
    expect(page.locator("#empty")).to_be_visible(visible=not state["models"])
    words = [model["verdict"].capitalize() for model in state["models"]]
    expect(page.locator(".word")).to_have_text(words)
    for size, scheme in STATES[name]:
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=scheme)
        assert grave_findings(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@in_browser
def test_a_broken_model_says_what_is_missing_and_what_mends_it(page: Page, server: PageServer) -> None:
    server.show(state := page_states.broken())
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(server.url)
    expect(page.locator(".why")).to_have_text("Missing: layers 4…7. On any machine, run:")
    expect(page.locator(".figure", has_text="layers 4…7 missing").locator("dd")).to_have_text("Broken")
    expect(page.locator("#verdicts")).not_to_contain_text("to spare")
    expect(page.locator("#map .gap")).to_have_count(1)
    expect(page.locator("#map .bar.is-offline")).to_have_count(1)
    expect(page.locator("#probe .banner")).to_contain_text("no chain over all layers")
    page.get_by_role("button", name="Copy").first.click()
    expect(page.locator("#verdicts .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == state["models"][0]["fixes"][0]


@in_browser
def test_a_name_with_markup_is_text(page: Page, server: PageServer) -> None:
    state = page_states.broken()
    markup = page_states.MARKUP
    state["events"][0]["text"] = state["models"][0]["reason"] = state["alerts"][0]["text"] = markup
    state["models"][0].update(name=markup, fixes=[markup])
    server.show(state)
    page.goto(server.url)
    for place in (".model-name", ".reason", ".fixes code", "#nodes", "#claims", "#events", "#alerts", "#contributors"):
        expect(page.locator(place)).to_contain_text(markup)
    expect(page.locator("img")).to_have_count(0)


@in_browser
def test_a_change_appears_where_it_is_and_is_said(page: Page, server: PageServer) -> None:
    server.show(before := page_states.serving())
    page.goto(server.url)
    expect(page.locator(".word")).to_have_text("Serving")
    expect(page.locator("#announcer")).to_be_empty()
    find = page.get_by_label("Find")
    find.fill("e")
    find.evaluate("field => { field.mark = 'same'; }")
    top = page.evaluate("scrollY")
    server.show(page_states.later(before, 0.2, swarm="loaded otherwise"))
    expect(page.locator("#swarm")).to_have_text("loaded otherwise")
    assert page.evaluate("scrollY") == top > 0
    server.show(page_states.broken(at=before["at"] + 0.5))
    expect(page.locator(".word")).to_have_text("Broken", timeout=2_000)
    expect(page.locator("#announcer")).to_have_text("demo-target is broken: no machine serves some of its layers.")
    expect(page).to_have_title("✕ broken · Canopy")
    assert page.evaluate("document.activeElement.mark") == "same"
    copy = page.get_by_role("button", name="Copy").first
    copy.focus()
    server.show(page_states.later(page_states.broken(), 1.0, swarm="the next"))
    expect(page.locator("#swarm")).to_have_text("the next")
    expect(page.locator(".word")).to_have_text("Broken")
    expect(copy).to_be_focused()


@in_browser
def test_an_older_or_unreadable_state_is_not_taken(page: Page, server: PageServer) -> None:
    page.goto(server.url)
    taken = """async () => {
        const { Feed } = await import("./page/feed.js");
        const taken = [], whole = { v: 1, started_at: 1, models: [] };
        const tell = (at, more) => feed.read(JSON.stringify({ ...whole, at, ...more }));
        const feed = new Feed((state) => taken.push(state.at), () => feed.trouble && taken.push(feed.trouble));
        tell(10); tell(9);
        const renewed = feed.renewedAt;
        await new Promise(requestAnimationFrame);
        tell(10); tell(12, { v: 2 }); tell(13, { models: null });
        taken.push(feed.renewedAt === renewed);
        tell(2, { started_at: 2 });
        return [...taken, feed.renewedAt > renewed];
    }"""
    found = page.evaluate(taken)
    assert found == [10, 10, "state of version 2: reload the page", "state without models", True, 2, True]


@in_browser
def test_the_table_is_sorted_and_searched_by_keyboard(page: Page, server: PageServer) -> None:
    page.goto(server.url)
    nodes = page_states.serving()["models"][0]["nodes"]
    by_load = [node["short"] for node in sorted(nodes, key=lambda node: node["busy"])]
    header = page.get_by_role("columnheader", name="Load")
    sorter = header.get_by_role("button")
    sorter.focus()
    page.keyboard.press("Enter")
    expect(header).to_have_attribute("aria-sort", "ascending")
    expect(page.locator("#nodes .short")).to_have_text(by_load)
    page.keyboard.press("Space")
    expect(header).to_have_attribute("aria-sort", "descending")
    expect(page.locator("#nodes .short")).to_have_text(by_load[::-1])
    expect(sorter).to_be_focused()
    page.get_by_label("Find").fill("bakery")
    expect(page.locator("#nodes .short")).to_have_text([nodes[4]["short"]])
    page.set_viewport_size(NARROW)
    page.get_by_label("Find").fill("")
    page.get_by_label("Sort by").select_option("uptime")
    by_uptime = [node["short"] for node in sorted(nodes, key=lambda node: -node["started_at"])]
    expect(page.locator("#nodes .short")).to_have_text(by_uptime)


@in_browser
def test_one_of_several_models_is_chosen_and_stays_chosen(page: Page, server: PageServer) -> None:
    server.show(before := page_states.several())
    page.goto(server.url)
    expect(page.locator("#map-margin")).to_contain_text("Broken")
    page.locator(".verdict", has_text="Qwen").get_by_role("button", name="Show details").click()
    expect(page.locator("#map-margin")).to_contain_text("1 machine to spare")
    page.reload()
    expect(page.locator("#map-margin")).to_contain_text("1 machine to spare")
    server.show(page_states.later(before, swarm="later"))
    expect(page.locator("#swarm")).to_have_text("later")
    expect(page.locator(".is-chosen .model-name")).to_have_text("Qwen/Qwen3-32B")


@in_browser
def test_probe_and_history_are_drawn(page: Page, server: PageServer) -> None:
    page.goto(server.url)
    expect(page.locator("#probe .hop")).to_have_count(4)
    expect(page.locator("#probe .hops")).to_have_attribute("aria-label", re.compile("3 hops, 1.. ms in all"))
    strips = page.locator("#history .strip")
    expect(strips).to_have_count(2)
    told = r"24 hours: 23 h 17 min recorded: 91\.2\s%\sserving · 8\.2\s%\sdegraded · 0\.5\s%\sbroken"
    expect(strips.first).to_have_attribute("aria-label", re.compile(told))
    expect(strips.first.locator(".is-broken")).to_have_count(3)
    expect(strips.first.locator(".is-unknown")).to_have_count(2)


@in_browser
def test_a_minute_each_way_is_half_and_half(page: Page, server: PageServer) -> None:
    mixed = {"at": page_states.AT - 60, "verdict": "broken", "seconds": {"serving": 60, "broken": 60}}
    told = {"v": 1, "model": page_states.FINGERPRINT, "window": "30d", "step_s": 900, "points": [mixed]}
    page.route("**/api/v1/history?*", lambda route: route.fulfill(json=told))
    page.goto(server.url)
    strip = page.locator("#history .strip").last
    expect(strip).to_have_attribute(
        "aria-label", re.compile(r"30 days: 2 min recorded: 50\.0\s%\sserving · 50\.0\s%\sbroken$")
    )
    expect(page.locator("#history .strip-share").last).to_have_text(re.compile(r"2 min recorded: 50\.0\s%\sserving"))
    expect(strip.locator(".is-unknown")).to_have_count(89)
    widths = [strip.locator(f"rect.is-{verdict}").get_attribute("width") for verdict in ("serving", "broken")]
    assert widths[0] == widths[1]
    expect(strip.locator("g:has(rect.is-broken) > title")).to_have_text(re.compile(r": 50\.0\s%\sserving · 50\.0\s%"))


@in_browser
def test_a_probed_speed_is_the_mean_of_all_probes(page: Page, server: PageServer) -> None:
    """Points hold unlike numbers of probes, and windows fold them into unlike cells: both say the same of them."""
    probed = ((3_000, 3, 20.0), (2_990, 1, 40.0), (60, 1, 40.0))  # seconds ago, probes, their mean: 28 in all
    held = {"verdict": "serving", "seconds": {"serving": 5}}
    points = [
        {"at": page_states.AT - ago, "probes": probes, "tokens_per_s": speed, **held} for ago, probes, speed in probed
    ]
    told = {"v": 1, "model": page_states.FINGERPRINT, "window": "24h", "step_s": 60, "points": points}
    page.route("**/api/v1/history?*", lambda route: route.fulfill(json=told))
    page.goto(server.url)
    expect(page.locator("#history .strip-speed")).to_have_text(["Probed 28.0 tokens/s on average"] * 2)
    expect(page.locator("#history .strip").first).to_contain_text("25.0 tokens/s")  # the cell of the first four


@in_browser
def test_a_thousand_machines_are_shown_at_once_and_kept_up_with(page: Page, server: PageServer) -> None:
    server.show(state := page_states.crowd())
    chrome = page.context.new_cdp_session(page)
    chrome.send("Performance.enable")

    def spent_s() -> float:
        metrics = chrome.send("Performance.getMetrics")["metrics"]
        return next(float(metric["value"]) for metric in metrics if metric["name"] == "ThreadTime")

    blank_s = spent_s()
    page.evaluate(WORK)
    unit_s = (started_s := spent_s()) - blank_s
    page.goto(server.url)
    page.get_by_role("button", name="Uptime").click()
    expect(page.get_by_role("columnheader", name="Uptime")).to_have_attribute("aria-sort", "ascending")
    assert (opened_s := spent_s()) - started_s < OPEN_UNITS * unit_s
    expect(page.locator("#map .bar")).to_have_count(1_000)
    expect(page.locator("#nodes tbody tr")).to_have_count(100)
    for number in range(4):
        server.show(state := page_states.later(state, swarm=f"update {number}"))
        expect(page.locator("#swarm")).to_have_text(f"update {number}")
    assert (spent_s() - opened_s) / 4 < UPDATE_UNITS * unit_s
    page.get_by_role("button", name="Show all 1,000").click()
    expect(page.locator("#nodes tbody tr")).to_have_count(1_000)
