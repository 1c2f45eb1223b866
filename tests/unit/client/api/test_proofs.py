"""Proofs of answers: asked for by a header, kept for a while, and shown to the key that asked alone."""

from __future__ import annotations

from dataclasses import replace

import httpx2
import pytest

from client.api import proofs
from client.api.app import build_app
from client.api.backend import ApiCaller, Finished, Job
from client.api.context import ApiSettings
from client.api.errors import ApiError
from client.api.proofs import HEADER, ProofShelf
from client.base.stats import Proof
from tests.scripted_backend import ScriptedBackend, Step, saying

KEYS = ("key-one", "key-two")
CHAT = {"model": "demo-model", "messages": [{"role": "user", "content": "Hi"}]}
ME, OTHER = ApiCaller("me"), ApiCaller("other")


def proving(proof: Proof) -> ScriptedBackend:
    """A backend whose answers have a proof where it was asked for."""

    def script(job: Job) -> list[Step]:
        steps: list[Step] = list(saying("Hello")(job))
        end = steps[-1]
        assert isinstance(end, Finished)
        asked = job.options.get("proof", "none") != "none"
        steps[-1] = replace(end, result=replace(end.result, proof=proof if asked else None))
        return steps

    return ScriptedBackend(script)


def client_of(backend: ScriptedBackend, key: str = KEYS[0]) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(build_app(backend, ApiSettings(keys=KEYS)))
    return httpx2.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", headers={"authorization": f"Bearer {key}"}
    )


@pytest.mark.parametrize("choice", ["signed", "rows"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/completions", {"model": "demo-model", "prompt": "Hi"}),
        ("/v1/responses", {"model": "demo-model", "input": "Hi"}),
        ("/v1/responses", {"model": "demo-model", "input": "Hi", "stream": True}),
        ("/v1/messages", {**CHAT, "max_tokens": 9}),
        ("/api/chat", CHAT),
        ("/api/chat", {**CHAT, "stream": False}),
    ],
)
async def test_an_answer_says_where_its_proof_is(path: str, body: dict[str, object], choice: str) -> None:
    backend = proving(Proof(b"evidence", 3, ("12D3KooWdead",), ("two machines differ",)))
    async with client_of(backend) as http:
        answer = await http.post(path, json=body, headers={HEADER: choice})
        assert answer.status_code == 200, answer.text
        assert backend.jobs[-1].options.get("proof") == choice
        found = await http.get(answer.headers[HEADER])
        assert (found.status_code, found.content) == (200, b"evidence")
        assert found.headers["canopy-proof-notes"] == "two machines differ; node 12D3KooWdead signed nothing"
        stranger = await http.get(answer.headers[HEADER], headers={"authorization": f"Bearer {KEYS[1]}"})
        assert stranger.status_code == 404
        nobody = await http.get(answer.headers[HEADER], headers={"authorization": ""})
        assert nobody.status_code == 401


async def test_without_the_header_nothing_is_proved() -> None:
    backend = proving(Proof(b"evidence"))
    async with client_of(backend) as http:
        answer = await http.post("/v1/chat/completions", json=CHAT)
        assert HEADER not in answer.headers
        assert "proof" not in backend.jobs[-1].options
        name = answer.headers["x-request-id"]
        assert (await http.get(f"/v1/proofs/{name}")).status_code == 404


@pytest.mark.parametrize(("body", "asked"), [(CHAT, "all"), ({**CHAT, "n": 2}, "signed")])
async def test_what_cannot_be_proved_is_refused(body: dict[str, object], asked: str) -> None:
    backend = proving(Proof(b"evidence"))
    async with client_of(backend) as http:
        for stream in (False, True):
            answer = await http.post("/v1/chat/completions", json={**body, "stream": stream}, headers={HEADER: asked})
            assert answer.status_code == 400
        assert backend.jobs == []


async def test_a_proof_that_nobody_signed_says_why() -> None:
    async with client_of(proving(Proof(b"", problems=("no proof: node x signed something else",)))) as http:
        answer = await http.post("/v1/chat/completions", json=CHAT, headers={HEADER: "signed"})
        found = await http.get(answer.headers[HEADER])
        assert found.status_code == 409
        assert "signed something else" in found.json()["error"]["message"]


def test_proofs_are_kept_for_a_while_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    shelf = ProofShelf(lambda: now)
    monkeypatch.setattr(proofs, "MAX_BYTES", 100)
    for place in range(4):
        shelf.keep(f"req_{place}", ME, Proof(bytes(40)))
    for name, caller, is_kept in (
        ("req_1", ME, False),
        ("req_2", ME, True),
        ("req_3", ME, True),
        ("req_3", OTHER, False),
    ):
        if is_kept:
            assert shelf.of(name, caller).data
            continue
        with pytest.raises(ApiError, match="no proof"):
            shelf.of(name, caller)
    for place in range(200):
        shelf.keep(f"small_{place}", ME, Proof(b"x"))
    assert len(shelf._kept) == proofs.MAX_KEPT
    now = proofs.KEPT_S
    with pytest.raises(ApiError, match="too old"):
        shelf.of("small_199", ME)
    assert not shelf._kept
