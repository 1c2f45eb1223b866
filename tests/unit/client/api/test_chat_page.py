"""How the chat page is served: its files alone, revalidated, under a strict policy."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from client.api.app import build_app
from client.api.context import ApiSettings
from client.api.site import PAGE
from tests.api_server import served
from tests.scripted_backend import ScriptedBackend, saying


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(build_app(ScriptedBackend(saying("Hello")), ApiSettings(keys=("sk-one",)))) as base:
        yield base


def test_the_page_needs_no_key_and_has_a_strict_policy(url: str) -> None:
    page = httpx2.get(f"{url}/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    rules = dict(rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert httpx2.head(f"{url}/").headers["content-length"] == page.headers["content-length"]


def test_every_file_is_served_and_revalidated(url: str) -> None:
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    names = [path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*.*")]
    assert "vendor/marked.js" in names
    client = httpx2.Client(base_url=url)
    for name in names:
        first = client.get(f"/page/{name}")
        assert first.content == (PAGE / name).read_bytes()
        assert first.headers["content-type"].startswith(types.get((PAGE / name).suffix, "text/"))
        again = client.get(f"/page/{name}", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    client.close()


def test_a_browser_that_asks_for_an_icon_gets_it(url: str) -> None:
    icon = httpx2.get(f"{url}/favicon.ico")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")


@pytest.mark.parametrize("path", ["/page/", "/page/nothing.js", "/page/..%2fapp.py", "/page/vendor"])
def test_nothing_else_is_served(url: str, path: str) -> None:
    assert httpx2.get(f"{url}{path}").status_code == 404
