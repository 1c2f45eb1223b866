"""`swarm doctor` as a user starts it, on a machine with troubles: what it says, how it ends, and what it never says."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SECRET = "s3cretpassword"
TOKEN = "hf_abcdefabcdefabcdef"
HERE_ALONE = """
from functools import partial
from swarm.doctor import command, probes, rungs
from swarm.cli import main

async def find_nobody(host):
    return probes.LookedUp()

probes.look_up = find_nobody
async def ask_nobody():
    return []

rungs.ask_name_servers = ask_nobody
rungs.DoctorProbes = partial(rungs.DoctorProbes, routers=list)
main()
"""
"""The program, which asks no router and no name server of whoever runs the test."""
PEER = "QmPLSgLoFRSnFRjRw8WCqPmswuZ4yGkcpokU6mNJE1Kkw4"


def doctor(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "HF_HOME": str(home / "hub"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "1",
        "https_proxy": f"http://anna:{SECRET}@proxy.anna.example:3128",
        "CANOPY_MQTT": f"mqtt://anna:{SECRET}@127.0.0.1:1",
    }
    command = [sys.executable, "-c", HERE_ALONE, "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with a damaged key."""
    folder = tmp_path / "anna" / ".config" / "canopy"
    folder.mkdir(parents=True)
    (folder / "identity.key").write_bytes(b"damaged")
    (folder / "identity.key").chmod(0o600)
    return tmp_path / "anna"


def test_it_finds_what_is_in_the_way_and_tells_nothing_private(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        options = ("--join", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", "--model", "org/anna", "--port", port)
        ended = doctor(home, *options, "--json")
    assert (ended.returncode, ended.stderr) == (1, "")
    report = json.loads(ended.stdout)
    found = {one["kind"]: one for one in report["findings"]}
    troubles = {kind: one["mend"] for kind, one in found.items() if one["level"] == "trouble"}
    assert set(troubles) == {"peer-gone", "port-taken", "identity-damaged", "broker-silent", "model-offline"}
    assert report["first_cause"]["kind"] == "peer-gone"
    assert report["first_cause"]["text"].startswith("the peer from --join: the machine is there")
    assert troubles["identity-damaged"].startswith("mv ~/.config/canopy/identity.key ~/.config/canopy/")
    asked = {one["check"]: one["level"] for one in report["findings"]}
    assert (asked["dns"], asked["proxy"], asked["directory"], len(asked)) == ("hint", "hint", "not-asked", 30)
    assert report["took_s"] < 20
    private = [SECRET, TOKEN, PEER, str(home), "proxy.anna.example"]
    private += [name for name in (getpass.getuser(), platform.node()) if name not in ("root", "localhost")]
    assert [word for word in private if word in ended.stdout] == []
