"""`swarm invite` prints one word, and a picture of it that a telephone can read; `swarm list` and `swarm forget`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import segno

from swarm.base.cli import PlainConsole
from swarm.base.errors import ConfigError
from swarm.base.ids import SwarmId
from swarm.directory.dht.addresses import MetSwarm
from swarm.directory.identity import Identity
from swarm.directory.joining import command as joining_command
from swarm.directory.joining.command import (
    ForgetSwarm,
    MakeInvite,
    bootstrap_membership,
    forget,
    invite,
    list_swarms,
    qr_lines,
    without_password,
)
from swarm.directory.joining.invite import Invite, is_invite, open_invite
from swarm.directory.joining.remembered import RememberedSwarm, SwarmMemory
from swarm.directory.joining.resolve import SwarmFinder, SwarmRequest
from swarm.link.network_key import NetworkKey

A, B = Identity.ephemeral(), Identity.ephemeral()
NOW = 1_800_000_000.0
KEY = NetworkKey(bytes(range(32)))
QR_SIGNS = frozenset("█▀▄ ")


def peer(identity: Identity, host: str = "203.0.113.1") -> str:
    return f"/ip4/{host}/tcp/31337/p2p/{identity.peer_id}"


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses at which nobody answers."""
    there: set[str] = set()

    async def prove(addresses: Sequence[str]) -> dict[str, bool]:
        return {one: one not in there for one in addresses}

    monkeypatch.setattr(joining_command, "prove", prove)
    return there


@pytest.fixture
def memory(tmp_path: Path) -> SwarmMemory:
    return SwarmMemory(tmp_path / "swarms.json", clock=lambda: NOW)


@pytest.fixture
def make(memory: SwarmMemory, tmp_path: Path) -> Callable[..., list[str]]:
    """What `swarm invite` prints, line by line."""

    def make(*, terminal: int = 0, **options: object) -> list[str]:
        said = io.StringIO()
        console = PlainConsole(file=said, width=terminal or 10_000, soft_wrap=True, force_terminal=bool(terminal))
        command = replace(MakeInvite(identity=tmp_path / "identity.key"), **options)  # type: ignore[arg-type]
        invite(command, memory, {}, console)
        return said.getvalue().splitlines()

    return make


def opened(lines: list[str]) -> Invite:
    return open_invite(lines[0], NOW)


def test_in_a_pipe_it_is_one_line(memory: SwarmMemory, make: Callable[..., list[str]]) -> None:
    memory.remember(RememberedSwarm((peer(A), peer(B)), "org/model", "ab" * 32, "mqtts://u:hunter2@broker.example"))
    lines = make()
    assert len(lines) == 1
    said = opened(lines)
    assert (said.peers, said.model, said.fingerprint) == ((peer(A), peer(B)), "org/model", "ab" * 16)
    assert (said.broker, said.network) == ("mqtts://broker.example", None)
    assert said.expires_at == NOW + 30 * 86_400
    assert opened(make(with_password=True)).broker == "mqtts://u:hunter2@broker.example"


def test_what_is_typed_wins(memory: SwarmMemory, make: Callable[..., list[str]]) -> None:
    memory.remember(RememberedSwarm((peer(A),), "org/model", "ab" * 32))
    said = opened(make(join=(peer(B),), model="org/other", days=1, mqtt="mqtt://broker.example"))
    assert (said.peers, said.model, said.fingerprint) == ((peer(B),), "org/other", None)
    assert (said.broker, said.expires_at) == ("mqtt://broker.example", NOW + 86_400)
    assert opened(make(join=(peer(A),), model="org/model")).fingerprint == "ab" * 16


def test_addresses_that_others_can_reach_come_first_and_others_are_left_out(
    memory: SwarmMemory, make: Callable[..., list[str]]
) -> None:
    near, far = peer(A, "127.0.0.1"), "/ip4/8.8.8.8/tcp/31337/p2p/" + A.peer_id
    memory.remember(RememberedSwarm((near, peer(B, "192.168.1.7"), far), "org/model"))
    assert opened(make()).peers == (far, peer(B, "192.168.1.7"))
    memory.forget(memory.swarms())
    memory.remember(RememberedSwarm((near,), "org/model"))
    assert opened(make()).peers == (near,)
    assert any("this machine only" in line for line in make(terminal=100))


def test_a_folder_is_named_as_others_call_it(
    memory: SwarmMemory, make: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "demo-target").mkdir()
    memory.remember(RememberedSwarm((peer(A),), str(tmp_path / "demo-target"), "ab" * 32))
    lines = make(terminal=100)
    assert opened(lines).model == "demo-target"
    assert any("needs a copy" in line for line in lines)


def test_on_a_terminal_it_says_what_it_is_and_draws_it(memory: SwarmMemory, make: Callable[..., list[str]]) -> None:
    memory.keep_key(KEY)
    memory.remember(RememberedSwarm((peer(A),), "org/model", network=KEY.name))
    lines = make(terminal=100)
    assert opened(lines).network == KEY
    assert lines[1].startswith("for org/model, through 1 peer; good until 2027-02-")
    assert any("pass it on as a password" in line for line in lines)
    assert sum("█" in line for line in lines) > 20
    assert not any("█" in line for line in make(terminal=100, qr=False))
    narrow = make(terminal=40)
    assert narrow[-1].startswith("a QR code of it needs a terminal of ")
    assert not any("█" in line for line in narrow)


def test_the_picture_holds_the_word(memory: SwarmMemory, make: Callable[..., list[str]]) -> None:
    memory.remember(RememberedSwarm((peer(A),), "org/model", "ab" * 32))
    (word,) = make()
    code = segno.make(word, error="l", micro=False)
    lines = qr_lines(code, quiet=4)
    assert {sign for line in lines for sign in line} <= QR_SIGNS
    drawn = [
        [sign in light for sign in line] for line in lines for light in ("█▀", "█▄")
    ]  # each sign is two modules, one above the other
    wanted = [[not dark for dark in row] for row in code.matrix_iter(border=4)]
    assert drawn[: len(wanted)] == wanted
    assert int(code.version) <= 13  # finer ones are hard to scan from a screen


def test_an_invite_holds_a_tls_port_beside_the_best_addresses(make: Callable[..., list[str]]) -> None:
    """The port leads where nothing else does; a peer's other addresses are the shorter way."""
    port, local = (peer(A, host).replace("31337/", "443/tls/") for host in ("9.9.9.9", "192.168.1.2"))
    near, far = peer(A), peer(A, "9.9.9.9")
    assert opened(make(join=(local, port, near, far, peer(B, "9.9.9.8")))).peers == (far, peer(B, "9.9.9.8"), port)


def test_an_invite_to_nowhere_or_for_too_long_is_refused(make: Callable[..., list[str]]) -> None:
    with pytest.raises(ConfigError, match="an invite to which swarm"):
        make()
    with pytest.raises(ConfigError, match="is no peer address"):
        make(join=("203.0.113.1:31337",))
    for days in (0, 367):
        with pytest.raises(ConfigError, match="1 to 366 days"):
            make(days=days, join=(peer(A),))


def test_a_private_swarm_begins_with_a_key(make: Callable[..., list[str]], tmp_path: Path) -> None:
    path = tmp_path / "own.key"
    lines = make(private=True, network_key=path)
    assert not any(map(is_invite, lines))
    assert f"  swarm bootstrap --network-key {path}" in lines
    with pytest.raises(ConfigError, match="is there: leave --private out"):
        make(private=True, network_key=path)
    assert opened(make(join=(peer(A),), network_key=path)).network == NetworkKey.load(path)
    made = opened(make(private=True, join=(peer(A),), network_key=tmp_path / "other.key"))
    assert made.network == NetworkKey.load(tmp_path / "other.key")


def test_a_bootstrap_peer_joins_nothing_by_itself_and_makes_its_key(memory: SwarmMemory, tmp_path: Path) -> None:
    memory.remember(RememberedSwarm((peer(A),), "org/model"))
    join, membership = bootstrap_membership((), None, memory)
    assert (join, membership.network) == ((), None)
    join, membership = bootstrap_membership((), tmp_path / "own.key", memory)
    assert membership.network == NetworkKey.load(tmp_path / "own.key")
    assert membership.note_peers is not None
    membership.note_peers(MetSwarm(None, (), (peer(B),)))
    assert SwarmFinder(memory, {}).find(SwarmRequest()).join == (peer(B),)  # programs beside it find it
    assert bootstrap_membership((peer(A),), None, memory)[0] == (peer(A),)


def test_an_invite_has_the_proven_addresses_of_both_families(
    make: Callable[..., list[str]], memory: SwarmMemory, silent: set[str]
) -> None:
    """A home that has IPv6 alone could not join a dual-stack peer, whose invite held its IPv4 address only."""
    by_ipv6, dead = f"/ip6/2001:db8::1/tcp/31337/p2p/{A.peer_id}", f"/ip6/2001:db8::2/tcp/31337/p2p/{B.peer_id}"
    swarm = SwarmId(bytes(range(16)))
    known = RememberedSwarm((peer(A), peer(B, "203.0.113.2"), by_ipv6, dead), "org/model", swarm=swarm.hex())
    memory.remember(known)
    silent.add(dead)
    said = opened(make())
    assert said.peers == (peer(A), by_ipv6, peer(B, "203.0.113.2"))
    assert said.swarm == swarm
    silent.add(by_ipv6)
    alone = make(terminal=1_000)
    assert opened(alone).peers == (peer(A), peer(B, "203.0.113.2"))
    assert any("reached by IPv4 alone, so a machine without it cannot join" in line for line in alone)
    silent |= set(known.peers)
    gone = make(terminal=1_000)
    assert opened(gone).peers[0] == peer(A)
    assert any("none of its peers answers at the moment" in line for line in gone)


def test_swarms_are_listed_and_forgotten(memory: SwarmMemory) -> None:
    said = io.StringIO()
    console = PlainConsole(file=said, width=1_000)
    list_swarms(memory, console)
    memory.keep_key(KEY)
    memory.remember(RememberedSwarm((peer(A),), "org/one", network=KEY.name))
    memory.remember(RememberedSwarm((peer(B),)))
    list_swarms(memory, console)
    none, second, first = said.getvalue().splitlines()
    assert none == "no swarm was joined yet: use an invite, or --join"
    assert second.startswith(f"1  no model named · 1 peer, such as {peer(B)} · open · joined 2027-01-")
    assert first.startswith(f"2  org/one · 1 peer, such as {peer(A)} · private {KEY.name} · ")
    for which in (None, "3", "x"):
        with pytest.raises(ConfigError, match="forget which"):
            forget(ForgetSwarm(which), memory, console)
    forget(ForgetSwarm("2"), memory, console)
    forget(ForgetSwarm(), memory, console)
    assert memory.swarms() == []
    assert not memory.key_path(KEY.name).exists()


def test_an_invite_says_which_swarm_is_forgotten_also_when_it_has_expired(
    memory: SwarmMemory, make: Callable[..., list[str]]
) -> None:
    memory.remember(RememberedSwarm((peer(A),), "org/one"))
    (word,) = make(days=1)
    memory.remember(RememberedSwarm((peer(B),), "org/other"))
    later = SwarmMemory(memory.path, clock=lambda: NOW + 40 * 86_400)
    console = PlainConsole(file=io.StringIO(), width=10_000)
    forget(ForgetSwarm(word), later, console)
    assert [swarm.model for swarm in memory.swarms()] == ["org/other"]
    with pytest.raises(ConfigError, match="an invite, or all"):
        forget(ForgetSwarm(word), memory, console)


def test_a_password_goes_and_the_rest_stays() -> None:
    assert without_password("mqtts://user:p%40ss@broker.example:8883") == "mqtts://broker.example:8883"
    assert without_password("mqtt://[2001:db8::1]:1883") == "mqtt://[2001:db8::1]:1883"
