"""On a healthy machine with far too much to do, and a torch that takes half a minute to import, nothing is in the way:
`swarm doctor` as a user starts it, with a real peer to join through.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.net.small_internet import PEER_IP, PEER_PORT, RELAY_PORT, Planted, run_at_home

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.needs_root,
    pytest.mark.needs_program("ip", "iproute2"),
]
SLOW_TORCH = """
import pathlib, time
pathlib.Path(__file__).with_name("imported").touch()
time.sleep(30)
"""
BUSY = ("timeout", "90", "sh", "-c", "while :; do :; done")
READY = b"lends a relay"


def slow_torch(folder: Path) -> Path:
    package = folder / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SLOW_TORCH)
    (package / "version.py").write_text("__version__ = '2.6.0+cpu'\n")
    return package


async def look(internet: str, folder: Path) -> tuple[int | None, dict[str, Any]]:
    """Start a bootstrap peer, take all cores, and ask the doctor."""
    async with AsyncExitStack() as stack:

        async def start(*command: str) -> asyncio.subprocess.Process:
            environment = os.environ | {"PYTHONPATH": str(folder / "packages")}
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            stack.push_async_callback(_end, process)
            return process

        bootstrap = ("bootstrap", "--host", PEER_IP, "--port", str(PEER_PORT), "--relay-port", str(RELAY_PORT))
        identity = ("--identity", str(folder / "bootstrap.key"), "--no-lan")
        peer = await start("ip", "netns", "exec", internet, sys.executable, "-m", "swarm.cli", *bootstrap, *identity)
        assert peer.stdout is not None
        address, line = "", b"x"
        while line and not line.startswith(READY):
            line = await peer.stdout.readline()
            address = next((word for word in line.decode().split() if word.startswith("/ip4/203")), address)
        for _ in range(2 * (os.cpu_count() or 1)):
            await start(*BUSY)
        doctor = await start(sys.executable, "-m", "swarm.cli", "doctor", "--json", "--join", address)
        output, _ = await doctor.communicate()
        return doctor.returncode, json.loads(output)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.wait()


def test_on_a_healthy_and_very_busy_machine_nothing_is_in_the_way(tmp_path: Path) -> None:
    package = slow_torch(tmp_path)
    planted = Planted(servers={(PEER_IP, PEER_PORT): None, (PEER_IP, RELAY_PORT): None})
    status, report = run_at_home(planted, tmp_path, lambda internet: look(internet, tmp_path))
    assert (status, report["troubles"], report["first_cause"]) == (0, 0, None), report
    found = {one["check"]: one for one in report["findings"]}
    assert found["device"]["level"] == "ok"
    assert found["peers"]["level"] == "ok", "the peer was reached"
    assert not (package / "imported").exists(), "torch is left alone"
