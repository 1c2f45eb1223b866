"""An invite says all it takes to join, in one word; whatever is wrong with it is one line that says what to do."""

from __future__ import annotations

from dataclasses import replace

import base58
import msgpack
import pytest

from swarm.base.errors import ConfigError
from swarm.base.ids import SwarmId
from swarm.directory.identity import Identity
from swarm.directory.joining.invite import (
    MAX_CHARACTERS,
    SCHEME,
    VERSION,
    Invite,
    _checksum,
    is_invite,
    open_invite,
    seal_invite,
)
from swarm.link.network_key import NetworkKey

ME, OTHER = Identity.ephemeral(), Identity.ephemeral()
NOW = 1_800_000_000.0
PEER = f"/ip4/203.0.113.1/tcp/31337/p2p/{ME.peer_id}"
PEERS = (
    PEER,
    f"/ip6/2001:db8::1/tcp/31337/p2p/{OTHER.peer_id}",
    f"/dns/boot.example/tcp/31337/p2p/{OTHER.peer_id}",
    f"/dns4/boot.example/udp/31337/quic-v1/p2p/{OTHER.peer_id}",
)
PORTS = (
    PEER,
    f"/ip6/2001:db8::1/tcp/443/tls/p2p/{OTHER.peer_id}",
    f"/dns/boot.example/tcp/443/tls/p2p/{OTHER.peer_id}",
    f"/dns4/boot.example/tcp/443/tls/p2p/{OTHER.peer_id}",
)
PLAIN = Invite((PEER,), int(NOW) + 3_600)
FULL = Invite(
    PEERS,
    int(NOW) + 3_600,
    model="Qwen/Qwen3-8B",
    fingerprint="0123456789abcdef" * 2,
    broker="mqtts://broker.example:8883",
    network=NetworkKey(bytes(range(32))),
    swarm=SwarmId(bytes(range(16))),
)


def word_of(data: bytes) -> str:
    return SCHEME + base58.b58encode(data + _checksum(data)).decode()


def signed(word: str) -> bytes:
    return base58.b58decode(word.removeprefix(SCHEME))[:-4]


@pytest.mark.parametrize("invite", [PLAIN, FULL, replace(FULL, network=None), replace(PLAIN, peers=PORTS[1:])])
def test_what_goes_in_comes_out(invite: Invite) -> None:
    opened = open_invite(seal_invite(invite, ME), NOW)
    assert opened == replace(invite, inviter=opened.inviter)


def test_release_0_2_reads_past_tls_ports() -> None:
    """It refuses an invite whose first place holds an address that it does not know."""
    invite = replace(PLAIN, peers=PORTS)
    word = seal_invite(invite, ME)
    assert open_invite(word, NOW).peers == PORTS
    body = msgpack.unpackb(signed(word)[1:-64])
    assert len(body[0]) == 1
    assert body[3:8] == [None] * 5
    with pytest.raises(ConfigError, match="peers"):
        seal_invite(replace(PLAIN, peers=PORTS * 3), ME)


def test_it_is_short() -> None:
    assert len(seal_invite(PLAIN, ME)) < 230
    one_model = replace(PLAIN, model="Qwen/Qwen3-8B", fingerprint="ab" * 32, network=FULL.network)
    assert len(seal_invite(one_model, ME)) < 320


def test_an_inviter_has_one_name_and_others_another() -> None:
    mine = [open_invite(seal_invite(invite, ME), NOW).inviter_name for invite in (PLAIN, FULL)]
    assert mine[0] == mine[1] != open_invite(seal_invite(PLAIN, OTHER), NOW).inviter_name
    assert [len(part) for part in mine[0].split("-")] == [4] * 5


def test_it_may_be_pasted_in_pieces() -> None:
    word = seal_invite(FULL, ME)
    assert open_invite(f"  {word[:60]}\n  {word[60:]}\r\n", NOW).peers == PEERS
    assert is_invite(f" {word}")
    assert not is_invite(PEER)
    assert not is_invite("canopy/model")


@pytest.mark.parametrize(
    "damage",
    [
        lambda word: word[:-1],
        lambda word: word[:40] + word[41:],
        lambda word: word[:40] + ("x" if word[40] != "x" else "y") + word[41:],
        lambda word: word.replace("canopy://", "http://"),
        lambda word: word + "1",
        lambda _: SCHEME,
        lambda _: f"{SCHEME}0OIl",
        lambda word: word.upper(),
    ],
)
def test_a_damaged_one_is_to_be_copied_again(damage: object) -> None:
    assert callable(damage)
    with pytest.raises(ConfigError, match="this invite is damaged: copy all of it again, from canopy:// to its last"):
        open_invite(damage(seal_invite(FULL, ME)), NOW)


def test_one_of_another_release_says_which_side_to_update() -> None:
    data = signed(seal_invite(FULL, ME))
    with pytest.raises(ConfigError, match="newer release of Canopy: update this machine"):
        open_invite(word_of(bytes([VERSION + 1]) + data[1:]), NOW)
    with pytest.raises(ConfigError, match="older release of Canopy: whoever invites must update"):
        open_invite(word_of(bytes([VERSION - 1]) + data[1:]), NOW)


def test_a_later_releases_fields_are_read_past(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = msgpack.packb
    monkeypatch.setattr(msgpack, "packb", lambda body: packed([*body, *[None] * (9 - len(body)), {"more": 1}]))
    word = seal_invite(PLAIN, ME)
    monkeypatch.undo()
    assert open_invite(word, NOW).peers == PLAIN.peers


def test_a_changed_one_needs_the_inviters_key() -> None:
    data = signed(seal_invite(FULL, ME))
    with pytest.raises(ConfigError, match="changed after it was signed"):
        open_invite(word_of(data.replace(b"broker.example", b"broken.example")), NOW)


def test_an_expired_one_says_since_when() -> None:
    word = seal_invite(PLAIN, ME)
    assert open_invite(word, NOW + 3_599).peers == (PEER,)
    with pytest.raises(ConfigError, match="this invite has expired, 1 s ago: ask for a new one"):
        open_invite(word, NOW + 3_600)
    with pytest.raises(ConfigError, match="3 days ago"):
        open_invite(word, NOW + 3_600 + 3 * 86_400)


def test_an_endless_word_costs_nothing() -> None:
    for length in (MAX_CHARACTERS, 10_000_000):
        with pytest.raises(ConfigError, match="too long for an invite"):
            open_invite(SCHEME + "z" * length, NOW)


@pytest.mark.parametrize(
    "wrong",
    [
        {"peers": ()},
        {"peers": (PEER,) * 9},
        {"peers": ("/ip4/203.0.113.1/tcp/31337",)},
        {"peers": (PEER.replace("31337", "0"),)},
        {"model": "../../etc/passwd"},
        {"model": "--insecure"},
        {"broker": "http://example"},
        {"broker": "mqtt://broker.example/\x1b[2J"},
        {"broker": f"mqtt://{'b' * 400}"},
        {"expires_at": 2**32},
    ],
)
def test_each_part_has_its_bounds(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="this invite is not sound"):
        seal_invite(replace(PLAIN, **wrong), ME)  # type: ignore[arg-type]


def test_secrets_are_not_shown() -> None:
    shown = repr(replace(FULL, broker="mqtt://user:hunter2@broker.example"))
    assert "hunter2" not in shown
    assert repr(FULL.network) == "NetworkKey()"
