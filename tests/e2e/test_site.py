"""The documentation's site, built strictly as `make docs` does: what it holds, what fails it, and in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Literal

import pytest
from playwright.sync_api import Browser, expect

import client
from tests.e2e.pages import NARROW, WIDE, grave_findings, in_browser, watch
from tools.site import ROOT, Page, SiteError, build, stage

OUTPUT = {"build", "site"}
NAVIGATION = "nav: [index.md, other.md]"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built beside the checkout, which stays as it is."""
    root = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, root)
        elif path.name not in OUTPUT and not path.name.startswith("."):
            (root / path.name).symlink_to(path)
    return build(root)


def test_pages_have_titles_and_load_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): Page.read(path) for path in site.rglob("*.html")}
    assert {"index.html", "guides/user.html", "guides/deployment.html", "reference/protocol.html"} <= set(pages)
    for name, page in pages.items():
        assert page.title.strip(), name
        assert not [source for source in page.loads if "//" in source], name
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style
    assert "zensical" not in (site / "index.html").read_text(encoding="utf-8").partition("<body")[2].lower()


def test_the_search_index_holds_what_programs_say_of_themselves(site: Path) -> None:
    found = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    text = "\n".join(f"{one['title']} {one['text']}" for one in found)
    for word in ("--max-new-tokens", "--probe-every", "--kv-tokens", "/api/v1/history", *client.__all__, "ContextFull"):
        assert word in text


FAULTS = {
    "[there](missing.md)": "docs/index.md:3: dead link: missing.md",
    "[there](../missing.py)": "docs/index.md:3: dead link: ../missing.py",
    "![picture](missing.png)": "docs/index.md:3: dead link: missing.png",
    "<!-- generated: missing -->": "docs/index.md:3: no part is called 'missing'",
    "[there](other.md#missing)": "anchor does not exist",
}


def checkout(folder: Path, text: str, navigation: str = NAVIGATION) -> Path:
    """A small checkout with two pages."""
    (folder / "docs" / "assets").mkdir(parents=True)
    (folder / "docs" / "index.md").write_text(f"# Home\n\n{text}\n", encoding="utf-8")
    (folder / "docs" / "other.md").write_text("# Other\n", encoding="utf-8")
    (folder / "docs" / ".nav.yml").write_text(navigation, encoding="utf-8")
    (folder / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_fails_the_build(text: str, tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=re.escape(FAULTS[text])):
        build(checkout(tmp_path, text))


def test_a_navigation_that_names_no_page_fails_the_build(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=r"'gone\.md' doesn't match any files"):
        build(checkout(tmp_path, "text", "nav: [index.md, '*', gone.md]"))


def test_what_zensical_lets_through_fails_the_build_all_at_once(tmp_path: Path) -> None:
    root = checkout(tmp_path, "<img src='missing.png'>\n\ntext\n- no list", "nav: [index.md]")
    with pytest.raises(SiteError) as failed:
        build(root)
    assert str(failed.value).splitlines() == [
        "index.html: no such picture: missing.png",
        "index.html: a list needs an empty line before it: '- no list'",
        "other.html: is not in the navigation: name it in docs/.nav.yml",
    ]


def test_links_out_of_the_documentation_lead_to_the_repository(tmp_path: Path) -> None:
    text = "[code](../node/code.py) [../node/code.py](../node/code.py#L3) [law](../SECURITY.md#how) [o](other.md)\n\n"
    root = checkout(tmp_path, text + "```\n[in a block](missing.md)\n```")
    (root / "node").mkdir()
    (root / "node" / "code.py").touch()
    (root / "SECURITY.md").write_text("# Security\n\n[home](docs/index.md)\n", encoding="utf-8")
    stage(root, root / "plain")
    staged = (root / "plain" / "index.md").read_text(encoding="utf-8")
    assert "code `../node/code.py` [law](project/security.md#how) [o](other.md)\n" in staged
    assert "[in a block](missing.md)" in staged
    assert "[home](../index.md)" in (root / "plain" / "project" / "security.md").read_text(encoding="utf-8")
    (root / "pyproject.toml").write_text('[project.urls]\nRepository = "https://example.org/canopy/"\n', "utf-8")
    stage(root, root / "linked")
    address = "https://example.org/canopy/blob/main/node/code.py"
    assert f"[code]({address}) [../node/code.py]({address}#L3)" in (root / "linked" / "index.md").read_text("utf-8")


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def reader(browser: Browser, address: str) -> Iterator[Browser]:
    """A browser that has seen a page: what it starts with the first one runs before the tests."""
    with browser.new_context() as context:
        context.new_page().goto(address)
        yield browser


@pytest.mark.crossing
@in_browser
@pytest.mark.parametrize("way", ["served", "file"])
def test_search_finds_a_word_and_nobody_else_is_asked(way: str, site: Path, address: str, reader: Browser) -> None:
    base = address if way == "served" else f"{site.as_uri()}/"
    with reader.new_context(viewport=WIDE) as context:
        errors = watch(page := context.new_page(), base)
        page.goto(f"{base}index.html")
        page.get_by_role("button", name="Search").click()
        page.keyboard.insert_text("unreceipted")  # all at once: each letter would have results of its own
        expect(page.get_by_text(re.compile(r"^\d+ results?$"))).to_be_visible()
        page.keyboard.press("Enter")
        expect(page.locator("article mark", has_text="unreceipted").first).to_be_visible()
    assert errors == []


@pytest.mark.crossing
@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_can_be_read_on_a_phone(scheme: Literal["light", "dark"], address: str, reader: Browser) -> None:
    with reader.new_context(viewport=NARROW, color_scheme=scheme) as context:
        page = context.new_page()
        for name in ("guides/user.html", "reference/cli/client.html", "reference/metrics.html", "index.html"):
            page.goto(f"{address}{name}")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        assert grave_findings(page) == []
