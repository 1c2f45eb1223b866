"""Two machines as processes that each serve parts of two models, and one API over both."""

from __future__ import annotations

import json
import signal
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from swarm.demo import DRAFT, TARGET
from tests.e2e.programs import bootstrap, program, run, serve, within

PROMPT = "It was a dark night, and the old captain"
ASKED = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.0}


def ask(url: str, path: str, body: object = None) -> object:
    """The JSON that a server answers with."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_two_machines_serve_two_models_through_one_api(tmp_path: Path) -> None:
    with ExitStack() as stack:
        peer = stack.enter_context(bootstrap(tmp_path))
        nodes = []
        for layers in ("0-6,0-1", "6-12,1-2"):
            command = [*serve(TARGET, layers, peer, tmp_path), "--drain", "0"]
            command.insert(3, str(DRAFT))
            nodes.append(stack.enter_context(program(command, tmp_path / f"{layers}.log")))
        for node in nodes:
            node.wait_for(r"serving at \S+")
        options = ["--join", peer, "--port", "0", "--draft", "none"]
        command = ["client.cli", "api", str(TARGET), str(DRAFT), *options]
        api = stack.enter_context(program(command, tmp_path / "api.log"))
        url = api.wait_for(r"http://[0-9.:]+")

        def served() -> set[str]:
            listed = ask(url, "/v1/models")["data"]  # type: ignore[index]
            return {one["id"] for one in listed if one["health"]["is_complete"]}

        assert within(30, lambda: served() == {TARGET.name, DRAFT.name})
        for model in (TARGET, DRAFT):
            alone = run(
                "client.cli", "generate", str(model), "--join", peer, "--prompt", PROMPT, "--max-new-tokens", "12"
            )
            made = ask(url, "/v1/completions", {**ASKED, "model": model.name})
            assert made["choices"][0]["text"] == alone.stdout.removesuffix("\n"), alone.stderr  # type: ignore[index]
        status, left = nodes[0].end(signal.SIGTERM)
        assert (status, left) == (0, [])
        assert within(30, lambda: not served()), "it took both models along"
