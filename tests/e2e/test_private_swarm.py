"""docs/guides/private-swarm.md as it is written: each machine a network namespace with its own /etc and home folder.

Every machine has a public address; all but `cleo` are in the private network too. `scp` copies between home folders.
Nodes are forked, with the arguments and variables that the guide's line gives them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest

from tests.forked.program import ForkedPopen, shared_server

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "private-swarm.md"
MACHINES = {"boot": 1, "watch": 5, "you": 7, "anna": 11, "ben": 12, "cleo": 13}
STRANGERS = {"cleo"}
MODULES = {"node": "node.cli", "client": "client.cli", "swarm": "swarm.cli"}
STEP_S = 100.0
ASKED = "CANOPY_TEST_ASKED"
TELL = f"import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['{ASKED}'], 'w'))"
"""In place of a node, which is then forked: where its arguments and variables go."""
OWN_ETC = (
    "mount -t tmpfs none {0} && mkdir {0}/up {0}/work"
    " && mount -t overlay none -o lowerdir=/etc,upperdir={0}/up,workdir={0}/work /etc"
)
_BLOCK = re.compile(r"<!-- run: (\w+)(?:, (\w+))? -->\n```console\n(.*?)```\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """What is typed on one machine. how: "stays" and "fails" mean what they say; "slow" is left out here."""

    machine: str
    how: str
    command: str
    shown: list[str]

    def is_shown(self, said: str) -> bool:
        patterns = (".*".join(map(re.escape, line.strip().split("…"))) for line in self.shown)
        return all(re.search(pattern, said) for pattern in patterns)


def blocks() -> list[Block]:
    found = []
    for machine, how, text in _BLOCK.findall(GUIDE.read_text()):
        for part in text.removeprefix("$ ").split("\n$ "):
            command, *shown = part.strip().splitlines()
            found.append(Block(machine, how, command, shown))
    return found


@dataclass(frozen=True, slots=True)
class Machines:
    """Running namespaces, by name."""

    folder: Path
    keepers: dict[str, int]

    def start(self, block: Block, log: Path) -> subprocess.Popen[bytes]:
        home = self.folder / block.machine
        inside = ["nsenter", "--target", str(self.keepers[block.machine]), "--net", "--mount"]
        paths = {"HOME": str(home), "PATH": f"{self.folder}:{os.environ['PATH']}:/usr/sbin", "PYTHONPATH": str(ROOT)}
        own = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "CANOPY_SWARMS"))}
        environment = {**own, **paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
        typed = [*inside, f"--wd={ROOT}", "bash", "-c", block.command]
        with log.open("wb") as output:
            if re.search(r"\bnode serve\b", block.command) is None:
                return subprocess.Popen(typed, env=environment, **_streams(output))
            subprocess.run(typed, env={**environment, ASKED: f"{log}.asked"}, check=True)
            arguments, given = json.loads(Path(f"{log}.asked").read_text())
            namespaces = [f"/proc/{self.keepers[block.machine]}/ns/{kind}" for kind in ("net", "mnt")]
            node = ["node.cli", *arguments]
            return ForkedPopen(shared_server(), node, namespaces, env=given, cwd=ROOT, **_streams(output))


def _streams(output: BinaryIO) -> dict[str, Any]:
    said = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    return {**said, "start_new_session": True}


def ip(keeper: int, *commands: str) -> None:
    inside = ("nsenter", "--target", str(keeper), "--net", "ip", "-batch", "-")
    subprocess.run(inside, input="\n".join(commands), text=True, check=True, capture_output=True)


@contextmanager
def keeper(etc: str) -> Iterator[int]:
    """A process in namespaces of its own, which ends when its standard input closes."""
    script = f"{etc} && echo ready && exec cat"
    with subprocess.Popen(
        ("unshare", "--net", "--mount", "sh", "-c", script), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        switch = stack.enter_context(keeper("true"))
        ip(switch, *(f"link add {name} type bridge" for name in ("public", "private")), "link set public up")
        ip(switch, "link set private up")
        keepers = {}
        for name, number in MACHINES.items():
            (tmp_path / name).mkdir()
            (mount := tmp_path / f"{name}.etc").mkdir()
            one = keepers[name] = stack.enter_context(keeper(OWN_ETC.format(mount)))
            ip(one, "link set lo up")
            for network, address in (("public", f"203.0.113.{number}"), ("private", f"10.77.0.{number}")):
                if network == "private" and name in STRANGERS:
                    continue
                port = f"{network[:3]}{number}"
                ip(switch, f"link add {port} type veth peer name {network} netns {one}")
                ip(switch, f"link set {port} master {network} up")
                ip(one, f"address add {address}/24 dev {network}", f"link set {network} up")
        programs = {name: f'exec {shlex.quote(sys.executable)} -m {module} "$@"' for name, module in MODULES.items()}
        copied = (
            f'shift; for last; do :; done; set -- "${{@:1:$#-1}}"; cp -r "$@" {tmp_path}/"${{last%%:*}}/${{last#*:}}"'
        )
        programs["node"] = f'exec {shlex.quote(sys.executable)} -ISc {shlex.quote(TELL)} "$@"'
        python = f'exec {shlex.quote(sys.executable)} "$@"'
        for name, line in {**programs, "python": python, "scp": copied}.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
            (tmp_path / name).chmod(0o755)
        yield Machines(tmp_path, keepers)


def wait(block: Block, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STEP_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        said = log.read_text()
        if block.how == "stays" and not ended and block.is_shown(said):
            return
        if ended:
            assert block.how != "stays", f"{block.command}: it ended:\n{said}"
            assert (process.returncode != 0) == (block.how == "fails"), f"{block.command}:\n{said}"
            assert block.is_shown(said), f"{block.command} should show {block.shown}:\n{said}"
            return
        time.sleep(0.05)  # a log file has no event to wait for
    raise AssertionError(f"{block.command}: not done in {STEP_S:.0f} s:\n{log.read_text()}")


def end(process: subprocess.Popen[bytes]) -> None:
    """End what a block started, and wait for all of it."""
    members = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    os.killpg(process.pid, signal.SIGTERM)
    _, left = psutil.wait_procs(members, timeout=15)
    for one in left:
        one.kill()
    process.wait(5)
    assert not left, left


@pytest.mark.crossing
@pytest.mark.needs_root
@pytest.mark.needs_program("mosquitto", "mosquitto")
@pytest.mark.needs_program("ip", "iproute2")
def test_the_guide_does_what_it_says(machines: Machines) -> None:
    machines.folder.chmod(0o755)
    with ExitStack() as stack:
        for number, block in enumerate(one for one in blocks() if one.how != "slow"):
            log = machines.folder / f"{number:02}-{block.machine}.log"
            began = time.monotonic()
            process = machines.start(block, log)
            if block.how == "stays":
                stack.callback(end, process)
            wait(block, process, log)
            print(f"{block.machine}$ {block.command}  ({time.monotonic() - began:.1f} s)\n{log.read_text()}")  # noqa: T201
        said = "".join(log.read_text() for log in machines.folder.glob("*-anna.log"))
        port = re.findall(r"serving at 10.77.0.11:(\d+)", said)[0]
        for machine, host, kind, its in (
            ("anna", "10.77.0.11", "node", port),
            ("boot", "10.77.0.1", "bootstrap", "31337"),
            ("watch", "127.0.0.1", "health", "8080"),
        ):
            key = "CANOPY_NETWORK_KEY=~/node-1/network.key " if kind == "node" else ""  # the check is a member too
            asked = Block(machine, "", f"{key}python -m swarm.alive {kind} {its} {host}", [])
            wait(asked, machines.start(asked, log := machines.folder / f"{kind}.alive"), log)


def test_every_machine_of_the_guide_does_something() -> None:
    assert {block.machine for block in blocks()} == set(MACHINES)
    assert {block.machine for block in blocks() if block.how == "fails"} == STRANGERS | {"you"}  # you: not invited yet
    assert not re.search(r"```console\n(?!\$ )", GUIDE.read_text())
    assert GUIDE.read_text().count("```console") == len(_BLOCK.findall(GUIDE.read_text()))
