"""Which swarm a command means: what was typed, an invite, the environment, or the swarm that was joined last.

    join:   --join and MODEL (addresses, or an invite)  →  CANOPY_JOIN  →  the swarm remembered
    model:  MODEL  →  a typed invite's  →  CANOPY_MODEL  →  an invite's of CANOPY_JOIN  →  the remembered swarm's
    broker: --mqtt →  a typed invite's  →  CANOPY_MQTT   →  an invite's of CANOPY_JOIN  →  the remembered swarm's
    key:    --network-key  →  an invite's  →  CANOPY_NETWORK_KEY  →  the remembered swarm's with these peers

`--join -` asks for the word, so that an invite with a network key stands on no command line.
All commands ask here, so all take the same. Joins nothing; remembers what was joined.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from swarm.discovery.dht.addresses import OPEN_SWARM, Membership
from swarm.egress.proxy import HttpProxy
from swarm.errors import ConfigError
from swarm.joining.invite import MAX_CHARACTERS, Invite, is_invite, open_invite
from swarm.joining.remembered import RememberedSwarm, SwarmMemory, peer_of
from swarm.transport.network_key import NetworkKey

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_JOIN: Final = 32
"""Addresses of one command, those of its invites included."""
_Filled = TypeVar("_Filled", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class SwarmRequest:
    """What a command was told of the swarm that it is for.

    Attributes:
        join: addresses and invites.
        model: a model, or an invite in its place.
        mqtt: URL of a broker.
        network_key: file of a private swarm's key.
        is_new: whether a swarm begins here, although one is remembered.
    """

    join: tuple[str, ...] = ()
    model: str | None = None
    mqtt: str | None = field(default=None, repr=False)
    network_key: Path | None = None
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class SwarmChoice:
    """The swarm that is meant.

    Attributes:
        join: multiaddresses of its peers; empty where one begins.
        model: what to serve or to use; None where nothing names one.
        fingerprint: how that model's begins, where whoever invites said so.
        mqtt: URL of the broker.
        membership: what else joining takes.
        note: a line for the user that says which swarm it is; empty where it was typed.
    """

    join: tuple[str, ...] = ()
    model: str | None = None
    fingerprint: str | None = None
    mqtt: str | None = field(default=None, repr=False)
    membership: Membership = OPEN_SWARM
    note: str = ""


class SwarmFinder:
    """Finds the swarm that a command means."""

    def __init__(
        self,
        memory: SwarmMemory,
        environment: Mapping[str, str],
        own_peers: Iterable[str] = (),
        *,
        is_look: bool = False,
        ask: Callable[[], str] | None = None,
    ) -> None:
        """Prepare to look.

        Args:
            memory: swarms that were joined before; its clock says whether an invite has expired.
            environment: of the program.
            own_peers: peer ids of this machine, which cannot join through themselves.
            is_look: whether the command only looks at a swarm, so that it does not become the one joined last.
            ask: gives the word that stands for `-` (default: read from the terminal, unseen, or from standard input).
        """
        self._memory = memory
        self._environment = environment
        self._own = frozenset(own_peers)
        self._is_look = is_look
        self._ask = ask or _ask

    def find(self, request: SwarmRequest) -> SwarmChoice:
        """The swarm that is meant.

        Raises:
            ConfigError: an invite, an address or the key's file cannot be used, or they are of different swarms.
        """
        named = request.model if request.model is not None and is_invite(request.model) else None
        model = None if named is not None else request.model
        typed = [*request.join, *([named] if named is not None else [])]
        words = typed or self._environment.get("CANOPY_JOIN", "").split()
        if request.is_new:
            if words:
                raise ConfigError("--new begins a swarm, and --join (or an invite, or CANOPY_JOIN) joins one: choose")
            words = []
        given = expand([self._ask() if word == "-" else word for word in words], self._memory.clock())
        known = None
        if not given.join and not request.is_new:
            known = self._last(model)
        choice = self._chosen(replace(request, model=model), given, known, is_typed=bool(typed))
        if given.network is not None and any(map(is_invite, typed)):
            choice = replace(choice, note=f"{choice.note}; {_READABLE}")
        return replace(choice, membership=self._membership(request, given, known, choice))

    def _last(self, model: str | None) -> RememberedSwarm | None:
        """The swarm that was joined last; the last one of a model, if one has it."""
        swarms = self._memory.swarms()
        named = None if model is None else _lasting(model)
        same = [one for one in swarms if named is not None and one.model == named]
        return next(iter([*same, *swarms]), None)

    def _chosen(
        self, request: SwarmRequest, given: ExpandedJoin, known: RememberedSwarm | None, *, is_typed: bool
    ) -> SwarmChoice:
        invite = given.invite
        invited = (None, None) if invite is None else (invite.model, invite.broker)
        asked = (self._environment.get("CANOPY_MODEL") or None, self._environment.get("CANOPY_MQTT") or None)
        first, second = (invited, asked) if is_typed else (asked, invited)
        remembered = (None, None) if known is None else (known.model, known.broker)
        model = request.model or first[0] or second[0] or remembered[0]
        mqtt = request.mqtt or first[1] or second[1] or remembered[1]
        fingerprint = None
        if invite is not None and model is not None and model == invite.model:
            fingerprint = invite.fingerprint
        join, note = given.join, ""
        if invite is not None:
            note = f"invited by {invite.inviter_name}"
        elif known is not None:
            join = tuple(peer for peer in known.peers if peer_of(peer) not in self._own)
            note = f"the swarm joined last, {_counted(len(join))} known"
            if not join:
                note = "the swarm joined last has no other peer that is known: it begins here again"
        return SwarmChoice(join, model, fingerprint, mqtt, note=note)

    def _membership(
        self, request: SwarmRequest, given: ExpandedJoin, known: RememberedSwarm | None, choice: SwarmChoice
    ) -> Membership:
        network = given.network
        if request.network_key is not None:
            own = NetworkKey.load(request.network_key)
            if network is not None and own != network:
                raise ConfigError(f"--network-key {request.network_key} and the invite are of different swarms")
            network = own
        if network is None and self._environment.get("CANOPY_NETWORK_KEY"):
            network = NetworkKey.load(Path(self._environment["CANOPY_NETWORK_KEY"]))
        if network is None:
            network = self._known_key(known, choice.join)
        nobody = ""
        if known is not None:
            nobody = (
                f"no peer answers of the swarm joined last ({_counted(len(choice.join))} known): get an invite from "
                "somebody in it; `swarm forget` forgets it, and `node serve MODEL --new` begins another"
            )

        proxy = self._environment.get("CANOPY_PROXY") or None
        if proxy is not None:
            HttpProxy.parse(proxy)
        if self._memory.path is None:
            return Membership(network, nobody=nobody, proxy=proxy)
        recorder = _SwarmRecorder(self._memory, choice, network, is_look=self._is_look)
        return Membership(network, recorder.note_peers, recorder.note_model, nobody, proxy)

    def _known_key(self, known: RememberedSwarm | None, join: Iterable[str]) -> NetworkKey | None:
        """The key of the remembered swarm that is meant, or that one of these peers is of."""
        if known is None:
            peers = set(map(peer_of, join))
            swarms = self._memory.swarms() if peers else []
            known = next((one for one in swarms if one.network is not None and one.peer_ids & peers), None)
        return None if known is None or known.network is None else self._memory.key(known.network)


class _SwarmRecorder:
    """Remembers a swarm while it is joined."""

    def __init__(self, memory: SwarmMemory, choice: SwarmChoice, network: NetworkKey | None, *, is_look: bool) -> None:
        self._memory = memory
        self._choice = choice
        self._network = network
        self._is_look = is_look
        self._peers: Sequence[str] = ()
        self._fingerprint = choice.fingerprint

    def note_peers(self, peers: Sequence[str]) -> None:
        """The swarm was joined, and these peers are there."""
        self._peers = peers
        self._remember()

    def note_model(self, fingerprint: str) -> None:
        """This is the model that is served or used."""
        self._fingerprint = fingerprint
        self._remember()

    def _remember(self) -> None:
        """First who was asked and is there, then who was met; a machine's own loopback only if it has no other."""
        there = {peer_of(one) for one in self._peers}
        far = {peer_of(one) for one in self._peers if not _is_near(one)}
        learned = [one for one in self._peers if not _is_near(one) or peer_of(one) not in far]
        asked = [one for one in self._choice.join if peer_of(one) in there]
        if self._network is not None:
            self._memory.keep_key(self._network)
        swarm = RememberedSwarm(
            peers=tuple(dict.fromkeys([*asked, *sorted(learned, key=_is_near)])),
            model=None if self._choice.model is None else _lasting(self._choice.model),
            fingerprint=self._fingerprint,
            broker=self._choice.mqtt,
            network=None if self._network is None else self._network.name,
        )
        self._memory.remember(swarm, is_look=self._is_look)


@dataclass(frozen=True, slots=True)
class ExpandedJoin:
    """Addresses and invites, taken apart.

    Attributes:
        join: multiaddresses.
        invite: the first invite.
        network: the network key in the invites.
    """

    join: tuple[str, ...] = ()
    invite: Invite | None = None
    network: NetworkKey | None = None


def expand(words: Sequence[str], now: float) -> ExpandedJoin:
    """Take addresses and invites apart.

    Args:
        words: of `--join`; whoever joins checks the addresses.
        now: Unix seconds.

    Raises:
        ConfigError: an invite cannot be used, or they are of different private swarms.
    """
    join: list[str] = []
    invites: list[Invite] = []
    for word in words:
        if is_invite(word):
            invites.append(open_invite(word, now))
            join += invites[-1].peers
        else:
            join.append(word)
    if len(join) > MAX_JOIN:
        raise ConfigError(f"--join: {len(join)} addresses; {MAX_JOIN} are enough")
    networks = {one.network for one in invites}
    if len(networks) > 1:
        raise ConfigError("--join: these invites are of different private swarms; give one")
    return ExpandedJoin(tuple(dict.fromkeys(join)), next(iter(invites), None), next(iter(networks), None))


def with_swarm(command: _Filled, finder: SwarmFinder, *, wants_model: bool = True) -> tuple[_Filled, str]:
    """A command with the swarm that it means in place of what was typed.

    Args:
        command: with the field `join`; of `model`, `mqtt`, `network_key`, `new`, `fingerprint` and `membership` those
            that it has are read and filled in.
        finder: knows the environment and what is remembered.
        wants_model: whether it is for one model, so that an invite's or the remembered one is meant where none is
            named.

    Returns:
        The command, and a line for its user; empty where everything was typed.

    Raises:
        ConfigError: as `SwarmFinder.find`.
    """
    has = {one.name for one in fields(command)}
    said = {name: getattr(command, name) for name in has & {"join", "model", "mqtt", "network_key"}}
    choice = finder.find(SwarmRequest(**said, is_new=getattr(command, "new", False)))
    found: dict[str, Any] = {"join": choice.join, "mqtt": choice.mqtt, "membership": choice.membership}
    if wants_model:
        found |= {"model": choice.model, "fingerprint": getattr(command, "fingerprint", None) or choice.fingerprint}
    elif said.get("model") is not None and is_invite(said["model"]):
        found["model"] = None
    return replace(command, **{name: value for name, value in found.items() if name in has}), choice.note


_READABLE: Final = "others on this machine could read its network key on the command line, which `--join -` avoids"


def _ask() -> str:
    """A word that is not shown while it is typed or pasted."""
    if sys.stdin.isatty():
        return getpass("invite: ")
    return sys.stdin.readline(2 * MAX_CHARACTERS).strip()


def _counted(peers: int) -> str:
    return f"{peers} {'peer' if peers == 1 else 'peers'}"


def _is_near(address: str) -> bool:
    """Whether an address is of this machine: others come first."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def _lasting(model: str) -> str:
    """A model's name that means the same in every folder."""
    path = Path(model).expanduser()
    if path.is_file():
        return str(path.absolute())  # a link keeps its name, which says what the file is
    return str(path.resolve()) if path.is_dir() else model
