"""The DHT process and the command `swarm`: whoever dies, and however, nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import tyro

from swarm.base.cli import plain_words
from swarm.base.errors import RegistryError
from swarm.cli import COMMANDS, run
from swarm.directory.dht import registry as parent
from swarm.directory.dht.registry import DhtConfig, DhtRegistry, start_pipe
from swarm.directory.identity import Identity

GONE_WITHIN_S = 10
LOCAL = DhtConfig(host="127.0.0.1")


def dht_processes(owner: int) -> tuple[psutil.Process, psutil.Process]:
    """The DHT process of `owner`, and the p2p daemon below it."""
    [process] = [
        child for child in psutil.Process(owner).children() if "swarm.directory.dht.process" in child.cmdline()
    ]
    [daemon] = process.children()
    assert daemon.name() == "p2pd"
    return process, daemon


def all_gone(*processes: psutil.Process) -> bool:
    return not psutil.wait_procs(processes, timeout=GONE_WITHIN_S)[1]


async def swarm(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "swarm.cli", *arguments, stdout=PIPE, stderr=PIPE)


async def bootstrap(folder: Path) -> tuple[Process, str]:
    """A running `swarm bootstrap`, and the address that it prints."""
    options = ["--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "identity.key")]
    process = await swarm("bootstrap", *options)
    assert process.stdout is not None
    while "--join" not in (line := (await process.stdout.readline()).decode()):
        assert line, "it ended before it printed its address"
    assert line.startswith("node serve MODEL --layers 0-20 --join /ip4/127.0.0.1/tcp/")
    return process, line.split()[-1]


async def test_the_dht_process_is_lean_and_out_of_the_terminals_reach() -> None:
    async with DhtRegistry.open(LOCAL):
        process, daemon = dht_processes(os.getpid())
        libraries = [mapped.path for mapped in process.memory_maps()]
        assert not any("/torch/" in path or "/scipy/" in path for path in libraries)
        assert os.getsid(process.pid) != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        async with DhtRegistry.open(LOCAL):
            assert process.is_running()
    assert all_gone(process, daemon)


async def test_a_killed_dht_process_takes_its_daemon_along_and_its_owner_is_told() -> None:
    async with DhtRegistry.open(LOCAL) as registry:
        process, daemon = dht_processes(os.getpid())
        process.kill()
        with pytest.raises(RegistryError, match="has ended"):
            await registry.models()
        await registry.wait_closed()
        assert all_gone(process, daemon)


async def test_the_kernel_kills_the_daemon_even_if_nobody_else_does(tmp_path: Path) -> None:
    owner, _ = await bootstrap(tmp_path)
    process, daemon = dht_processes(owner.pid)
    [sockets] = [Path(part.removeprefix("-listen=/unix")) for part in daemon.cmdline() if part.startswith("-listen=")]
    owner.send_signal(signal.SIGSTOP)  # it cannot clean up
    daemon.suspend()  # nor can the daemon notice anything by itself
    process.kill()
    try:
        assert all_gone(daemon)
    finally:
        owner.kill()
        await owner.communicate()
        shutil.rmtree(sockets.parent)  # both who would have done it were killed


async def test_a_dead_daemon_ends_the_dht_process() -> None:
    async with DhtRegistry.open(LOCAL) as registry:
        process, daemon = dht_processes(os.getpid())
        daemon.kill()
        async with asyncio.timeout(GONE_WITHIN_S):
            await registry.wait_closed()
        with pytest.raises(RegistryError, match="daemon died"):
            await registry.models()
        assert all_gone(process, daemon)


@pytest.mark.parametrize("end", [Process.kill, Process.terminate, lambda owner: owner.send_signal(signal.SIGINT)])
async def test_nothing_stays_behind_a_bootstrap_peer(tmp_path: Path, end: Callable[[Process], None]) -> None:
    owner, _ = await bootstrap(tmp_path)
    processes = dht_processes(owner.pid)
    end(owner)
    output, errors = await owner.communicate()
    assert owner.returncode == (-signal.SIGKILL if end is Process.kill else 0), errors
    assert errors == b""
    assert (b"leaving" in output) == (end is not Process.kill)
    assert all_gone(*processes)


async def test_status_of_an_empty_swarm(tmp_path: Path) -> None:
    owner, address = await bootstrap(tmp_path)
    try:
        status = await swarm("status", "--join", address)
        output, errors = await status.communicate()
        assert (status.returncode, errors) == (0, b"")
        assert b"nobody serves anything here yet" in output
        assert f"--join {address}" in output.decode()
    finally:
        owner.terminate()
        await owner.communicate()


async def test_misuse_is_one_line_and_exit_code_1() -> None:
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.ephemeral().peer_id}"
    process = await swarm("status", "--join", dead)
    output, errors = await process.communicate()
    assert (process.returncode, output) == (1, b"")
    assert errors.startswith(b"swarm: ")
    assert errors.count(b"\n") == 1
    assert b"no peer answers" in errors


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["status", "--join", "nonsense"], "is no peer address"),
        (["status"], "--join"),
        (["bootstrap", "--identity", "bad"], "holds no libp2p key"),
        (["bootstrap", "--identity", "new", "--host", "here"], "is not an IP address"),
    ],
    ids=["address", "nowhere", "key", "host"],
)
def test_whatever_is_misused(
    arguments: list[str],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad").write_bytes(b"rubbish")
    monkeypatch.chdir(tmp_path)
    command = tyro.extras.subcommand_cli_from_dict(dict(COMMANDS), args=arguments, registry=plain_words())
    assert run(command) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("swarm: ")
    assert errors.count("\n") == 1
    assert part in errors


async def test_announcements_never_wait_for_look_ups_and_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of questions to a slow DHT used to hold the places that a node's record needed."""
    monkeypatch.setattr(parent, "_MAX_WAITING", 8)
    program = (
        "import msgpack, sys\n"
        "unpacker = msgpack.Unpacker()\n"
        "while data := sys.stdin.buffer.raw.read(65536):\n"
        "    unpacker.feed(data)\n"
        "    for number, method, _ in unpacker:\n"
        "        if method == 'store':\n"
        "            sys.stdout.buffer.write(msgpack.packb([number, None, 'kept']))\n"
        "            sys.stdout.buffer.flush()\n"
    )
    pipe = await start_pipe([sys.executable, "-c", program])
    try:
        async with asyncio.TaskGroup() as tasks:
            flood = [tasks.create_task(pipe.call("fetch", {}, 30.0)) for _ in range(32 + 8)]
            await asyncio.sleep(0)
            with pytest.raises(RegistryError, match="too many"):
                await pipe.call("fetch", {}, 30.0)
            assert await pipe.call("store", {}, 10.0, is_urgent=True) == "kept"
            for task in flood:
                task.cancel()
        with pytest.raises(RegistryError, match="did not answer"):
            await pipe.call("fetch", {}, 0.01)  # the places are free again
    finally:
        await pipe.aclose()


async def test_no_process_to_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "subprocess_exec", fail)
    with pytest.raises(RegistryError, match="cannot be started: Too many open files"):
        await DhtRegistry.open(LOCAL)
