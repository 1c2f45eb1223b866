"""`swarm invite`, `swarm list`, `swarm forget`: an invite to pass on, and the swarms that this machine knows.

An invite goes to standard output, alone on its line; a picture of it and what it is for only to a terminal.
"""

from __future__ import annotations

import asyncio
import io
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path, PurePath
from typing import Annotated, Final
from urllib.parse import urlsplit, urlunsplit

import segno
import tyro
from rich.console import Console
from rich.text import Text

from swarm.base.cli_types import Count, File, Model, Name, Peer, Url, headed
from swarm.base.errors import ConfigError
from swarm.base.ids import is_model_name, shown_swarm, without_ending
from swarm.directory.dht.addresses import Membership, family_of
from swarm.directory.dialable import is_public
from swarm.directory.identity import Identity, default_identity_path, forget_swarm
from swarm.directory.joining.invite import MAX_DAYS, Invite, inviter_name, is_invite, open_invite, seal_invite
from swarm.directory.joining.remembered import RememberedSwarm, SwarmMemory, peer_of
from swarm.directory.joining.resolve import SwarmChoice, SwarmFinder, SwarmRequest
from swarm.directory.peer_proof import proven as prove
from swarm.link.egress.ports import tls_port
from swarm.link.network_key import NetworkKey

PEERS_INVITED: Final = 4
"""Addresses that stand in an invite; more make its picture too fine to scan."""
PORTS_INVITED: Final = 1
"""Addresses of TLS ports beside them, for networks that let nothing else out."""
_DAY_S: Final = 86_400
_QUIET: Final = (4, 2)
"""Modules of white around a QR code: as its standard asks, and as scanners need."""


@headed(
    swarm=("join", "network_key", "private"),
    invite=("model", "days", "mqtt", "with_password", "identity"),
    output=("qr",),
)
@dataclass(frozen=True, slots=True)
class MakeInvite:
    """Print an invite: one word with which other machines join this swarm, and a QR code of it.

    Attributes:
        join: multiaddress of a peer of the swarm, or an invite to it (also without --join); may be repeated (default:
            the swarm that this machine joined last, or runs a peer of).
        model: hub id or folder of the model that it is for (default: the one that was served or used there).
        days: for how many days it is good.
        mqtt: broker to which nodes are to publish, without its password (default: the swarm's).
        with_password: whether the broker's password stands in the invite too.
        network_key: file of the private swarm's key (default: the swarm's, if it is private).
        private: make the key of a new private swarm, in the file --network-key (default: network.key beside the
            machine's identity); with --join, invite to it at once.
        identity: file of the identity that signs (default: the machine's).
        qr: draw a QR code, if the output is a terminal that is wide enough.
    """

    join: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    model: Model | None = None
    days: Count = 30
    mqtt: Url | None = None
    with_password: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    network_key: File | None = None
    private: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    identity: File | None = None
    qr: bool = True


@dataclass(frozen=True, slots=True)
class ListSwarms:
    """Print the swarms that this machine joined; commands mean the first one, unless they name another."""


@dataclass(frozen=True, slots=True)
class ForgetSwarm:
    """Forget a swarm that this machine joined, and the key of a private one.

    Attributes:
        which: its number, as `swarm list` prints it, an invite to it, or all (default: the only one).
    """

    which: tyro.conf.Positional[Name | None] = None


def invite(command: MakeInvite, memory: SwarmMemory, environment: Mapping[str, str], console: Console) -> None:
    """Make an invite and print it.

    Raises:
        ConfigError: there is no swarm to invite to, or an option is wrong.
    """
    if not 1 <= command.days <= MAX_DAYS:
        raise ConfigError(f"--days {command.days}: an invite is good for 1 to {MAX_DAYS} days")
    key_path = _made_key(command) if command.private else command.network_key
    if command.private and not command.join:
        console.print(Text(f"network key made: {key_path}; begin the private swarm with it, then invite:"))
        console.print(Text(f"  swarm bootstrap --network-key {shlex.quote(str(key_path))}\n  swarm invite"))
        return
    finder = SwarmFinder(memory, environment)
    choice = finder.find(SwarmRequest(command.join, command.model, command.mqtt, key_path))
    if not choice.join:
        raise ConfigError("an invite to which swarm? start or join one, or give a peer's address with --join")
    now = memory.clock()
    own = {one for swarm in memory.swarms() for one in swarm.here}
    proven = _proven(choice.join, own)
    said = Invite(
        peers=_chosen(proven or choice.join),
        expires_at=int(now) + command.days * _DAY_S,
        model=_named(choice.model),
        fingerprint=choice.fingerprint or _known_fingerprint(choice, memory),
        broker=choice.mqtt if command.with_password or choice.mqtt is None else without_password(choice.mqtt),
        network=choice.membership.network,
        swarm=choice.membership.swarm,
    )
    word = seal_invite(said, Identity.load_or_create(command.identity or default_identity_path()))
    console.print(Text(word))
    if console.is_terminal:
        _explain(open_invite(word, now), choice, console)
        if not proven:
            console.print(Text("none of its peers answers at the moment: whoever is invited may find nobody"))
        if command.qr:
            _draw(word, console)


def _made_key(command: MakeInvite) -> Path:
    """The file of a new network key."""
    path = command.network_key or default_identity_path().with_name("network.key")
    if path.exists():
        raise ConfigError(f"--private makes a key, and {path} is there: leave --private out, or name another file")
    NetworkKey.fresh().save(path)
    return path


def _proven(join: Sequence[str], own: Collection[str]) -> list[str]:
    """The addresses at which their peers answer now; this machine's own, which others have proven, as they are."""
    verdicts = asyncio.run(prove([one for one in join if one not in own]))
    return [one for one in join if one in own or verdicts.get(one, True) is not False]


def _chosen(join: Sequence[str]) -> tuple[str, ...]:
    """The addresses that are worth their room: of each peer the best one of each family, peers of everywhere first."""
    best: dict[tuple[str, int | None], str] = {}
    plain = (address for address in join if tls_port(address) is None)
    for address in sorted(plain, key=_farness):  # stable: of equals those met last come first
        best.setdefault((peer_of(address), family_of(address)), address)
    nearest = {peer: min(_farness(one) for one in best.values() if peer_of(one) == peer) for peer, _ in best}
    order = list(nearest)
    ordered = sorted(best.values(), key=lambda one: (nearest[peer_of(one)], order.index(peer_of(one)), _farness(one)))
    useful = [address for address in ordered if _farness(address) < _HERE]
    ports = [address for address in sorted(join, key=_farness) if tls_port(address) is not None]
    return (*(useful or ordered)[:PEERS_INVITED], *ports[:PORTS_INVITED])


_EVERYWHERE, _NEAR, _HERE = 0, 1, 2


def _farness(address: str) -> int:
    """From where an address can be reached: everywhere, this network, this machine."""
    _, kind, host, *_ = address.split("/")
    if kind not in ("ip4", "ip6"):
        return _EVERYWHERE
    ip = ip_address(host)
    return _EVERYWHERE if is_public(ip) else _HERE if ip.is_loopback else _NEAR


def _known_fingerprint(choice: SwarmChoice, memory: SwarmMemory) -> str | None:
    """Of the model in the remembered swarm with these peers."""
    peers = set(map(peer_of, choice.join))
    same = (one for one in memory.swarms() if (one.peer_ids | one.own_ids) & peers and one.model == choice.model)
    return next((one.fingerprint for one in same if one.fingerprint), None)


def _named(model: str | None) -> str | None:
    """A model as others call it: a folder or a file by its name alone."""
    if model is None:
        return None
    name = without_ending(PurePath(model).name) if Path(model).is_absolute() else model
    return name if is_model_name(name) else None


def without_password(url: str) -> str:
    """A broker's URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _explain(said: Invite, choice: SwarmChoice, console: Console) -> None:
    model = said.model or "whatever model is served"
    peers = f"{len(said.peers)} {'peer' if len(said.peers) == 1 else 'peers'}"
    until = time.strftime("%Y-%m-%d", time.localtime(said.expires_at))
    lines = [f"for {model}, through {peers}; good until {until}; signed {inviter_name(said.inviter)}"]
    if said.network is not None:
        lines.append("the swarm is private: whoever has this word is a member, so pass it on as a password")
    if said.broker is not None and choice.mqtt != said.broker:
        lines.append("the broker's password is not in it (--with-password)")
    if choice.model is not None and Path(choice.model).is_absolute():
        kind = "file" if Path(choice.model).is_file() else "folder"
        lines.append(f"{said.model} is a {kind} here: whoever joins needs a copy, and names it as MODEL")
    families = {family_of(peer) for peer in said.peers}
    if len(families) == 1 and None not in families:
        lines.append(f"its peers are reached by IPv{families.pop()} alone, so a machine without it cannot join with it")
    if all(_farness(peer) == _HERE for peer in said.peers):
        lines.append("its peers listen on this machine only: nobody elsewhere can join with it")
    lines += ["on another machine, in place of MODEL or after --join:", "  node serve INVITE", "  client chat INVITE"]
    for line in lines:
        console.print(Text(line))


def _draw(word: str, console: Console) -> None:
    """A QR code in half blocks, white on black whatever the terminal's colours are."""
    code = segno.make(word, error="l", micro=False)
    widths = {quiet: code.symbol_size(border=quiet)[0] for quiet in _QUIET}
    quiet = next((quiet for quiet in _QUIET if widths[quiet] <= console.width), None)
    if quiet is None:
        console.print(Text(f"a QR code of it needs a terminal of {widths[_QUIET[-1]]} columns"))
        return
    for line in qr_lines(code, quiet):
        console.print(Text(line, style="#ffffff on #000000"))


def qr_lines(code: segno.QRCode, quiet: int) -> list[str]:
    """A QR code as lines of half blocks, its light modules drawn."""
    drawn = io.StringIO()
    code.terminal(drawn, border=quiet, compact=True)
    return drawn.getvalue().splitlines()


def list_swarms(memory: SwarmMemory, console: Console) -> None:
    swarms = memory.swarms()
    if not swarms:
        console.print(Text("no swarm was joined yet: use an invite, or --join"))
    for number, swarm in enumerate(swarms, start=1):
        console.print(Text(f"{number}  {_described(swarm)}"))


def forget(command: ForgetSwarm, memory: SwarmMemory, console: Console) -> None:
    """Forget swarms.

    Raises:
        ConfigError: which, is not clear, or the file cannot be written.
    """
    swarms = memory.swarms()
    if command.which == "all" or (command.which is None and len(swarms) <= 1):
        chosen = swarms
    else:
        chosen = _meant(command.which, swarms)
        if not chosen:
            raise ConfigError(f"forget which? give 1 … {len(swarms)}, as `swarm list` numbers them, an invite, or all")
    if chosen:
        memory.forget(chosen)
        for identity in default_identity_path().parent.glob("*.key"):
            for swarm in chosen:
                if swarm.swarm_id is not None:
                    forget_swarm(identity, swarm.swarm_id)
    for swarm in chosen:
        console.print(Text(f"forgotten: {_described(swarm)}"))
    if not chosen:
        console.print(Text("no swarm is remembered"))


def _meant(which: str | None, swarms: Sequence[RememberedSwarm]) -> list[RememberedSwarm]:
    """The swarm of this number, or that of an invite, which may have expired; without an id those of its peers."""
    if which is not None and is_invite(which):
        invite = open_invite(which, 0.0)
        peers = set(map(peer_of, invite.peers))
        named = [swarm for swarm in swarms if swarm.swarm_id is not None and swarm.swarm_id == invite.swarm]
        return named or [swarm for swarm in swarms if swarm.peer_ids & peers]
    return [swarm for number, swarm in enumerate(swarms, start=1) if str(number) == which]


def _described(swarm: RememberedSwarm) -> str:
    peers = f"{len(swarm.peer_ids)} {'peer' if len(swarm.peer_ids) == 1 else 'peers'}"
    named = f"{peers}, such as {swarm.peers[0]}" if swarm.peers else "no other peer"
    which = "open" if swarm.swarm_id is None else shown_swarm(swarm.swarm_id)
    kind = which if swarm.network is None else f"private {swarm.network}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(swarm.joined_at))
    return f"{swarm.model or 'no model named'} · {named} · {kind} · joined {when}"


def bootstrap_membership(
    join: Sequence[str], network_key: Path | None, memory: SwarmMemory
) -> tuple[tuple[str, ...], Membership]:
    """The addresses that a bootstrap peer joins, and its membership: it joins nothing that it is not told to.

    Args:
        network_key: file of a private swarm's key; made if missing.
        memory: takes this peer's address, so that programs of this machine find it.

    Raises:
        ConfigError: as `SwarmFinder.find`.
    """
    if network_key is not None and not network_key.exists():
        NetworkKey.fresh().save(network_key)
    finder = SwarmFinder(memory, {})
    choice = finder.find(SwarmRequest(tuple(join), network_key=network_key, is_new=not join))
    return choice.join, replace(choice.membership, nobody="", is_new=False)
