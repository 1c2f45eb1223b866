"""Two open swarms and a machine that was in both: real programs that start, stop and are invited never mix them."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from swarm.demo import TARGET
from tests.e2e.programs import Program, program, run

NODE = ("--layers", "0-12", "--host", "127.0.0.1", "--threads", "1", "--dtype", "float32")


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Goes to somebody's machine: programs that are started afterwards have that home."""
    monkeypatch.delenv("CANOPY_SWARMS")

    def at(whose: str) -> Path:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / whose))
        return tmp_path / whose / "canopy"

    return at


@contextmanager
def serving(log: Path, *words: str) -> Iterator[Program]:
    with program(["node.cli", "serve", *words, *NODE], log) as node:
        node.wait_for("serving at")
        yield node
        node.end(signal.SIGTERM)


def nodes_of(address: str) -> int:
    """How many nodes the swarm of a bootstrap peer lists."""
    looked = run("swarm.cli", "status", "--join", address)
    assert looked.returncode == 0, looked.stderr
    return looked.stdout.count("127.0.0.1:")


@pytest.mark.crossing  # by histories: tests/property/swarm/directory/joining; at the DHT: tests/net/swarm/directory/dht
@pytest.mark.timeout(240)
def test_a_machine_that_was_in_both_brings_neither_to_the_other(at: Callable[[str], Path], tmp_path: Path) -> None:
    with ExitStack() as stack:
        boots, swarms, words = [], [], []
        for whose in ("anna", "berta"):
            at(whose)
            boot = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0"]
            peer = stack.enter_context(program(boot, tmp_path / f"{whose}.log"))
            boots.append(peer.wait_for(r"/ip4/\S+"))
            swarms.append(peer.wait_for(r"of swarm [0-9a-f]{8}")[-8:])
            words.append(run("swarm.cli", "invite").stdout.strip())
        home = at("ben")
        with serving(tmp_path / "first.log", str(TARGET), "--join", boots[0]):
            assert (nodes_of(boots[0]), nodes_of(boots[1])) == (1, 0)
        with serving(tmp_path / "second.log", str(TARGET), "--join", words[1]):
            assert (nodes_of(boots[0]), nodes_of(boots[1])) == (0, 1)
        with serving(tmp_path / "third.log") as node:  # the swarm joined last
            assert "the swarm joined last" in node.log.read_text()
            assert nodes_of(boots[0]) == 0
        both = run("node.cli", "serve", str(TARGET), *NODE, "--join", boots[0], "--join", boots[1])
        assert both.returncode == 1
        assert set(re.findall(r"swarm ([0-9a-f]{8})", both.stderr)) == set(swarms)
        known = json.loads((home / "swarms.json").read_text())["swarms"]
        assert [one["swarm"][:8] for one in known] == swarms[::-1]
        assert [one["peers"] for one in known] == [[boots[1]], [boots[0]]]
        assert len(known[0]["here"]) == 1
        assert known[1]["here"] == []
