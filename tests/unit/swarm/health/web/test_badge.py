"""The badge: well-formed whatever a model is called, right in what it says, cacheable over HTTP."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient

from benchmarks.operations import page_states
from swarm.health.tasks.publisher import StatePublisher
from swarm.health.web.api import make_app
from swarm.health.web.badge import badge

SVG = "{http://www.w3.org/2000/svg}"
HUB_NAME = "meta-llama/Llama-3.3-70B-Instruct"


def said(svg: str) -> tuple[list[str], str, str]:
    """The texts that are drawn, the title, and the colour of the right half."""
    root = ElementTree.fromstring(svg)
    texts = [found.text or "" for found in root.iter(f"{SVG}text")]
    title = root.find(f"{SVG}title")
    assert title is not None
    assert root.get("aria-labelledby") == title.get("id")
    return texts, title.text or "", [rect.get("fill") or "" for rect in root.iter(f"{SVG}rect")][-1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("serving", "serving · 12 layers, margin 1"),
        ("degraded", "degraded · 12 layers, margin 0"),
        ("broken", "broken · 12 layers, margin 0"),
    ],
)
def test_a_badge_says_the_verdict(name: str, text: str) -> None:
    made = badge(getattr(page_states, name)(), "demo-target")
    texts, title, colour = said(made.svg)
    assert (texts, title) == (["demo-target", text], f"demo-target: {text}")
    assert colour == {"serving": "#14613f", "degraded": "#7d5200", "broken": "#a8231b"}[name]
    assert badge(getattr(page_states, name)(), page_states.FINGERPRINT).svg == made.svg


@pytest.mark.parametrize("label", [page_states.MARKUP, "\"&'</svg>", "\x00\x1b\ud800\u202e", "模型", "x" * 500, " "])
def test_any_label_is_text_in_a_well_formed_picture(label: str) -> None:
    texts, _, _ = said(badge(page_states.serving(), "demo-target", label).svg)
    assert texts[0].startswith(label[:5].translate(dict.fromkeys([0, 0x1B, 0xD800, 0x202E], "�")))
    assert len(texts[0]) <= 60
    texts, _, _ = said(badge(page_states.serving(), label).svg)
    assert texts[1] == "unknown"


def test_badges_over_http() -> None:
    publisher = StatePublisher()

    async def points(_model: str, _window: str) -> dict[str, object]:
        return {}

    with TestClient(make_app(publisher, points)) as client:
        assert client.get("/badge/any.svg").status_code == 404
        publisher.publish(page_states.crowd(60))
        found = client.get(f"/badge/{HUB_NAME}.svg")
        assert (found.status_code, found.headers["content-type"]) == (200, "image/svg+xml")
        assert found.headers["cache-control"] == "public, max-age=30"
        assert HUB_NAME in said(found.text)[0]
        again = client.get(f"/badge/{HUB_NAME}.svg", headers={"if-none-match": found.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert client.head(f"/badge/{HUB_NAME}.svg").status_code == 200
        assert said(client.get(f"/badge/{HUB_NAME}.svg", params={"label": "<our> swarm"}).text)[0][0] == "<our> swarm"
        nobody = client.get("/badge/nobody.svg")
        assert (nobody.status_code, said(nobody.text)[0]) == (404, ["nobody", "unknown"])
        for path in ("/badge/", "/badge/.svg", "/badge/demo-target", f"/badge/{'x' * 400}.svg"):
            assert client.get(path).headers["content-type"] == "application/json", path
        assert client.get("/badge/x.svg", params={"label": "x" * 61}).status_code == 422
        publisher.publish(page_states.broken())
        changed = client.get("/badge/demo-target.svg", headers={"if-none-match": found.headers["etag"]})
        assert changed.status_code == 200


def test_the_pages_files_are_asked_for_again_each_time() -> None:
    async def points(_model: str, _window: str) -> dict[str, object]:
        return {}

    with TestClient(make_app(StatePublisher(), points)) as client:
        first = client.get("/page/app.js")
        assert (first.status_code, first.headers["cache-control"]) == (200, "no-cache")
        again = client.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.headers["cache-control"]) == (304, "no-cache")
