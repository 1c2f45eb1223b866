"""Which swarm a command means: what was typed, an invite, the environment, or the swarm that was joined last.

    peers:  of an invite and of --join, of CANOPY_JOIN, and those remembered: one list of the peers of one swarm
    model:  MODEL  →  a typed invite's  →  CANOPY_MODEL  →  an invite's of CANOPY_JOIN  →  the remembered swarm's
    broker: --mqtt →  a typed invite's  →  CANOPY_MQTT   →  an invite's of CANOPY_JOIN  →  the remembered swarm's
    key:    --network-key  →  an invite's  →  CANOPY_NETWORK_KEY  →  the remembered swarm's with these peers

What is typed adds to what is known, and replaces nothing: where an invite or an address is of a swarm that this machine
knows, its remembered peers are tried beside it. All are asked at once which swarm they are of, and those of another one
are left out (`swarm.directory.dht.meeting`).

`--join -` asks for the word, so that an invite with a network key stands on no command line.
All commands ask here, so all take the same. Joins nothing; remembers what was joined.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from swarm.base.errors import ConfigError
from swarm.base.plain_text import plain_line
from swarm.directory.dht.addresses import OPEN_SWARM, Membership, MetSwarm, PeerSource, check_join_address
from swarm.directory.joining.invite import MAX_CHARACTERS, Invite, check_expiry, is_invite, open_invite, read_invite
from swarm.directory.joining.remembered import RememberedSwarm, SwarmMemory, peer_of
from swarm.link.egress.proxy import HttpProxy
from swarm.link.network_key import NetworkKey

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_JOIN: Final = 32
"""Addresses of one command, those of its invites included."""


@dataclass(frozen=True, slots=True)
class _WordsOf:
    """Where words come from: whose word counts most, and how both kinds are called."""

    rank: int
    named: str
    invite: str


TYPED: Final = _WordsOf(0, "--join", "from the invite")
AROUND: Final = _WordsOf(1, "CANOPY_JOIN", "from the invite in CANOPY_JOIN")
_REMEMBERED: Final = 2
_NOBODY: Final = (
    "get an invite from somebody in the swarm; `swarm forget` forgets it, and `node serve MODEL --new` begins another"
)
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
        model_why: who named it, as people are told.
        fingerprint: how that model's begins, where whoever invites said so.
        mqtt: URL of the broker.
        membership: what else joining takes.
        note: a line for the user that says which swarm it is; empty where it was typed.
    """

    join: tuple[str, ...] = ()
    model: str | None = None
    model_why: str = ""
    fingerprint: str | None = None
    mqtt: str | None = field(default=None, repr=False)
    membership: Membership = OPEN_SWARM
    note: str = ""
    sources: Mapping[str, PeerSource] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class User:
    """Who is asked.

    Attributes:
        word: gives the word that stands for `-`: read from the terminal, unseen, or from standard input.
        confirm: shows a question and returns whether the answer is yes; None where nobody can be asked.
    """

    word: Callable[[], str]
    confirm: Callable[[str], bool] | None = None


class SwarmFinder:
    """Finds the swarm that a command means."""

    def __init__(
        self,
        memory: SwarmMemory,
        environment: Mapping[str, str],
        own_peers: Iterable[str] = (),
        *,
        is_look: bool = False,
        user: User | None = None,
    ) -> None:
        """Prepare to look.

        Args:
            memory: swarms that were joined before; its clock says whether an invite has expired.
            own_peers: peer ids of this machine, which cannot join through themselves.
            is_look: whether the command only looks at a swarm, so that it does not become the one joined last.
            user: who is asked (default: whoever sits at the terminal).
        """
        self._memory = memory
        self._environment = environment
        self._own = frozenset(own_peers)
        self._is_look = is_look
        self._user = user or User(_typed_word, _typed_yes if sys.stdin.isatty() and sys.stderr.isatty() else None)

    def find(self, request: SwarmRequest) -> SwarmChoice:
        """The swarm that is meant.

        Raises:
            ConfigError: an invite, an address or the key's file cannot be used, they are of different swarms, or an
                invite would change what is known of a swarm and nobody says that it may.
        """
        named = request.model if request.model is not None and is_invite(request.model) else None
        request = replace(request, model=None if named is not None else request.model)
        typed = [*request.join, *([named] if named is not None else [])]
        surrounding = self._environment.get("CANOPY_JOIN", "").split()
        if request.is_new and (typed or surrounding):
            raise ConfigError("--new begins a swarm, and --join (or an invite, or CANOPY_JOIN) joins one: choose")
        given = _given([self._user.word() if word == "-" else word for word in typed], TYPED)
        around = _given(surrounding, AROUND)
        network = self._network(request, given if typed else around)
        known = None if request.is_new else self._known(request.model, given if typed else around, network)
        if typed and not around.is_of(given, known):
            around = GivenPeers()
        meant = given if typed else around
        if meant.invite is not None and known is None:
            check_expiry(meant.invite, self._memory.clock())
        if network is None and known is not None and known.network is not None:
            network = self._memory.key(known.network)
        spare = self._spare(around) if known is None and network is None and not typed else None
        sources = {**self._remembered(known or spare), **around.sources, **given.sources}
        choice = self._chosen(request, given, around, known, sources)
        if given.network is not None and any(map(is_invite, typed)):
            choice = replace(choice, note=f"{choice.note}; {_READABLE}")
        return replace(choice, membership=self._membership(choice, meant, known, network, is_new=request.is_new))

    def _network(self, request: SwarmRequest, given: GivenPeers) -> NetworkKey | None:
        """The network key that was given."""
        if request.network_key is not None:
            own = NetworkKey.load(request.network_key)
            if given.network is not None and own != given.network:
                raise ConfigError(f"--network-key {request.network_key} and the invite are of different swarms")
            return own
        if given.network is None and self._environment.get("CANOPY_NETWORK_KEY"):
            return NetworkKey.load(Path(self._environment["CANOPY_NETWORK_KEY"]))
        return given.network

    def _known(self, model: str | None, given: GivenPeers, network: NetworkKey | None) -> RememberedSwarm | None:
        """What is remembered of the swarm that is meant."""
        swarms = self._memory.swarms()
        if network is not None:
            return next((one for one in swarms if one.network == network.name), None)
        if given.sources:
            return next(filter(given.is_known_as, sorted(swarms, key=lambda one: one.swarm is None)), None)
        named = None if model is None else _lasting(model)
        same = [one for one in swarms if named is not None and one.model == named]
        return next(iter([*same, *swarms]), None)

    def _spare(self, around: GivenPeers) -> RememberedSwarm | None:
        """The open swarm that was joined last, where the environment names peers that may all be gone."""
        if not around.sources or around.swarm is not None:
            return None
        return next((one for one in self._memory.swarms() if one.network is None), None)

    def _chosen(
        self,
        request: SwarmRequest,
        given: GivenPeers,
        around: GivenPeers,
        known: RememberedSwarm | None,
        sources: Mapping[str, PeerSource],
    ) -> SwarmChoice:
        """Peers, model and broker, and a line that says which swarm it is."""
        invite = given.invite or around.invite
        if invite is not None and known is not None and not self._is_look:
            self._check_pins(request, invite, known)
        invited = (None, None) if invite is None else (invite.model, _with_password(invite.broker, known))
        asked = (self._environment.get("CANOPY_MODEL") or None, self._environment.get("CANOPY_MQTT") or None)
        first, second = (invited, asked) if given.sources else (asked, invited)
        remembered = (None, None) if known is None else (known.model, known.broker)
        model, why = _model(request, invited[0], asked[0], remembered[0], is_typed=bool(given.sources))
        join = tuple(dict.fromkeys([*given.sources, *around.sources, *sources]))
        return SwarmChoice(
            join,
            model,
            why,
            _fingerprint(request, model, invite, known),
            request.mqtt or first[1] or second[1] or remembered[1],
            note=_note(given.invite or around.invite, len(given.sources) + len(around.sources), known, len(join)),
            sources=sources,
        )

    def _remembered(self, known: RememberedSwarm | None) -> dict[str, PeerSource]:
        """The remembered peers, but this program's own."""
        if known is None:
            return {}
        since = time.strftime("%Y-%m-%d", time.localtime(known.joined_at))
        source = PeerSource(_REMEMBERED, f"remembered since {since}")
        return {one: source for one in (*known.peers, *known.here) if peer_of(one) not in self._own}

    def _check_pins(self, request: SwarmRequest, invite: Invite, known: RememberedSwarm) -> None:
        """Ask before an invite changes what a remembered swarm's model or broker is.

        Raises:
            ConfigError: it may not.
        """
        changes = []
        old, new = known.fingerprint, invite.fingerprint
        if known.model == invite.model and old and new and old[: len(new)] != new[: len(old)]:
            changes.append(f"the weights of {invite.model} from {old[:12]} to {new[:12]}")
        if request.mqtt is None and invite.broker and known.broker and _place(invite.broker) != _place(known.broker):
            changes.append(f"the broker from {_place(known.broker)} to {_place(invite.broker)}")
        if not changes:
            return
        what = f"this invite changes {' and '.join(changes)} of a swarm that this machine knows"
        if self._user.confirm is None or not self._user.confirm(f"{what}: accept it? [y/N] "):
            raise ConfigError(f"{what}: to accept it, `swarm forget` that swarm and use the invite again")

    def _membership(
        self,
        choice: SwarmChoice,
        meant: GivenPeers,
        known: RememberedSwarm | None,
        network: NetworkKey | None,
        *,
        is_new: bool,
    ) -> Membership:
        invited = None if meant.invite is None else meant.invite.swarm
        proxy = self._environment.get("CANOPY_PROXY") or None
        if proxy is not None:
            HttpProxy.parse(proxy)
        membership = Membership(
            network,
            nobody="" if known is None else _NOBODY,
            proxy=proxy,
            swarm=invited or (None if known is None else known.swarm_id),
            is_certain=invited is not None,
            is_new=is_new,
            sources=choice.sources,
        )
        if self._memory.path is None:
            return membership
        recorder = _SwarmRecorder(self._memory, choice, network, is_look=self._is_look)
        return replace(membership, note_peers=recorder.note_peers, note_model=recorder.note_model)


class _SwarmRecorder:
    """Remembers a swarm while it is joined."""

    def __init__(self, memory: SwarmMemory, choice: SwarmChoice, network: NetworkKey | None, *, is_look: bool) -> None:
        self._memory = memory
        self._choice = choice
        self._network = network
        self._is_look = is_look
        self._met: MetSwarm | None = None
        self._fingerprint = choice.fingerprint

    def note_peers(self, met: MetSwarm) -> None:
        """The swarm was joined, and these peers are there."""
        self._met = met
        self._remember()

    def note_model(self, fingerprint: str) -> None:
        """This is the model that is served or used."""
        self._fingerprint = fingerprint
        self._remember()

    def _remember(self) -> None:
        """First who was asked and is there, then who was met."""
        met = self._met
        if met is None:
            return
        there = set(map(peer_of, met.peers))
        asked = [one for one in self._choice.join if peer_of(one) in there]
        if self._network is not None:
            self._memory.keep_key(self._network)
        swarm = RememberedSwarm(
            peers=tuple(dict.fromkeys([*asked, *_far_first(met.peers)])),
            model=None if self._choice.model is None else _lasting(self._choice.model),
            fingerprint=self._fingerprint,
            broker=self._choice.mqtt,
            network=None if self._network is None else self._network.name,
            swarm=None if met.swarm is None else met.swarm.hex(),
            here=tuple(_far_first(met.here)),
        )
        self._memory.remember(swarm, is_look=self._is_look, others=met.others)


@dataclass(frozen=True, slots=True)
class GivenPeers:
    """Addresses and invites of one origin, taken apart.

    Attributes:
        sources: the addresses, and where each comes from.
        invite: the first invite.
        network: the network key in the invites.
    """

    sources: Mapping[str, PeerSource] = field(default_factory=dict)
    invite: Invite | None = None
    network: NetworkKey | None = None

    @property
    def swarm(self) -> str | None:
        """The id of the open swarm that an invite is to."""
        return None if self.invite is None or self.invite.swarm is None else self.invite.swarm.hex()

    @property
    def peers(self) -> frozenset[str]:
        """Who the peers are."""
        return frozenset(map(peer_of, self.sources))

    def is_known_as(self, one: RememberedSwarm) -> bool:
        """Whether a remembered swarm is the one that these are of."""
        if self.swarm is not None and one.swarm is not None:
            return self.swarm == one.swarm
        if self.swarm is not None and one.network is not None:
            return False
        return bool(self.peers & (one.peer_ids | one.own_ids))

    def is_of(self, other: GivenPeers, known: RememberedSwarm | None) -> bool:
        """Whether these are of the swarm that others are of."""
        if self.network != other.network:
            return False
        same = self.swarm is not None and self.swarm == other.swarm
        return same or self.network is not None or (known is not None and self.is_known_as(known))


@dataclass(frozen=True, slots=True)
class ExpandedJoin:
    """Addresses and invites, taken apart."""

    join: tuple[str, ...] = ()
    invite: Invite | None = None
    network: NetworkKey | None = None


def expand(words: Sequence[str], now: float) -> ExpandedJoin:
    """Take addresses and invites apart.

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


def _given(words: Sequence[str], origin: _WordsOf) -> GivenPeers:
    """Take addresses and invites apart, with where they come from.

    Raises:
        ConfigError: an invite or an address cannot be used, or they are of different swarms.
    """
    sources: dict[str, PeerSource] = {}
    invites: list[Invite] = []
    for word in words:
        if is_invite(word):
            invites.append(read_invite(word))
            sources |= dict.fromkeys(invites[-1].peers, PeerSource(origin.rank, origin.invite))
        else:
            check_join_address(word, origin.named)
            sources[word] = PeerSource(origin.rank, f"from {origin.named}")
    if len(sources) > MAX_JOIN:
        raise ConfigError(f"{origin.named}: {len(sources)} addresses; {MAX_JOIN} are enough")
    if len({(one.network, one.swarm) for one in invites}) > 1:
        kind = "private swarms" if any(one.network for one in invites) else "swarms"
        raise ConfigError(f"{origin.named}: these invites are of different {kind}; give one")
    first = next(iter(invites), None)
    return GivenPeers(sources, first, None if first is None else first.network)


def with_swarm(command: _Filled, finder: SwarmFinder, *, wants_model: bool = True) -> tuple[_Filled, str]:
    """A command with the swarm that it means in place of what was typed.

    Args:
        command: with the field `join`; of `model`, `model_why`, `mqtt`, `network_key`, `new`, `fingerprint` and
            `membership` those that it has are read and filled in.
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
        found |= {
            "model": choice.model,
            "model_why": choice.model_why,
            "fingerprint": getattr(command, "fingerprint", None) or choice.fingerprint,
        }
    elif said.get("model") is not None and is_invite(said["model"]):
        found["model"] = None
    return replace(command, **{name: value for name, value in found.items() if name in has}), choice.note


_READABLE: Final = "others on this machine could read its network key on the command line, which `--join -` avoids"


def _typed_word() -> str:
    """A word that is not shown while it is typed or pasted."""
    if sys.stdin.isatty():
        return getpass("invite: ")
    return sys.stdin.readline(2 * MAX_CHARACTERS).strip()


def _typed_yes(question: str) -> bool:
    """Whether yes is typed after a question."""
    sys.stderr.write(plain_line(question))
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


AS_ASKED: Final = "as you asked"
"""Why a model is meant that the user named."""


def _model(
    request: SwarmRequest, invited: str | None, around: str | None, remembered: str | None, *, is_typed: bool
) -> tuple[str | None, str]:
    """The model that is meant, and who named it."""
    by_invite, by_environment = (invited, "as the invite says"), (around, "as CANOPY_MODEL says")
    between = (by_invite, by_environment) if is_typed else (by_environment, by_invite)
    named = ((request.model, AS_ASKED), *between, (remembered, "as the last time in this swarm"))
    return next(((model, why) for model, why in named if model is not None), (None, ""))


def _fingerprint(
    request: SwarmRequest, model: str | None, invite: Invite | None, known: RememberedSwarm | None
) -> str | None:
    """How the model's begins: an invite's, or the remembered swarm's where nobody named another model."""
    if invite is not None and model is not None and model == invite.model and invite.fingerprint is not None:
        return invite.fingerprint
    if request.model is None and known is not None and model == known.model:
        return known.fingerprint
    return None


def _note(invite: Invite | None, named: int, known: RememberedSwarm | None, tried: int) -> str:
    """Which swarm it is, and how many addresses are tried: those that were named, and those remembered beside them."""
    beside = f", and {tried - named} remembered" if named and tried > named else ""
    if invite is not None:
        return f"invited by {invite.inviter_name}: {_counted(named)}{beside}"
    if known is None:
        return ""
    if not tried:
        return "the swarm joined last has no other peer that is known: it begins here again"
    if named:
        return f"a swarm that was joined before: {_counted(named)}{beside}" if beside else ""
    return f"the swarm joined last, {_counted(tried)} known"


def _with_password(broker: str | None, known: RememberedSwarm | None) -> str | None:
    """An invite's broker; with the password that is known of it, where it stands in the invite without one."""
    if broker is None or known is None or known.broker is None or _place(broker) != _place(known.broker):
        return broker
    return broker if urlsplit(broker).password else known.broker


def _place(broker: str) -> str:
    """A broker without user and password."""
    return urlsplit(broker).netloc.rpartition("@")[2].lower()


def _far_first(addresses: Iterable[str]) -> list[str]:
    """Loopback addresses last, and none of a peer that has others."""
    known = list(addresses)
    far = {peer_of(one) for one in known if not _is_near(one)}
    return sorted((one for one in known if not _is_near(one) or peer_of(one) not in far), key=_is_near)


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
