"""What users do wrong at the command line: one line that says so, a failure, and nothing slow before it.

The commands run in this process where they can: a program takes seconds to start.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import client.cli
import node.cli
from client.base.options import Options
from client.terminal.commands import Generate
from node.life.serve import Node
from node.model.config import Dtype, ServeConfig
from swarm.base.ids import ModelIdentity
from swarm.base.layers import Span
from swarm.demo import DRAFT, TARGET
from swarm.directory.dht.registry import DhtConfig, DhtPipe, DhtRegistry, start_pipe
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import RECORD_TTL_S
from swarm.files.fingerprint import model_identity
from tests.e2e.programs import bootstrap, environment, opened, program, run, serve

STRANGER = ModelIdentity.of("stranger", "b2" * 32, "c3" * 32, "d4" * 32, 40)

Refusal = Callable[[int], str]
"""Checks a command's exit status and gives the one line that it wrote."""


@pytest.fixture
def refusal(capfd: pytest.CaptureFixture[str]) -> Refusal:
    def check(status: int) -> str:
        (line,) = [line for line in capfd.readouterr().err.splitlines() if line]
        assert status == 1
        assert "Traceback" not in line
        return line

    return check


@pytest.fixture(autouse=True)
def nobody_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that starts in spite of a mistake fails its test, and neither waits nor ends this process."""

    async def wait_failed(_: Node) -> None:
        raise AssertionError("the node serves")

    def leave(status: int) -> None:
        raise AssertionError(f"the node left with {status}")

    monkeypatch.setattr(Node, "wait_failed", wait_failed)
    monkeypatch.setattr(os, "_exit", leave)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the target that no other test opens."""
    return Path(shutil.copytree(TARGET, tmp_path_factory.mktemp("model") / TARGET.name))


@pytest.fixture
def config(model: Path, tmp_path: Path) -> ServeConfig:
    """A node that would serve."""
    return ServeConfig("0-4", str(model), host="127.0.0.1", threads=1, identity=tmp_path / "node.key")


@pytest.fixture
def untouched(model: Path) -> Iterator[None]:
    """Nobody opens the weights during the test."""
    with opened(model / "model.safetensors") as count:
        yield
        assert count() == 0, "weights were opened before the mistake was told"


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with bootstrap(tmp_path_factory.mktemp("peer")) as address:
        yield address


def generate(
    peer: str, model: Path = TARGET, draft: tuple[str, ...] = (), temperature: float = 0.0, wait_s: float = 60.0
) -> int:
    options = Options(temperature=temperature)
    command = Generate(model=str(model), prompt="It", join=(peer,), draft=draft, options=options, wait=wait_s)
    return client.cli.run(command)


def draft_of_whole_words(folder: Path) -> Path:
    """The demo draft with a tokenizer that writes words, not bytes."""
    other = folder / "other-draft"
    shutil.copytree(DRAFT, other)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    words = {f"word{token_id}": token_id for token_id in range(len(content["model"]["vocab"]))}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "word0"}
    file.write_text(json.dumps(content | {"model": model, "pre_tokenizer": {"type": "Whitespace"}, "decoder": None}))
    return other


def announce(peer: str, *models: ModelIdentity) -> None:
    """List a node per model at a DHT peer, where the records stay for their time."""

    async def list_one(model: ModelIdentity) -> None:
        async with DhtRegistry.open(DhtConfig((peer,), "127.0.0.1")) as registry:
            await registry.announce(
                NodeRecord(
                    peer=registry.peer_id,
                    model=model,
                    span=Span(0, model.num_layers),
                    address="127.0.0.1:9",
                    state=NodeState.SERVING,
                    numeric_class="cpu-float32",
                    version="0.2.0",
                    name=None,
                    sweep_ms=(),
                    kv_tokens_free=1,
                    kv_tokens_total=1,
                    sequence=1,
                    expires_at=time.time() + RECORD_TTL_S,
                )
            )

    async def list_all() -> None:
        for model in models:
            await list_one(model)

    asyncio.run(list_all())


# Options


OPTIONS = """
import sys
from node.cli import serve
from client.terminal.commands import Generate
from node.model.config import ServeConfig
statuses = [serve(ServeConfig(layers)) for layers in ("8-4", "4-4", "-1-3", "abc")]
statuses += [serve(ServeConfig("0-4", port=70_000)), serve(ServeConfig("0-4", join=("nonsense",)))]
assert not {"torch", "transformers", "grpc"} & sys.modules.keys(), "told after something slow"
sys.exit(0 if statuses == [1] * 6 else 2)
"""


def test_bad_options_are_told_before_anything_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPTIONS], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 6
    assert all(line.startswith("node: layers ") for line in lines[:4])
    assert "--port 70000" in lines[4]
    assert "--join 'nonsense'" in lines[5]


def test_a_reversed_span_is_one_line_of_the_command(tmp_path: Path) -> None:
    done = run("node.cli", "serve", str(TARGET), "--layers", "8-4", "--identity", str(tmp_path / "node.key"))
    assert done.returncode == 1
    assert done.stderr == "node: layers 8-4: a span is start-end with 0 <= start < end\n"


def test_layers_that_the_model_lacks_are_one_line(config: ServeConfig, refusal: Refusal) -> None:
    assert "the model has 12 layers" in refusal(node.cli.serve(replace(config, layers="0-99")))
    line = refusal(node.cli.serve(replace(config, layers="auto", num_layers=99)))
    assert line == "node: --num-layers 99: the model has 12 layers"


def test_more_kv_than_the_memory_holds_is_one_line(config: ServeConfig, refusal: Refusal) -> None:
    line = refusal(node.cli.serve(replace(config, kv_tokens=99_999_999_999_999)))
    assert "--kv-tokens 99999999999999 need" in line
    assert line.endswith("would fit")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("device", "dtype", "says"),
    [
        ("banana", "auto", "device 'banana' cannot be used"),
        ("cuda:99", "auto", "device 'cuda:99' cannot be used"),
        ("meta", "auto", "device 'meta': models run on cpu"),
        ("cpu", "float16", "--dtype float16 is far slower than float32 on a CPU"),
    ],
)
def test_a_device_or_type_that_cannot_compute_is_one_line(
    device: str, dtype: Dtype, says: str, config: ServeConfig, refusal: Refusal
) -> None:
    assert says in refusal(node.cli.serve(replace(config, device=device, dtype=dtype)))


def test_a_draft_that_cannot_be_used_is_one_line(peer: str, tmp_path: Path, refusal: Refusal) -> None:
    other = draft_of_whole_words(tmp_path)
    for draft, says in (("/nowhere", "/nowhere"), (str(other), "no bytes in common")):
        assert says in refusal(generate(peer, draft=(draft,)))


def test_a_temperature_below_0_is_one_line(peer: str, refusal: Refusal) -> None:
    assert "temperature" in refusal(generate(peer, temperature=-1.0))


def test_an_unknown_model_is_one_line(peer: str, config: ServeConfig, tmp_path: Path, refusal: Refusal) -> None:
    nothing = tmp_path / "nothing"
    assert "no such folder" in refusal(generate(peer, nothing))
    assert "is no GGUF file; name the folder" in refusal(generate(peer, DRAFT / "config.json"))
    assert "no such folder" in refusal(node.cli.serve(replace(config, model=str(nothing), join=(peer,))))


def test_without_a_model_an_empty_swarm_says_so(
    config: ServeConfig, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CANOPY_MODEL", raising=False)
    assert "which MODEL" in refusal(node.cli.serve(replace(config, model=None)))


# Ports and identities


@pytest.mark.usefixtures("untouched")
def test_a_dht_port_in_use_is_one_line(config: ServeConfig, refusal: Refusal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1 port {port}" in refusal(node.cli.serve(replace(config, dht_port=port)))


@pytest.mark.usefixtures("untouched")
def test_a_port_in_use_is_one_line(model: Path, tmp_path: Path) -> None:
    """As a program, for gRPC speaks on standard error where it was loaded before the command."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--layers", "0-4", "--host", "127.0.0.1", "--port", str(port), "--identity", str(tmp_path / "key")]
        done = run("node.cli", "serve", str(model), *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"node: port {port} of 127.0.0.1 cannot be opened; is another node using it?\n"


@pytest.mark.usefixtures("untouched")
def test_an_address_of_another_machine_is_one_line(model: Path, tmp_path: Path) -> None:
    options = ["--layers", "0-4", "--host", "192.0.2.1", "--identity", str(tmp_path / "key")]
    done = run("node.cli", "serve", str(model), *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "node: --host 192.0.2.1: this machine has no such address\n"


@pytest.mark.usefixtures("untouched")
def test_an_identity_that_cannot_be_used_is_one_line(config: ServeConfig, tmp_path: Path, refusal: Refusal) -> None:
    garbage, shown = tmp_path / "garbage.key", tmp_path / "shown.key"
    garbage.write_bytes(b"garbage")
    Identity.load_or_create(shown)
    shown.chmod(0o444)
    for path, says in ((tmp_path, "Is a directory"), (garbage, "no libp2p key"), (shown, f"chmod 600 {shown}")):
        line = refusal(node.cli.serve(replace(config, identity=path)))
        assert says in line
        assert str(path) in line


@pytest.mark.usefixtures("untouched")
def test_an_identity_copied_from_a_running_node_is_one_line(
    peer: str, config: ServeConfig, tmp_path: Path, refusal: Refusal
) -> None:
    with program(serve(TARGET, "0-4", peer, tmp_path), tmp_path / "first.log") as first:
        address = first.wait_for(r"serving at \S+").split()[-1]
        own = tmp_path / "0-4.key"
        line = refusal(node.cli.serve(replace(config, join=(peer,), identity=own)))
        assert "in use by another program on this machine" in line
        copied = Path(shutil.copy(own, tmp_path / "copied.key"))
        line = refusal(node.cli.serve(replace(config, join=(peer,), identity=copied)))
        assert f"another machine, at {address}, already serves under this node's identity" in line


def test_joining_ones_own_identity_is_one_line(peer: str, config: ServeConfig, refusal: Refusal) -> None:
    assert config.identity is not None
    own = f"{peer.rpartition('/')[0]}/{Identity.load_or_create(config.identity).peer_id}"
    assert "own identity" in refusal(node.cli.serve(replace(config, join=(own,))))


# Swarms


def test_nobody_answers_is_one_line(refusal: Refusal) -> None:
    dead = "/ip4/127.0.0.1/tcp/9/p2p/QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG"
    assert "127.0.0.1/tcp/9" in refusal(generate(dead))


def test_an_address_that_peers_cannot_reach_is_not_listed(peer: str, config: ServeConfig, refusal: Refusal) -> None:
    line = refusal(node.cli.serve(replace(config, join=(peer,), announce_address="127.0.0.1:9")))
    assert "peers cannot reach 127.0.0.1:9" in line


@pytest.mark.usefixtures("untouched")
def test_a_wrong_clock_is_one_line(
    peer: str, config: ServeConfig, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = (
        "import runpy, time; right = time.time; time.time = lambda: right() + 10\n"
        "runpy.run_module('swarm.directory.dht.process', run_name='__main__')"
    )

    async def start_late() -> DhtPipe:
        return await start_pipe([sys.executable, "-c", late])

    monkeypatch.setattr("swarm.directory.dht.registry.start_pipe", start_late)
    says = [refusal(node.cli.serve(replace(config, join=(peer,)))), refusal(generate(peer))]
    assert all("clock differs by more than 3 s" in line for line in says)


def test_a_swarm_of_other_models_is_one_line(
    peer: str, config: ServeConfig, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joining works, for one directory may hold many models; what it holds is named, or what is missing."""
    monkeypatch.delenv("CANOPY_MODEL", raising=False)
    announce(peer, STRANGER, another := ModelIdentity.of("another", "b2" * 32, "c3" * 32, "e5" * 32, 40))
    line = refusal(node.cli.serve(replace(config, model=None, join=(peer,))))
    prints = another.fingerprint[:8], STRANGER.fingerprint[:8]
    assert f"say which MODEL to serve; models in this swarm: another ({prints[0]}), stranger ({prints[1]})" in line
    line = refusal(generate(peer))
    assert "demo-target" in line
    assert "nobody serves" in line
    assert line.rstrip().endswith("this swarm serves another, stranger")


def test_another_fingerprint_of_the_same_name_is_one_line(
    config: ServeConfig, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CANOPY_MODEL", raising=False)
    monkeypatch.chdir(TARGET.parent)
    ours = model_identity(TARGET, TARGET.name)
    other = ModelIdentity.of(ours.name, ours.config_digest, "d4" * 32, ours.tokenizer_digest, ours.num_layers)
    with bootstrap(tmp_path) as fresh:
        announce(fresh, other)
        line = refusal(node.cli.serve(replace(config, model=None, join=(fresh,))))
        assert ours.fingerprint[:12] in line
        assert other.fingerprint[:12] in line
        announce(fresh, ours)
        line = refusal(generate(fresh, wait_s=0.0))
        assert "nobody serves layers" in line, "it is tried, for a second one that is listed refuses nobody"
