"""The emulated networks, with real packets: what they delay, limit, lose and cut, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.emulation import network_check
from benchmarks.emulation.network import Network, NetworkKind, NetworkPlan, ProxyNetwork, TunNetwork, open_network
from client.tools.demo.link_shape import LinkShape
from swarm.base.errors import ConfigError

ROOT = Path(__file__).parents[4]
UDP_PORT = 5_000
HEADERS_BYTES = 28
WAIT_S = 10.0
OWNER = """
import asyncio, sys
from benchmarks.emulation.network import NetworkKind, NetworkPlan, open_network
from client.tools.demo.link_shape import LinkShape

async def own():
    async with open_network(NetworkPlan(2, LinkShape()), NetworkKind(sys.argv[1])) as net:
        inside = await asyncio.create_subprocess_exec(*net.command(1, ["readlink", "/proc/self/ns/net"]), stdout=-1)
        namespace, _ = await inside.communicate()
        print(net.emulator.pid, namespace.decode().strip(), flush=True)
        await asyncio.Event().wait()

asyncio.run(own())
"""

tun = [pytest.mark.needs_root, pytest.mark.needs_program("ip", "iproute2")]
with_tun = pytest.mark.parametrize("net", [pytest.param(NetworkKind.TUN, marks=tun)], indirect=True)
with_proxy = pytest.mark.parametrize("net", [NetworkKind.PROXY], indirect=True)
with_each = pytest.mark.parametrize("net", [pytest.param(NetworkKind.TUN, marks=tun), NetworkKind.PROXY], indirect=True)


@pytest.fixture
async def net(request: pytest.FixtureRequest) -> AsyncIterator[Network]:
    """Three hosts with perfect links."""
    async with open_network(NetworkPlan(3, LinkShape(), seed=1), request.param) as built:
        yield built


class Host:
    """A UDP socket on a host."""

    def __init__(self, net: TunNetwork, host: int) -> None:
        self.socket = net.socket(host, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.socket.bind((net.address(host), UDP_PORT))

    def send(self, other: Host, data: bytes) -> None:
        self.socket.sendto(data, other.socket.getsockname())

    async def receive(self) -> bytes:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.socket, 2_048), WAIT_S)


@contextmanager
def hosts(net: Network) -> Iterator[list[Host]]:
    assert isinstance(net, TunNetwork)
    with ExitStack() as stack:
        made = [Host(net, host) for host in range(net.plan.hosts)]
        for host in made:
            stack.enter_context(host.socket)
        yield made


@with_each
async def test_delay_is_at_least_the_nominal_one_per_direction(net: Network) -> None:
    await net.shape(None, 1, LinkShape(delay_ms=30))
    await net.shape(1, None, LinkShape(delay_ms=5))
    round_trip, there, back = await network_check.check(net)
    assert (there.nominal, back.nominal, round_trip.nominal) == (30, 5, 35)
    assert there.measured >= 30
    assert back.measured >= 5
    assert round_trip.measured >= 35


@with_tun
async def test_a_cut_direction_of_a_link_is_one_direction(net: Network) -> None:
    await net.shape(0, 1, LinkShape(delay_ms=200))
    with hosts(net) as (near, far, third):
        await net.cut_link(0, 1)
        near.send(far, b"lost, though it would arrive after the link is restored")
        far.send(near, b"back")
        third.send(far, b"from the third")
        assert await near.receive() == b"back"
        assert await far.receive() == b"from the third"
        await net.restore_link(0, 1)
        near.send(far, b"restored")
        assert await far.receive() == b"restored", "links keep the order: what was sent before is lost"


@with_tun
async def test_what_is_on_its_way_when_a_link_is_cut_is_lost(net: Network) -> None:
    assert isinstance(net, TunNetwork)
    await net.shape(0, 1, LinkShape(delay_ms=1_000))
    with hosts(net) as (near, far, _):
        near.send(far, b"on its way")
        await net.cut_link(0, 1)
        await net.shape(0, 1, LinkShape())
        near.send(far, b"sent while cut")
        while (await net.load()).dropped < 2:
            pass
        await net.restore_link(0, 1)
        near.send(far, b"restored")
        assert await far.receive() == b"restored"


@with_tun
async def test_a_host_is_cut_off_and_joined_again(net: Network) -> None:
    with hosts(net) as (near, far, third):
        await net.cut(1)
        for one, other in ((near, far), (far, near), (third, far), (far, third)):
            one.send(other, b"lost")
        near.send(third, b"past it")
        assert await third.receive() == b"past it"
        await net.join(1)
        for one, other in ((near, far), (far, near), (third, far), (far, third)):
            one.send(other, b"joined")
            assert await other.receive() == b"joined"


@with_tun
async def test_a_cut_link_stays_cut_when_its_host_joins(net: Network) -> None:
    with hosts(net) as (near, far, third):
        await net.cut_link(0, 1)
        await net.cut(1)
        await net.join(1)
        near.send(far, b"lost")
        third.send(far, b"joined")
        assert await far.receive() == b"joined"
        await net.restore_link(0, 1)
        near.send(far, b"restored")
        assert await far.receive() == b"restored"


@with_tun
async def test_the_rate_bounds_a_bulk_transfer(net: Network) -> None:
    mbit, count, size_bytes = 4.0, 60, 1_000
    await net.shape(0, 1, LinkShape(mbit=mbit, queue_ms=10_000))
    with hosts(net) as (near, far, _):
        start_s = time.monotonic()
        for _ in range(count):
            near.send(far, bytes(size_bytes))
        for _ in range(count):
            await far.receive()
        spent_s = time.monotonic() - start_s
    assert spent_s >= count * (size_bytes + HEADERS_BYTES) * 8e-6 / mbit


@with_tun
async def test_losses_are_about_the_share_asked_for(net: Network) -> None:
    count = 400
    await net.shape(0, 1, LinkShape(loss=0.5))
    with hosts(net) as (near, far, _):
        for number in range(count):
            near.send(far, number.to_bytes(2, "big"))
        await net.shape(0, 1, LinkShape())
        near.send(far, b"end")
        arrived = []
        while (data := await far.receive()) != b"end":
            arrived.append(data)
    assert arrived == sorted(arrived)
    assert abs(len(arrived) - count / 2) < 60, "six standard deviations: one seed in 5e8, and the seed is fixed"


@with_tun
async def test_a_command_runs_on_its_host(net: Network) -> None:
    assert isinstance(net, TunNetwork)
    command = net.command(2, ["ip", "-brief", "address", "show", "dev", "tun0"])
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    shown, _ = await process.communicate()
    assert net.address(2).encode() in shown
    address = net.address(2)
    assert net.node_options(2) == ["--host", address, "--port", "4242", "--announce-address", f"{address}:4242"]


@pytest.mark.parametrize("kind", [pytest.param(NetworkKind.TUN, marks=tun), NetworkKind.PROXY])
def test_nothing_stays_when_the_owner_is_killed(kind: NetworkKind) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, kind], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, namespace = owner.stdout.readline().split()
        emulator = psutil.Process(int(pid))
        owner.kill()
    emulator.wait(WAIT_S)
    if kind is NetworkKind.TUN:
        assert namespace != os.readlink("/proc/self/ns/net")
        assert namespace not in {_namespace(process.pid) for process in psutil.process_iter()}


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


@contextmanager
def connected(net: Network, far: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection from host 0."""
    with socket.create_server(net.bind_address(far)) as listener:
        near_end = socket.create_connection(net.dial_address(far), WAIT_S)
        far_end, _ = listener.accept()
        far_end.settimeout(WAIT_S)
        with near_end, far_end:
            yield near_end, far_end


@with_proxy
async def test_a_proxy_holds_back_the_cut_direction_alone(net: Network) -> None:
    with connected(net, 1) as (near, far):
        await net.cut_link(None, 1)
        near.sendall(b"held")
        far.sendall(b"back")
        assert await asyncio.to_thread(near.recv, 9) == b"back"
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(9)
        far.settimeout(WAIT_S)
        await net.restore_link(None, 1)
        assert await asyncio.to_thread(far.recv, 9) == b"held"


@with_proxy
async def test_a_proxy_cuts_a_host_off_and_joins_it(net: Network) -> None:
    with connected(net, 1) as (near, far), connected(net, 2) as (other_near, other_far):
        await net.cut(1)
        near.sendall(b"there")
        far.sendall(b"back")
        other_near.sendall(b"past it")
        assert await asyncio.to_thread(other_far.recv, 9) == b"past it"
        for end in (near, far):
            end.setblocking(False)
            with pytest.raises(BlockingIOError):
                end.recv(9)
            end.settimeout(WAIT_S)
        await net.join(1)
        assert await asyncio.to_thread(far.recv, 9) == b"there"
        assert await asyncio.to_thread(near.recv, 9) == b"back"


@with_proxy
async def test_a_proxy_keeps_order_and_rate(net: Network) -> None:
    mbit, size_bytes = 16.0, 200_000
    await net.shape(None, 1, LinkShape(delay_ms=10, mbit=mbit, jitter_ms=10))
    data = bytes(range(250)) * (size_bytes // 250)
    with connected(net, 1) as (near, far), far.makefile("rb") as arriving:
        start_s = time.monotonic()
        sending = asyncio.to_thread(near.sendall, data)
        _, received = await asyncio.gather(sending, asyncio.to_thread(arriving.read, size_bytes))
        spent_s = time.monotonic() - start_s
    assert received == data
    assert spent_s >= 0.010 + size_bytes * 8e-6 / mbit


@with_proxy
async def test_a_proxy_refuses_what_it_cannot_do(net: Network) -> None:
    with pytest.raises(ConfigError, match=r"loss 0\.1"):
        await net.shape(None, None, LinkShape(loss=0.1))
    with pytest.raises(ConfigError, match="no link 0 → 1"):
        await net.cut_link(0, 1)
    with pytest.raises(ConfigError, match=r"loss 0\.1"):
        async with ProxyNetwork(NetworkPlan(2, LinkShape(loss=0.1))):
            pass


@with_each
async def test_a_link_that_is_not_there_is_refused(net: Network) -> None:
    for ends in ((0, 3), (3, None), (1, 1)):
        with pytest.raises(ConfigError, match="has no link"):
            await net.cut_link(*ends)


async def test_the_network_says_what_it_is_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.emulation.network.obstacle", lambda: "needs root")
    fallen_back = open_network(NetworkPlan(2, LinkShape()))
    assert (fallen_back.kind, fallen_back.reason) == (NetworkKind.PROXY, "needs root")
    with pytest.raises(ConfigError, match="needs root"):
        open_network(NetworkPlan(2, LinkShape()), NetworkKind.TUN)
    monkeypatch.setattr("benchmarks.emulation.network.obstacle", lambda: None)
    assert open_network(NetworkPlan(2, LinkShape())).kind is NetworkKind.TUN
    for hosts, mtu in ((1, 1500), (300, 1500), (2, 10)):
        with pytest.raises(ConfigError):
            NetworkPlan(hosts, LinkShape(), mtu=mtu)


def test_the_check_prints_measured_beside_nominal_and_fails_when_off(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "network",
        "--kind",
        "proxy",
        "--delay-ms",
        "3",
        "--mbit",
        "None",
    ]
    command += ["--json", str(tmp_path / "check.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    written = json.loads((tmp_path / "check.json").read_text())
    good = all(value["low"] <= value["measured"] <= value["high"] for value in written["measured"])
    assert done.returncode == (0 if good else 1), done.stderr
    assert "round trip 0 ⇄ 1" in done.stdout
    assert written["kind"] == "proxy"
    assert [value["nominal"] for value in written["measured"]] == [6, 3, 3]


def check_exit_status(monkeypatch: pytest.MonkeyPatch, *options: str) -> object:
    monkeypatch.setattr(sys, "argv", ["network", "--kind", "proxy", "--mbit", "None", "--delay-ms", "1", *options])
    with pytest.raises(SystemExit) as ended:
        network_check.main()
    return ended.value.code


@pytest.mark.parametrize(("bound_ms", "status"), [(-1e6, 1), (1e6, 0)])
def test_the_check_fails_when_a_value_is_off(monkeypatch: pytest.MonkeyPatch, bound_ms: float, status: int) -> None:
    monkeypatch.setattr(network_check, "DELAY_BOUND_MS", dict.fromkeys(NetworkKind, bound_ms))
    assert check_exit_status(monkeypatch) == status


def test_the_check_says_in_one_line_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_exit_status(monkeypatch, "--loss", "0.1") == 1
    said = capsys.readouterr().err
    assert said.startswith("network: loss 0.1")
    assert said.count("\n") == 1
