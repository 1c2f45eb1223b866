"""Which swarm a command means: typed, invited, from the environment, or joined last. One answer for every command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from node.model.config import ServeConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import SwarmId
from swarm.directory.dht.addresses import OPEN_SWARM, Membership, MetSwarm
from swarm.directory.identity import Identity
from swarm.directory.joining.invite import Invite, seal_invite
from swarm.directory.joining.remembered import RememberedSwarm, SwarmMemory
from swarm.directory.joining.resolve import SwarmChoice, SwarmFinder, SwarmRequest, User, with_swarm
from swarm.link.network_key import NetworkKey

ME, A, B = Identity.ephemeral(), Identity.ephemeral(), Identity.ephemeral()
NOW = 1_800_000_000.0
KEY, OTHER_KEY = NetworkKey(bytes(range(32))), NetworkKey(bytes(32))
HERE, THERE = SwarmId(bytes(16)), SwarmId(bytes([1] * 16))
PRINT = "0123456789abcdef" * 2


def peer(identity: Identity, host: str = "203.0.113.1") -> str:
    return f"/ip4/{host}/tcp/31337/p2p/{identity.peer_id}"


def invited(*peers: str, network: NetworkKey | None = None, swarm: SwarmId | None = None, life_s: int = 60) -> str:
    broker = "mqtt://invited.example"
    said = Invite(peers or (peer(A),), int(NOW) + life_s, "org/invited", PRINT, broker, network, swarm)
    return seal_invite(said, A)


@pytest.fixture
def memory(tmp_path: Path) -> SwarmMemory:
    return SwarmMemory(tmp_path / "swarms.json", clock=lambda: NOW)


def find(memory: SwarmMemory, *join: str, environment: dict[str, str] | None = None, **said: object) -> SwarmChoice:
    finder = SwarmFinder(memory, environment or {}, [ME.peer_id])
    return finder.find(SwarmRequest(join, **said))  # type: ignore[arg-type]


def test_what_is_typed_is_meant(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(B),), "old", broker="mqtt://old.example"))
    choice = find(memory, peer(A), model="typed", mqtt="mqtt://typed.example")
    assert (choice.join, choice.model, choice.mqtt, choice.note) == (
        *((peer(A),), "typed", "mqtt://typed.example"),
        "",
    )
    choice = find(memory, peer(A))
    assert (choice.model, choice.mqtt) == (None, None)  # another swarm's are not this one's


@pytest.mark.parametrize("place", ["join", "model"])
def test_an_invite_stands_for_addresses_model_and_broker(memory: SwarmMemory, place: str) -> None:
    word = invited(peer(A), peer(B))
    environment = {"CANOPY_MODEL": "env", "CANOPY_MQTT": "mqtt://env.example", "CANOPY_JOIN": peer(ME)}
    choice = find(memory, *([word] if place == "join" else []), environment=environment, **_model(word, place))
    assert choice.join == (peer(A), peer(B))
    assert (choice.model, choice.fingerprint, choice.mqtt) == ("org/invited", PRINT, "mqtt://invited.example")
    assert choice.note.startswith("invited by ")


def _model(word: str, place: str) -> dict[str, object]:
    return {"model": word} if place == "model" else {}


def test_flags_win_over_an_invite(memory: SwarmMemory) -> None:
    choice = find(memory, invited(), peer(B), model="mine", mqtt="mqtt://mine.example")
    assert (choice.join, choice.model, choice.mqtt) == ((peer(A), peer(B)), "mine", "mqtt://mine.example")
    assert choice.fingerprint is None  # it was another model's


def test_the_environment_may_name_it_all(memory: SwarmMemory) -> None:
    choice = find(memory, environment={"CANOPY_JOIN": f"{peer(A)} {peer(B)}", "CANOPY_MODEL": "env"})
    assert (choice.join, choice.model) == ((peer(A), peer(B)), "env")
    choice = find(memory, environment={"CANOPY_JOIN": invited(), "CANOPY_MODEL": "env"})
    assert (choice.join, choice.model, choice.mqtt) == ((peer(A),), "env", "mqtt://invited.example")


def test_with_nothing_the_swarm_joined_last_is_meant(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(B),), "older"))
    memory.remember(RememberedSwarm((peer(A), peer(ME)), "org/last", broker="mqtt://last.example"))
    choice = find(memory)
    assert (choice.join, choice.model, choice.mqtt) == ((peer(A),), "org/last", "mqtt://last.example")
    assert choice.note == "the swarm joined last, 1 peer known"
    assert "get an invite from somebody in the swarm" in choice.membership.nobody
    assert find(memory, model="older").join == (peer(B),)  # the one that has this model
    assert find(memory, model="else").join == (peer(A),)


def test_new_begins_one_although_another_is_remembered(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(A),), "last"))
    choice = find(memory, is_new=True, model="mine")
    assert (choice.join, choice.model, choice.membership.network) == ((), "mine", None)
    for join, environment in (((peer(A),), {}), ((), {"CANOPY_JOIN": peer(A)})):
        with pytest.raises(ConfigError, match="--new begins a swarm"):
            find(memory, *join, environment=environment, is_new=True)


def test_a_machine_does_not_join_through_itself(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(ME),), "mine"))
    choice = find(memory)
    assert (choice.join, choice.model) == ((), "mine")
    assert "begins here again" in choice.note


def test_without_any_nothing_is_meant(memory: SwarmMemory) -> None:
    assert find(memory).join == ()
    assert find(memory).note == ""


def test_wrong_words_are_one_line(memory: SwarmMemory) -> None:
    for join, says in (
        (("canopy://zzzz",), "damaged"),
        ((invited(network=KEY), invited(network=OTHER_KEY)), "different private swarms"),
        (tuple(peer(A, f"203.0.113.{number}") for number in range(40)), "32 are enough"),
    ):
        with pytest.raises(ConfigError, match=says):
            find(memory, *join)


def test_a_network_key_comes_with_the_invite_the_flag_or_what_was_joined(memory: SwarmMemory, tmp_path: Path) -> None:
    KEY.save(tmp_path / "own.key")
    assert find(memory, invited(network=KEY)).membership.network == KEY
    assert find(memory, peer(A), network_key=tmp_path / "own.key").membership.network == KEY
    environment = {"CANOPY_NETWORK_KEY": str(tmp_path / "own.key")}
    assert find(memory, peer(A), environment=environment).membership.network == KEY
    with pytest.raises(ConfigError, match="different swarms"):
        find(memory, invited(network=OTHER_KEY), network_key=tmp_path / "own.key")
    assert find(memory, peer(A)).membership.network is None
    memory.keep_key(KEY)
    memory.remember(RememberedSwarm((peer(A),), network=KEY.name))
    assert find(memory, peer(A)).membership.network == KEY
    assert find(memory).membership.network == KEY
    memory.key_path(KEY.name).unlink()
    with pytest.raises(ConfigError, match="No such file"):
        find(memory)


def test_a_key_on_the_command_line_is_warned_of_and_can_be_asked_for(memory: SwarmMemory) -> None:
    word = invited(network=KEY)
    assert "`--join -` avoids" in find(memory, word).note
    asking = SwarmFinder(memory, {}, user=User(lambda: word))
    choice = asking.find(SwarmRequest(("-",)))
    assert choice.membership.network == KEY
    assert "avoids" not in choice.note
    assert KEY.secret.hex() not in repr(choice)
    assert repr(KEY.secret) not in repr(choice)


def test_what_is_joined_is_remembered_with_those_who_were_met(memory: SwarmMemory, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    choice = find(memory, invited(peer(A), peer(B), network=KEY), model=str(tmp_path / "model"))
    note_peers, note_model = choice.membership.note_peers, choice.membership.note_model
    assert note_peers is not None
    assert note_model is not None
    assert memory.swarms() == []  # nothing is remembered before a join worked
    met = Identity.ephemeral()
    note_peers(MetSwarm(None, (peer(met, "127.0.0.1"), peer(met), peer(A, "127.0.0.1"), peer(A)), (peer(ME),)))
    note_model("ab" * 32)
    (known,) = memory.swarms()
    assert known.peers == (peer(A), peer(met))  # B did not answer
    assert (known.model, known.fingerprint) == (str(tmp_path / "model"), "ab" * 32)
    assert (known.broker, known.network) == ("mqtt://invited.example", KEY.name)
    assert find(memory).membership.network == KEY


def test_what_is_typed_adds_to_what_is_known(memory: SwarmMemory) -> None:
    """The invite's one peer may be dead: those that were met are tried beside it, and each is called by its origin."""
    memory.remember(RememberedSwarm((peer(A), peer(B)), "old", broker="mqtt://me@invited.example", swarm=HERE.hex()))
    for join, environment in (((peer(A),), {}), ((), {"CANOPY_JOIN": peer(A)})):
        choice = find(memory, *join, environment=environment)
        assert (choice.join, choice.model, choice.mqtt) == ((peer(A), peer(B)), "old", "mqtt://me@invited.example")
        assert choice.membership.swarm == HERE
        assert not choice.membership.is_certain
        named = "from --join" if join else "from CANOPY_JOIN"
        assert [choice.sources[one].text for one in choice.join] == [named, "remembered since 2027-01-15"]
        assert choice.note == "a swarm that was joined before: 1 peer, and 1 remembered"
    invite = invited(peer(A, "203.0.113.9"), swarm=HERE)
    choice = find(memory, invite, environment={"CANOPY_JOIN": peer(B)})
    assert choice.join == (peer(A, "203.0.113.9"), peer(B), peer(A))
    assert choice.mqtt == "mqtt://me@invited.example"
    assert choice.sources[choice.join[0]].text == "from the invite"
    assert (choice.membership.swarm, choice.membership.is_certain) == (HERE, True)
    stranger = find(memory, peer(ME), environment={"CANOPY_JOIN": peer(B)})
    assert (stranger.join, stranger.model) == ((peer(ME),), None)  # nothing says that it is of the same swarm


def test_an_environment_that_names_only_the_dead_does_not_hide_the_memory(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(A),), swarm=HERE.hex()))
    choice = find(memory, environment={"CANOPY_JOIN": peer(B)})
    assert [(one, choice.sources[one].rank) for one in choice.join] == [(peer(B), 1), (peer(A), 2)]
    assert choice.membership.swarm is None  # what answers decides


def test_an_address_of_the_environment_is_called_so() -> None:
    with pytest.raises(ConfigError, match="CANOPY_JOIN 'rubbish' is no peer address"):
        find(SwarmMemory(None), environment={"CANOPY_JOIN": "rubbish"})


def test_an_invite_to_a_swarm_that_is_known_does_not_expire(memory: SwarmMemory) -> None:
    old = invited(swarm=HERE, life_s=-40 * 86_400)
    for swarms in ((), (RememberedSwarm((peer(A),), swarm=THERE.hex()),)):
        for swarm in swarms:
            memory.remember(swarm)
        with pytest.raises(ConfigError, match="has expired, 40 days ago"):
            find(memory, old)
    memory.remember(RememberedSwarm((peer(B),), swarm=HERE.hex()))
    assert find(memory, old).join == (peer(A), peer(B))


def test_an_invite_to_another_swarm_brings_no_peer_of_this_one_along(memory: SwarmMemory) -> None:
    """A machine's own peer id stood in both, and the two became one for everybody."""
    memory.remember(RememberedSwarm((peer(B),), "first", swarm=HERE.hex(), here=(peer(ME),)))
    choice = find(memory, invited(peer(A), peer(ME), swarm=THERE))
    assert choice.join == (peer(A), peer(ME))
    note_peers = choice.membership.note_peers
    assert note_peers is not None
    note_peers(MetSwarm(THERE, (peer(A),), (peer(ME, "203.0.113.7"),)))
    second, first = memory.swarms()
    assert (second.swarm, second.peers, second.here) == (THERE.hex(), (peer(A),), (peer(ME, "203.0.113.7"),))
    assert (first.swarm, first.peers, first.here) == (HERE.hex(), (peer(B),), ())
    assert find(memory).join == (peer(A),)


def test_an_invite_changes_a_remembered_swarm_only_if_somebody_says_so(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(A),), "org/invited", "ff" * 32, "mqtt://u:p@old.example", swarm=HERE.hex()))
    word, asked = invited(swarm=HERE), []
    changed = "the weights of org/invited from ffffffffffff to 0123456789ab and the broker from old.example to invited"
    with pytest.raises(ConfigError, match=f"this invite changes {changed}.*to accept it, `swarm forget` that swarm"):
        find(memory, word)

    def confirm(question: str) -> bool:
        asked.append(question)
        return True

    finder = SwarmFinder(memory, {}, user=User(lambda: "", confirm))
    choice = finder.find(SwarmRequest((word,)))
    assert (choice.fingerprint, choice.mqtt) == (PRINT, "mqtt://invited.example")
    assert len(asked) == 1
    looking = SwarmFinder(memory, {}, is_look=True)
    assert looking.find(SwarmRequest((word,))).join == (peer(A),)


def test_the_weights_that_were_used_last_are_used_again(memory: SwarmMemory) -> None:
    memory.remember(RememberedSwarm((peer(A),), "org/model", "ff" * 32, swarm=HERE.hex()))
    assert find(memory).fingerprint == "ff" * 32
    assert find(memory, model="org/model").fingerprint is None  # who names a model means it as it is now


@dataclass(frozen=True)
class Status:
    """A command that looks at a swarm, whatever its models."""

    join: tuple[str, ...] = ()
    model: str | None = None
    membership: Membership = OPEN_SWARM


def test_commands_are_filled_in(memory: SwarmMemory) -> None:
    finder = SwarmFinder(memory, {})
    serve, note = with_swarm(ServeConfig(layers="auto", model=invited(network=KEY)), finder)
    assert (serve.join, serve.model, serve.mqtt) == ((peer(A),), "org/invited", "mqtt://invited.example")
    assert serve.model_why == "as the invite says"
    assert (serve.fingerprint, serve.membership.network) == (PRINT, KEY)
    assert note
    serve.check()
    assert serve.dht().membership.network == KEY
    assert serve.dht().join == (peer(A),)
    looks, _ = with_swarm(Status(model=invited()), finder, wants_model=False)
    assert (looks.join, looks.model) == ((peer(A),), None)
    looks, _ = with_swarm(Status((peer(A),), "some"), finder, wants_model=False)
    assert looks.model == "some"


def test_a_proxy_is_used_where_it_is_set_for_canopy(memory: SwarmMemory) -> None:
    url = "http://me:secret@proxy.example:8080"
    choice = find(memory, peer(A), environment={"CANOPY_PROXY": url, "https_proxy": "http://other"})
    assert choice.membership.proxy == url
    assert "secret" not in repr(choice)
    assert find(memory, peer(A), environment={"https_proxy": url, "CANOPY_PROXY": ""}).membership.proxy is None
    with pytest.raises(ConfigError, match="CANOPY_PROXY") as caught:
        find(memory, peer(A), environment={"CANOPY_PROXY": "socks5://me:secret@proxy.example"})
    assert "secret" not in str(caught.value)
