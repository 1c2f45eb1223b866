"""Machines of one network join each other by a word and no address: real programs, on hosts joined by a bridge."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm.demo import TARGET
from tests.conftest import MARK
from tests.e2e.programs import Program, ended_after
from tests.forked.program import ForkedPopen, shared_server
from tools.network_lab import NETWORK, NetworkLab, network_lab

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_program("ip", "iproute2")]

HOSTS = {"anna": f"{NETWORK}.11", "ben": f"{NETWORK}.12", "you": f"{NETWORK}.7"}
LAYERS = "layers: the swarm needs layers {} of 12 most, for nobody holds them; 6: as you asked"


@contextmanager
def on(host: str, lab: NetworkLab, folder: Path, arguments: Sequence[str]) -> Iterator[Program]:
    """A program on a host, with a home folder of its own and no terminal, beside the demo model."""
    (home := folder / host).mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "CANOPY_", "HF_"))}
    own |= {MARK: os.environ[MARK], "HOME": str(home), "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
    with (log := folder / f"{host}.log").open("wb") as output:
        process = ForkedPopen(
            shared_server(),
            arguments,
            namespaces=[f"/proc/{lab.inside(host)[2]}/ns/net"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=own,
            cwd=TARGET.parent,
        )
    with ended_after(running := Program(process, log)):
        yield running


@pytest.mark.timeout(180)
def test_a_second_machine_and_a_client_join_without_an_address(tmp_path: Path) -> None:
    serve = ["node.cli", "serve"]
    generate = ["client.cli", "generate", "--lan", "yes", "--prompt", "It is", "--max-new-tokens", "4", "--stats"]
    with (
        network_lab(HOSTS) as lab,
        on("anna", lab, tmp_path, [*serve, "demo-target", "--num-layers", "6"]) as anna,
    ):
        anna.wait_for(rf"serving at {HOSTS['anna']}:\d+")
        anna.wait_for(r"no terminal to ask at: no swarm was looked for in the local network \(--lan yes joins one\)")
        assert LAYERS.format("0…5") in anna.log.read_text()
        with on("ben", lab, tmp_path, [*serve, "--lan", "yes", "--num-layers", "6"]) as ben:
            ben.wait_for(rf"serving at {HOSTS['ben']}:\d+")
            said = ben.log.read_text()
            there = rf"at {HOSTS['anna']}, found in the local network"
            serves = rf"joins swarm [0-9a-f]{{8}} that serves demo-target \((\w+)\) {there}"
            found = re.search(serves, said)
            assert found, said
            kept = f"model: demo-target (12 layers, fingerprint {found[1]}), the one that this swarm serves"
            assert kept in said
            assert LAYERS.format("6…11") in said
            with on("you", lab, tmp_path, generate) as you:
                assert you.process.wait(100) == 0, you.log.read_text()
            said = you.log.read_text()
    assert re.search(r"joins swarm [0-9a-f]{8} that serves demo-target", said)
    assert "reproducible" in said
