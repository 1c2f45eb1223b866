"""The application around the dialects: the guard, errors in each dialect's form, streams."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from client.api.app import build_app
from client.api.backend import ModelCard
from client.api.context import ApiSettings
from client.api.guard import host_name
from client.base.options import GenerateOptions
from tests.api_server import served
from tests.scripted_backend import CARD, ScriptedBackend, saying

ROOT = Path(__file__).parents[4]
KEYS = ("sk-first", "sk-second")


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend(saying("Hello"))


@pytest.fixture(scope="module")
def url(backend: ScriptedBackend) -> Iterator[str]:
    settings = ApiSettings(keys=KEYS, hosts=("127.0.0.1", "localhost"), max_body_bytes=1_000)
    with served(build_app(backend, settings)) as base:
        yield base


def client_of(backend: ScriptedBackend, settings: ApiSettings | None = None) -> httpx2.AsyncClient:
    """A client of the application itself."""
    transport = httpx2.ASGITransport(build_app(backend, settings))
    return httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def test_health_says_what_is_missing(url: str, backend: ScriptedBackend) -> None:
    assert httpx2.get(f"{url}/health").json()["status"] == "ok"
    backend.model = replace(CARD, is_complete=False, missing=("5-8",), serve_line="node serve demo --layers 5-8")
    answer = httpx2.get(f"{url}/health")
    backend.model = CARD
    assert answer.status_code == 503
    assert answer.json()["model"]["missing"] == ["5-8"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/nothing", {"error": {"type": "authentication_error", "code": "invalid_api_key", "param": None}}),
        ("/v1/messages", {"type": "error", "error": {"type": "authentication_error"}}),
    ],
)
def test_a_wrong_key_is_refused_in_the_dialect(url: str, path: str, body: dict[str, dict[str, str]]) -> None:
    answer = httpx2.post(f"{url}{path}", headers={"authorization": "Bearer sk-wrong"}, json={})
    assert answer.status_code == 401
    assert answer.json()["error"].items() >= body["error"].items()


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {KEYS[1]}"}, {"x-api-key": KEYS[0]}])
def test_any_of_the_keys_opens(url: str, headers: dict[str, str]) -> None:
    answer = httpx2.get(f"{url}/v1/nothing", headers=headers)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, "host_not_allowed"),
        ({"origin": "https://evil.example"}, "origin_not_allowed"),
    ],
)
def test_strange_pages_and_names_are_refused(url: str, headers: dict[str, str], code: str) -> None:
    answer = httpx2.get(f"{url}/health", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, code)


def test_a_large_body_is_refused(url: str) -> None:
    answer = httpx2.post(f"{url}/v1/nothing", content=b"x" * 1_001, headers={"x-api-key": KEYS[0]})
    assert answer.status_code == 413


def test_pages_of_an_allowed_origin_may_call(backend: ScriptedBackend) -> None:
    origin = {"origin": "https://chat.example.org"}
    with served(build_app(backend, ApiSettings(keys=KEYS, origins=("https://chat.example.org",)))) as base:
        asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = httpx2.options(f"{base}/v1/chat/completions", headers=asked)
        refused = httpx2.get(f"{base}/v1/models", headers=origin)
    assert (preflight.status_code, refused.status_code) == (200, 401)
    for answer in (preflight, refused):
        assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:8000", "localhost"),
        ("[::1]:8000", "::1"),
        ("[::1]", "::1"),
        ("A.b", "a.b"),
        ("localhost:", "localhost"),
        ("[::1].evil.example", ""),
        ("[::1", ""),
        ("localhost:8000.evil.example", ""),
        ("localhost:@evil.example", ""),
        ("", ""),
    ],
)
def test_a_host_is_read_without_its_port(host: str, name: str) -> None:
    assert host_name(host) == name


def test_no_guard_takes_a_path_from_a_header() -> None:
    """`request.url` is made of the `Host` header too: `Host: localhost:#` once made every path an empty one."""
    files = [path for folder in ("client/api", "swarm/health/web") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 20
    assert [path for path in files if "url.path" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("host", ["localhost:#", "localhost:?", "localhost/#", "localhost"])
async def test_a_strange_host_header_opens_nothing(backend: ScriptedBackend, host: str) -> None:
    async with client_of(backend, ApiSettings(keys=KEYS)) as http:
        answer = await http.get("/v1/models", headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("app://obsidian.md", 200),
        ("tauri://localhost", 200),
        ("vscode-webview://1a2b", 200),
        ("https://app.example", 403),
        ("xapp://a", 403),
        ("app://a/https://b", 403),
        ("null", 403),
    ],
)
def test_programs_on_the_desktop_may_call(url: str, origin: str, status: int) -> None:
    answer = httpx2.get(f"{url}/v1/models", headers={"origin": origin, "x-api-key": KEYS[0]})
    assert answer.status_code == status
    assert answer.headers.get("access-control-allow-origin") == (origin if status == 200 else None)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/demo-model", "/api/tags", "/health", "/"])
def test_head_is_a_get_without_a_body(url: str, path: str) -> None:
    answer = httpx2.head(f"{url}{path}", headers={"x-api-key": KEYS[0]})
    assert (answer.status_code, answer.content) == (200, b"")
    assert httpx2.head(f"{url}/v1/completions", headers={"x-api-key": KEYS[0]}).status_code == 405


BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()


@pytest.mark.parametrize(
    ("encoding", "content", "status", "says"),
    [
        ("gzip", gzip.compress(BODY, mtime=0), 200, "Hello"),
        ("GZIP", gzip.compress(BODY, mtime=0), 200, "Hello"),
        ("deflate", zlib.compress(BODY), 200, "Hello"),
        ("identity", BODY, 200, "Hello"),
        ("gzip", BODY, 400, "no gzip"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 400, "no whole gzip"),
        ("gzip", gzip.compress(b" " * 1_001, mtime=0), 413, "larger than 1,000"),
        ("gzip", gzip.compress(b" " * 10**8, mtime=0), 413, "larger than 1,000"),
        ("br", BODY, 415, "gzip and deflate are"),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY, mtime=0), mtime=0), 415, "gzip and deflate are"),
    ],
)
def test_a_packed_body_is_unpacked_within_the_bound(
    url: str, encoding: str, content: bytes, status: int, says: str
) -> None:
    headers = {"x-api-key": KEYS[0], "content-encoding": encoding}
    answer = httpx2.post(f"{url}/v1/chat/completions", content=iter([content[:40], content[40:]]), headers=headers)
    assert (answer.status_code, says in answer.text) == (status, True), answer.text


HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"stop": ["a"] * 5}, "stop", "at most 4 items, not 5"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": 5}, "stop", "expected a string or an array, got a number"),
        ({"stop": [5]}, "stop[0]", "expected a string, got a number"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type", "Missing"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content", "a string or an array, got an object"),
        ({"messages": [*HI, {"role": "user", "content": 5}, {}]}, "messages[1].content", "a string or an array"),
        ({"tool_choice": "always"}, "tool_choice", "expected 'none', 'auto' or 'required' or an object, got a string"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "Missing"),
        ({"max_tokens": "5"}, "max_tokens", "expected a whole number, got a string"),
        ({"max_tokens": -3}, "max_tokens", "give 1 or more, or -1 for no limit"),
        ({"messages": None}, "messages", "expected an array, got null"),
        ({"logprobs": 1}, "logprobs", "expected a boolean, got a number"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
async def test_an_error_names_the_rule_that_was_broken(
    backend: ScriptedBackend, fields: dict[str, object], param: str, says: str
) -> None:
    async with client_of(backend) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": HI, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert "valid dictionary" not in error["message"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
@pytest.mark.parametrize(
    ("path", "more"), [("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 8}), ("/api/chat", {})]
)
async def test_a_body_is_json_whatever_its_header_says(
    backend: ScriptedBackend, path: str, more: dict[str, int], kind: str | None
) -> None:
    """`curl -d` says that it sends a form."""
    body = {"model": CARD.id, "messages": HI, "stream": False, **more}
    async with client_of(backend) as http:
        headers = {} if kind is None else {"content-type": kind}
        answer = await http.post(path, content=json.dumps(body), headers=headers)
    assert (answer.status_code, "Hello" in answer.text) == (200, True)


ASKED_BY_NAME = [("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 8}), ("/api/chat", {})]


@pytest.mark.parametrize(
    ("settings", "name", "answers_as"),
    [
        (ApiSettings(), "demo-model", "demo-model"),
        (ApiSettings(), "gpt-4o-mini", None),
        (ApiSettings(aliases=("gpt-4o-mini", "claude")), "gpt-4o-mini", "gpt-4o-mini"),
        (ApiSettings(aliases=("gpt-4o-mini",)), "gpt-4o", None),
        (ApiSettings(any_model=True), "claude-9", "demo-model"),
    ],
)
async def test_a_model_has_further_names(
    backend: ScriptedBackend, settings: ApiSettings, name: str, answers_as: str | None
) -> None:
    async with client_of(backend, settings) as http:
        for path, more in ASKED_BY_NAME:
            answer = await http.post(path, json={"model": name, "messages": HI, "stream": False, **more})
            assert answer.status_code == (404 if answers_as is None else 200)
            if answers_as is not None and not path.startswith("/api/"):  # Ollama repeats what was asked
                assert answer.json()["model"] == answers_as
        answer = await http.get(f"/v1/models/{name}")
        assert answer.status_code == (404 if answers_as is None else 200)


async def test_further_names_are_listed(backend: ScriptedBackend) -> None:
    async with client_of(backend, ApiSettings(aliases=("claude-x",))) as http:
        openai = (await http.get("/v1/models")).json()["data"]
        anthropic = (await http.get("/v1/models", headers={"anthropic-version": "x"})).json()
        ollama = (await http.get("/api/tags")).json()["models"]
        assert (await http.post("/api/show", json={"model": "claude-x:latest"})).status_code == 200
    assert [one["id"] for one in openai] == [one["id"] for one in anthropic["data"]] == ["demo-model", "claude-x"]
    assert (anthropic["first_id"], anthropic["last_id"]) == ("demo-model", "claude-x")
    assert [one["name"] for one in ollama] == ["demo-model:latest", "claude-x:latest"]


async def test_the_models_own_sampling_is_told(backend: ScriptedBackend) -> None:
    own = replace(CARD, sampling=GenerateOptions(temperature=0.6, repetition_penalty=1.05))
    async with client_of(ScriptedBackend(saying("Hello"), own)) as http:
        assert (await http.get("/v1/models/demo-model")).json()["sampling"] == dict(own.sampling)
        shown = (await http.post("/api/show", json={"model": "demo-model"})).json()
    assert shown["parameters"] == "temperature 0.6\nrepeat_penalty 1.05"


class SilentDirectory(ScriptedBackend):
    """Its directory never answers."""

    async def card(self) -> ModelCard:
        raise AssertionError("a request waits for the directory")


@pytest.mark.parametrize(
    ("path", "more"), [("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 8}), ("/api/chat", {})]
)
async def test_a_request_waits_for_no_directory(path: str, more: dict[str, int]) -> None:
    body = {"model": CARD.id, "messages": [{"role": "user", "content": "Hi"}], "stream": False, **more}
    async with client_of(SilentDirectory(saying("Hello"))) as http:
        assert (await http.post(path, json=body)).status_code == 200
