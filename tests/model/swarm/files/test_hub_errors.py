"""What a user is told when the hub refuses, cannot be reached or sends nonsense: one line, and never the token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import swarm.files.hub
from client.base.target import load_target
from node.model.checkpoint import open_checkpoint
from swarm.base.errors import ConfigError, HubError, UnknownModel, UnsupportedModel
from swarm.compute.ragged_batch import load_whole
from swarm.files.hub_errors import LOG_IN
from tests.fake_hub import COMMIT, MODEL, FakeHub

TOKEN = "hf_secretsecretsecret"

Trouble = Callable[[FakeHub, pytest.MonkeyPatch], None]


def gated(hub: FakeHub, _: pytest.MonkeyPatch) -> None:
    hub.repos[MODEL].token, hub.repos[MODEL].gated = "another", True


def private(hub: FakeHub, _: pytest.MonkeyPatch) -> None:
    hub.repos[MODEL].token = "another"


def nowhere(hub: FakeHub, _: pytest.MonkeyPatch) -> None:
    hub.repos.clear()


def logged_in(hub: FakeHub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", TOKEN)
    hub.tokens.add(TOKEN)


def wrong_token(_: FakeHub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", TOKEN)


def broken_token(_: FakeHub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", f"{TOKEN}\x01\u2026")


def unreadable_token(_: FakeHub, __: pytest.MonkeyPatch) -> None:
    Path(constants.HF_TOKEN_PATH).mkdir()


def answers(status: int) -> Trouble:
    return lambda hub, _: setattr(hub, "status", status)


def login_page(hub: FakeHub, _: pytest.MonkeyPatch) -> None:
    hub.status = 200


def no_hub(_: FakeHub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")


def no_such_hub(_: FakeHub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(constants, "ENDPOINT", "http://user:pass@hub.invalid")


def no_scheme(_: FakeHub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(constants, "ENDPOINT", "127.0.0.1:1")


def silent(hub: FakeHub, patch: pytest.MonkeyPatch) -> None:
    hub.repos[MODEL].stall_after[""] = 0
    patch.setattr(swarm.files.hub, "ANSWER_TIMEOUT_S", 0.05)


def offline(_: FakeHub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(constants, "HF_HUB_OFFLINE", True)


def unwritable(_: FakeHub, patch: pytest.MonkeyPatch) -> None:
    Path(constants.HF_HUB_CACHE).write_text("a file where the cache should be")


def only_pickles(hub: FakeHub, _: pytest.MonkeyPatch) -> None:
    files = hub.repos[MODEL].files
    hub.repos[MODEL].files = {"config.json": files["config.json"], "pytorch_model.bin": b"a pickle"}


def no_config(hub: FakeHub, _: pytest.MonkeyPatch) -> None:
    del hub.repos[MODEL].files["config.json"]


def file_missing(hub: FakeHub, _: pytest.MonkeyPatch) -> None:
    hub.repos[MODEL].statuses["config.json"] = 404


def broken_header(hub: FakeHub, _: pytest.MonkeyPatch) -> None:
    files = hub.repos[MODEL].files
    hub.repos[MODEL].files = {"config.json": files["config.json"], "model.safetensors": b"\xff" * 100}


def lying_index(file: str) -> Trouble:
    def lie(hub: FakeHub, _: pytest.MonkeyPatch) -> None:
        index = json.dumps({"weight_map": {"model.embed_tokens.weight": file}})
        hub.repos[MODEL].files["model.safetensors.index.json"] = index.encode()

    return lie


LINES: list[tuple[list[Trouble], type[ConfigError], str]] = [
    ([nowhere], HubError, r"has no public model of this name; if it is private, set HF_TOKEN or run `hf auth login`$"),
    ([nowhere, logged_in], UnknownModel, "no such model on 127.0.0.1; check the name, or if it is private: your token"),
    ([private], HubError, "if it is private, set HF_TOKEN"),
    ([private, logged_in], UnknownModel, "your token cannot read it$"),
    ([wrong_token], HubError, "127.0.0.1 does not accept your token; make a new one, then set HF_TOKEN"),
    ([unreadable_token], HubError, "the token in .*token cannot be read; set HF_TOKEN"),
    ([broken_token], HubError, "holds characters that no token has"),
    ([gated], HubError, f"gated; accept its licence at http://127.0.0.1:\\d+/{MODEL}, then set HF_TOKEN"),
    ([gated, logged_in], HubError, f"gated, and your token has no access; accept the licence at http.*/{MODEL}, and"),
    ([answers(403), logged_in], HubError, "refuses access; check what your token may read"),
    ([answers(429)], HubError, "too many requests to 127.0.0.1; wait some minutes"),
    ([answers(500)], HubError, r"is in trouble \(HTTP 500\); try again later"),
    ([answers(503)], HubError, r"is in trouble \(HTTP 503\); try again later"),
    ([answers(418)], HubError, "answers HTTP 418"),
    ([login_page], HubError, "does not answer as a hub does; is a proxy or login page in between"),
    ([no_hub], HubError, r"127.0.0.1 cannot be reached \(.*refused.*\); check the network"),
    ([no_such_hub], HubError, r"hub.invalid cannot be reached \(.*\); check the network"),
    ([no_scheme], HubError, r"cannot be reached \(.*protocol.*\)"),
    ([silent], HubError, r"cannot be reached \(timed out\); check the network"),
    ([offline], UnknownModel, r"not in the cache \(.*cache\), and HF_HUB_OFFLINE forbids to download; unset it"),
    ([unwritable], HubError, r"cannot be kept in .*cache \(.*\); set HF_HOME to a folder that you can write to"),
    ([no_config], UnsupportedModel, r"has no config\.json"),
    ([file_missing], UnknownModel, r"config\.json: the hub has no such file"),
    ([only_pickles], UnsupportedModel, r"it has pytorch_model\.bin; only safetensors are read"),
    ([broken_header], UnsupportedModel, r"model\.safetensors cannot be read; the file on the hub is damaged"),
    ([lying_index("pytorch_model.bin")], UnsupportedModel, r"names 'pytorch_model\.bin'; only safetensors are read"),
    ([lying_index("../../x.safetensors")], UnsupportedModel, r"names '\.\./\.\./x\.safetensors'; only"),
    ([lying_index("lost.safetensors")], UnknownModel, r"lost\.safetensors: the hub has no such file"),
]


@dataclass(frozen=True)
class Told:
    """All that a user can come to see."""

    capfd: pytest.CaptureFixture[str]
    caplog: pytest.LogCaptureFixture

    def text(self) -> str:
        return "".join(self.capfd.readouterr()) + self.caplog.text


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Told:
    caplog.set_level("DEBUG")
    return Told(capfd, caplog)


@pytest.mark.parametrize(("troubles", "expected"), [(troubles, (kind, line)) for troubles, kind, line in LINES])
def test_trouble_is_one_line_without_the_token(
    troubles: list[Trouble],
    expected: tuple[type[ConfigError], str],
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    told: Told,
) -> None:
    for trouble in troubles:
        trouble(hub, monkeypatch)
    kind, line = expected
    with pytest.raises(kind, match=line) as caught:
        open_checkpoint(MODEL).tensors(["model.embed_tokens.weight"])
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message
    assert message.startswith((MODEL, "the token"))
    seen = told.text() + message
    assert TOKEN not in seen
    assert "pass@" not in seen


@pytest.mark.parametrize("trouble", [nowhere, offline])
@pytest.mark.parametrize("load", [load_target, lambda name: load_whole(name, torch.float32)], ids=["target", "draft"])
def test_clients_say_the_same_as_nodes(
    load: Callable[[str], object], trouble: Trouble, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble(hub, monkeypatch)
    with pytest.raises(ConfigError, match=f"^{MODEL}: ") as of_client:
        load(MODEL)
    with pytest.raises(ConfigError) as of_node:
        open_checkpoint(MODEL)
    assert str(of_client.value) == str(of_node.value)


def test_a_revision_that_is_nowhere_is_named(hub: FakeHub) -> None:
    with pytest.raises(UnknownModel, match=f"^{MODEL}: revision v2: the hub has no such branch, tag or commit"):
        open_checkpoint(MODEL, "v2")


def test_a_token_in_the_environment_opens_a_gated_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    gated(hub, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "another")
    assert open_checkpoint(MODEL).hub is not None


@pytest.mark.parametrize(
    ("trouble", "revision"),
    [(offline, None), (offline, "main"), (offline, COMMIT), (no_hub, None), (nowhere, None), (answers(503), None)],
)
def test_what_was_downloaded_before_serves_without_the_hub(
    revision: str | None, trouble: Trouble, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_checkpoint(MODEL, revision)
    fetched = [name for name in before.weight_map if ".layers.2." in name]
    before.fetch(fetched)
    listed_by_others = before.folder.parents[1] / "trees" / f"{COMMIT}.json"
    listed_by_others.parent.mkdir()
    file = {"size": 1, "blob_id": "0" * 40}
    listed_by_others.write_text(json.dumps({"format_version": 1, "files": {"config.json": file, "more.bin": file}}))
    trouble(hub, monkeypatch)
    hub.requests.clear()
    after = open_checkpoint(MODEL, revision)
    assert after.tensors(fetched).keys() == set(fetched)
    assert load_target(MODEL, revision).name == MODEL
    assert (after.name, after.folder, after.hub and after.hub.commit) == (MODEL, before.folder, COMMIT)
    assert trouble is not offline or not hub.requests
    with pytest.raises(ConfigError, match=rf"^{MODEL}: model-0000\d-of-\d+\.safetensors: "):
        after.fetch(after.weight_map)


def test_a_first_download_that_broke_is_not_taken_for_the_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = hub.repos[MODEL].files
    hub.repos[MODEL].files = {"config.json": files.pop("config.json")} | files
    hub.repos[MODEL].statuses["tokenizer.json"] = 503
    with pytest.raises(HubError, match=rf"^{MODEL}: tokenizer\.json: 127\.0\.0\.1 is in trouble"):
        open_checkpoint(MODEL)
    offline(hub, monkeypatch)
    with pytest.raises(UnknownModel, match="not in the cache"):
        open_checkpoint(MODEL)


def test_a_draft_without_safetensors_is_refused(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    only_pickles(hub, monkeypatch)
    with pytest.raises(UnsupportedModel, match=rf"^{MODEL}: .*it has pytorch_model\.bin; only safetensors are read"):
        load_whole(MODEL, torch.float32)
    assert hub.fetched() == {"config.json"}


@pytest.mark.timeout(120)
def test_the_command_says_it_in_one_line(hub: FakeHub, tmp_path: Path) -> None:
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": constants.HF_HUB_CACHE,
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": TOKEN,
    }
    port_and_key = ["--host", "127.0.0.1", "--port", "0", "--identity", str(tmp_path / "key")]
    command = [sys.executable, "-m", "node.cli", "serve", MODEL, "--layers", "0-2", *port_and_key]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    line = f"node: {MODEL}: 127.0.0.1 does not accept your token; make a new one, then {LOG_IN}\n"
    assert (ran.returncode, ran.stderr) == (1, line)
    assert TOKEN not in ran.stdout
