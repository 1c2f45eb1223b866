"""Swarms that were joined are remembered in one bounded file; trouble with it is one line and loses nothing."""

from __future__ import annotations

import json
import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import base58
import pytest

from swarm.base.errors import ConfigError
from swarm.base.ids import SwarmId
from swarm.directory.joining.remembered import MAX_ASIDE, MAX_PEERS, MAX_SWARMS, RememberedSwarm, SwarmMemory, peer_of
from swarm.link.network_key import NetworkKey

IDS = [base58.b58encode(b"\x12\x20" + bytes([number]) * 32).decode() for number in range(1, MAX_SWARMS + 4)]
ONE, TWO = "01" * 16, "02" * 16
KEY = NetworkKey(bytes(range(32)))
NOW = 1_800_000_000.0


def peer(number: int, host: str = "203.0.113.1", port: int = 31_337) -> str:
    return f"/ip4/{host}/tcp/{port}/p2p/{IDS[number]}"


@pytest.fixture
def memory(tmp_path: Path) -> SwarmMemory:
    return SwarmMemory(tmp_path / "canopy" / "swarms.json", clock=lambda: NOW)


def path_of(memory: SwarmMemory) -> Path:
    assert memory.path is not None
    return memory.path


def test_nothing_is_there_at_first_and_reading_makes_nothing(memory: SwarmMemory) -> None:
    assert memory.swarms() == []
    assert not path_of(memory).parent.exists()


def test_what_was_joined_last_comes_first(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(0),), "one", "ab" * 32, "mqtt://broker.example:1883"))
    memory.remember(RememberedSwarm((peer(1),), "two"))
    first, second = memory.swarms()
    assert (first.peers, first.model, first.joined_at) == ((peer(1),), "two", NOW)
    assert (second.model, second.fingerprint, second.broker) == ("one", "ab" * 32, "mqtt://broker.example:1883")
    memory.remember(RememberedSwarm((peer(0),)), is_look=True)
    assert [one.model for one in memory.swarms()] == ["two", "one"]  # it was only looked at
    memory.remember(RememberedSwarm((peer(0),)))
    assert [one.model for one in memory.swarms()] == ["one", "two"]
    memory.remember(RememberedSwarm((peer(2),), "three"), is_look=True)
    assert [one.model for one in memory.swarms()] == ["one", "two", "three"]


def test_peers_that_were_met_are_added_and_new_addresses_replace_old_ones(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(0), peer(1, port=1)), "one", "ab" * 32))
    memory.remember(RememberedSwarm((peer(1, port=2), peer(2))))
    (known,) = memory.swarms()
    assert known.peers == (peer(1, port=2), peer(2), peer(0))
    assert (known.model, known.fingerprint) == ("one", "ab" * 32)
    memory.remember(RememberedSwarm((peer(2),), "other"))
    assert memory.swarms()[0].fingerprint is None  # it was another model's


def test_a_private_swarm_is_told_by_its_key(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(0),), "open"))
    memory.remember(RememberedSwarm((peer(0),), "private", network=KEY.name))
    memory.remember(RememberedSwarm((peer(1),), network=KEY.name))
    assert [(one.model, len(one.peers)) for one in memory.swarms()] == [("private", 2), ("open", 1)]


def test_an_open_swarm_is_told_by_its_id_and_a_peer_stands_in_one(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(0), peer(1)), "one", swarm=ONE, here=(peer(9),)))
    memory.remember(RememberedSwarm((peer(2), peer(1)), "two", swarm=TWO, here=(peer(9),)))
    two, one = memory.swarms()
    assert (two.peers, two.here) == ((peer(2), peer(1)), (peer(9),))
    assert (one.peers, one.here) == ((peer(0),), ())  # a peer is where it was met last, this machine where it is now
    memory.remember(RememberedSwarm((peer(9), peer(2)), swarm=TWO))
    assert memory.swarms()[0].peers == (peer(2), peer(1))  # nobody is a peer of its own


def test_a_swarm_that_began_here_is_remembered_without_peers(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((), "mine", swarm=ONE, here=(peer(9),)))
    (mine,) = memory.swarms()
    assert (mine.peers, mine.here, mine.swarm_id) == ((), (peer(9),), bytes.fromhex(ONE))


def test_what_release_0_2_wrote_is_read_and_gets_the_id_that_its_peers_say(memory: SwarmMemory) -> None:
    """Two swarms that had become one entry are taken apart by what their peers say."""
    path_of(memory).parent.mkdir()
    mixed = {"peers": [peer(0), peer(1), peer(2), peer(9)], "joined_at": 1, "model": "one", "network": None}
    path_of(memory).write_text(json.dumps({"format": 1, "swarms": [mixed]}))
    (old,) = memory.swarms()
    assert (old.swarm, len(old.peers)) == (None, 4)
    others = [(SwarmId(bytes.fromhex(TWO)), peer(1)), (SwarmId(bytes.fromhex(TWO)), peer(9))]
    memory.remember(RememberedSwarm((peer(0),), swarm=ONE, here=(peer(9),)), others=others)
    one, two = memory.swarms()
    assert (one.swarm, one.model, one.peers, one.here) == (ONE, "one", (peer(0), peer(2)), (peer(9),))
    assert (two.swarm, two.model, two.peers) == (TWO, None, (peer(1),))


def test_a_swarm_without_an_id_is_not_taken_for_one_that_has_one(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(0),), "known", swarm=ONE))
    memory.remember(RememberedSwarm((peer(1), peer(2)), "old"))
    memory.remember(RememberedSwarm((peer(0), peer(1)), swarm=ONE))  # a peer of the old one has moved
    assert [(one.model, one.peers) for one in memory.swarms()] == [("known", (peer(0), peer(1))), ("old", (peer(2),))]


def test_the_file_and_the_keys_are_their_users_alone(memory: SwarmMemory) -> None:
    memory.keep_key(KEY)
    memory.keep_key(KEY)
    memory.remember(RememberedSwarm((peer(0),), network=KEY.name))
    for path in (path_of(memory), memory.key_path(KEY.name)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KEY.secret.hex() not in path_of(memory).read_text()
    assert memory.key(KEY.name) == KEY


def test_everything_is_bounded(memory: SwarmMemory) -> None:
    for number in range(MAX_SWARMS + 3):
        memory.remember(RememberedSwarm((peer(number),), str(number)))
    known = memory.swarms()
    assert [one.model for one in known] == [str(number) for number in reversed(range(3, MAX_SWARMS + 3))]
    crowd = tuple(peer(0, host=f"203.0.113.{number}") for number in range(MAX_PEERS + 5))
    memory.remember(RememberedSwarm(crowd))
    assert memory.swarms()[0].peers == crowd[:MAX_PEERS]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 1, "swarms": [{}]}',
        '{"format": 1, "swarms": [{"peers": ["/ip4/1.2.3.4"], "joined_at": 1}]}',
        '{"format": 1, "swarms": [{"peers": [], "joined_at": 1}]}',
        json.dumps({"format": 1, "swarms": [{"peers": [peer(0)], "joined_at": 1, "model": "a\x1b[2J"}]}),
        json.dumps({"format": 1, "swarms": [{"peers": [peer(0)], "joined_at": 1, "broker": "http://x"}]}),
        json.dumps({"format": 1, "swarms": [{"peers": [peer(0)], "joined_at": 1, "network": "../../x"}]}),
        json.dumps({"format": 2, "swarms": [{"peers": [peer(0)], "joined_at": 1, "swarm": "12"}]}),
        json.dumps({"format": 2, "swarms": [{"peers": [], "here": ["x"], "joined_at": 1}]}),
        "[" * 100_000,
        "x" * 300_000,
    ],
)
def test_a_damaged_file_is_put_aside_and_begun_anew(
    memory: SwarmMemory, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path_of(memory).parent.mkdir()
    path_of(memory).write_text(text)
    assert memory.swarms() == []
    (line,) = caplog.messages
    assert "is damaged" in line
    assert "put aside" in line
    assert line.isprintable()
    assert len(line) < 400
    assert path_of(memory).with_name("swarms.json.damaged-1").read_text() == text
    memory.remember(RememberedSwarm((peer(0),)))
    assert len(memory.swarms()) == 1


def test_damaged_files_do_not_pile_up(memory: SwarmMemory) -> None:
    path_of(memory).parent.mkdir()
    for number in range(MAX_ASIDE + 2):
        path_of(memory).write_text(str(number))
        assert memory.swarms() == []
    kept = sorted(path_of(memory).parent.glob("*.damaged-*"))
    assert [one.read_text() for one in kept] == ["0", "1", str(MAX_ASIDE + 1)]


def test_a_newer_releases_file_is_left_alone(memory: SwarmMemory, caplog: pytest.LogCaptureFixture) -> None:
    path_of(memory).parent.mkdir()
    text = json.dumps({"format": 3, "swarms": {"better": True}})
    path_of(memory).write_text(text)
    assert memory.swarms() == []
    memory.remember(RememberedSwarm((peer(0),)))
    assert path_of(memory).read_text() == text
    assert caplog.messages == [
        "the remembered swarms are of a newer release of Canopy: update this one, or use --join",
    ]
    with pytest.raises(ConfigError, match="newer release"):
        memory.forget([])


def test_later_fields_are_read_past(memory: SwarmMemory) -> None:
    path_of(memory).parent.mkdir()
    swarm = {"peers": [peer(0)], "joined_at": 1, "colour": "green"}
    path_of(memory).write_text(json.dumps({"format": 1, "swarms": [swarm], "more": []}))
    assert memory.swarms()[0].peers == (peer(0),)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "canopy").write_text("a file")
    memory = SwarmMemory(tmp_path / "canopy" / "swarms.json")
    for _ in range(3):
        memory.remember(RememberedSwarm((peer(0),)))
    (line,) = caplog.messages
    assert "this swarm is not remembered" in line


def test_two_programs_lose_nothing(memory: SwarmMemory) -> None:
    others = [SwarmMemory(memory.path, clock=lambda: NOW) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for number, other in enumerate(others):
            pool.submit(other.remember, RememberedSwarm((peer(number),)))
    assert {peer_of(one.peers[0]) for one in memory.swarms()} == set(IDS[:8])


def test_what_is_forgotten_takes_its_key_along(memory: SwarmMemory) -> None:
    memory.keep_key(KEY)
    memory.remember(RememberedSwarm((peer(0),), network=KEY.name))
    memory.remember(RememberedSwarm((peer(1),)))
    memory.forget([memory.swarms()[0]])
    assert memory.key_path(KEY.name).exists()
    memory.forget(memory.swarms())
    assert not memory.key_path(KEY.name).exists()
    assert memory.swarms() == []


def test_the_users_file_stands_beside_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert SwarmMemory.of_user().path is None  # CANOPY_SWARMS=none, as in every test
    monkeypatch.delenv("CANOPY_SWARMS")
    assert SwarmMemory.of_user().path == tmp_path / "canopy" / "swarms.json"
    monkeypatch.setenv("CANOPY_SWARMS", str(tmp_path / "other.json"))
    assert SwarmMemory.of_user().path == tmp_path / "other.json"


def test_without_a_file_nothing_is_remembered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    memory = SwarmMemory(None)
    memory.remember(RememberedSwarm((peer(0),)))
    memory.keep_key(KEY)
    assert memory.swarms() == []
    assert not caplog.messages
