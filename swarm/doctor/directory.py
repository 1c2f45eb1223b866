"""The swarm's side: its clock, its peers, its release. All is read from one look, `SwarmView`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

from swarm.base.errors import SwarmError
from swarm.base.ids import PeerId
from swarm.base.version import UPDATE, VERSION
from swarm.directory.dht.about import UPDATE_HERE, UPDATE_THERE, About, disagreement
from swarm.directory.dht.addresses import OPEN_SWARM, SLOW, DhtConfig, Membership
from swarm.directory.dht.registry import NO_ANSWER, DhtRegistry, PeerSurvey
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord
from swarm.doctor.ladder import Diagnoses, Diagnosis, hint, ok, trouble, unknown
from swarm.doctor.network import NamedPeer, Outside
from swarm.doctor.probes import TcpAnswer, run_program

MAX_CLOCK_S: Final = 3.0
"""What hivemind allows between two machines."""
CLOSE_CLOCK_S: Final = 1.0
STRANGER: Final = "private swarm"
"""What a peer of a private swarm says to whom has not its key (`swarm.directory.dht.admission`)."""
LAST_WITHOUT_ABOUT: Final = "0.2.0"
"""The last release whose peers say nothing of themselves."""
_ASK: Final = "ask for the swarm's present peers, or a new invite (`swarm invite`)"


@dataclass(frozen=True, slots=True)
class ClockService:
    """What keeps this machine's clock right.

    Attributes:
        is_active: whether a time service is switched on; None if unknown.
        is_synchronized: whether it has set the clock; None if unknown.
    """

    is_active: bool | None = None
    is_synchronized: bool | None = None


def look_at_peers(peers: Sequence[NamedPeer], outside: Outside, refusal: str) -> Diagnoses:
    """Whether any of the peers that are meant answers as one."""
    if refusal:
        return trouble("swarm-unclear", refusal, "get a new invite: whoever is in the swarm makes it by `swarm invite`")
    if not peers:
        return hint("no-swarm", "no swarm was named, so none was looked at", "swarm doctor INVITE, or --join PEER")
    if outside.best is TcpAnswer.MUTE:
        return unknown(
            f"{peers[outside.peers.index(TcpAnswer.MUTE)].origin} accepts connections and says nothing in time"
        )
    told = [said for one, answer in zip(peers, outside.peers, strict=True) if (said := _of_peer(one, answer))]
    if outside.best is TcpAnswer.PEER:
        answering = sum(answer is TcpAnswer.PEER for answer in outside.peers)
        found = ok("peers", f"{answering} of {len(peers)} peers answer")
        return [*(hint(kind, text, "nothing, as others answer; or leave it out") for kind, text, _ in told), found]
    return [trouble(*one) for one in told]


def _of_peer(peer: NamedPeer, answer: TcpAnswer | None) -> tuple[str, str, str] | None:
    """Kind, text and mend for a peer that is none."""
    if not peer.host:
        text = f"{peer.origin} is no peer address; it looks like /ip4/203.0.113.5/tcp/31337/p2p/Qm…"
        return "peer-malformed", text, "copy the line that `swarm bootstrap` or `node serve` printed"
    match answer:
        case None:
            return "peer-unnamed", f"{peer.origin}: its name is not found", "check the name, or ask for an IP address"
        case TcpAnswer.NO_WAY | TcpAnswer.SILENT:
            return "peer-silent", f"{peer.origin} does not answer: that machine is off, or behind a firewall", _ASK
        case TcpAnswer.REFUSED:
            return (
                "peer-gone",
                f"{peer.origin}: the machine is there, and no program of a swarm runs at that port",
                _ASK,
            )
        case TcpAnswer.OPEN:
            text = f"{peer.origin}: something answers there that is no peer of a swarm"
            return "peer-other", text, "check the port; /tcp/ in it is the directory's, not the node's"
        case _:
            return None


def look_at_clock(view: SwarmView, service: ClockService) -> Diagnosis:
    """This machine's clock against the swarm's, then what keeps it right."""
    ahead = view.ahead_s
    if ahead and abs(median(ahead)) > CLOSE_CLOCK_S:
        return _differs(median(ahead), service)
    if service.is_active is False:
        text = "no time service is switched on: the clock will drift, and the swarm refuses 3 s"
        return hint("clock-untended", text, "sudo timedatectl set-ntp true")
    if service.is_synchronized is False:
        text = "the time service has not set the clock yet"
        return hint("clock-unset", text, "timedatectl timesync-status says which server it waits for")
    if not ahead:
        return ok("clock-untried", "there was no peer to compare with")
    return ok("clock", f"{abs(median(ahead)):.1f} s from the swarm's")


def _differs(ahead_s: float, service: ClockService) -> Diagnosis:
    text = f"{abs(ahead_s):.1f} s {'behind' if ahead_s > 0 else 'ahead of'} the swarm's"
    mend = "sudo timedatectl set-ntp true"
    if service.is_active:
        mend = "sudo systemctl restart systemd-timesyncd, or the time service that you use"
    if abs(ahead_s) > MAX_CLOCK_S:
        return trouble("clock-wrong", f"{text}: more than {MAX_CLOCK_S:.0f} s is refused", mend)
    return hint("clock-off", f"{text}: {MAX_CLOCK_S:.0f} s is the most that is taken", mend)


def look_at_directory(view: SwarmView) -> Diagnosis:
    """Whether the directory lets this machine in."""
    if STRANGER in view.error:
        mend = "get an invite (`swarm invite`) and give it to --join, or --network-key FILE"
        return trouble("private-swarm", "the swarm is private, and this machine has not its key", mend)
    if view.is_late:
        return unknown(view.error)
    if _refuses_release(view):
        return ok("directory-reached", "its peers answer, and refuse this release")
    if view.error:
        mend = "swarm doctor --verbose once more; then ask whoever runs the swarm"
        return trouble("not-joined", f"the directory cannot be joined: {view.error}", mend)
    if not view.surveys:
        return ok("directory-untried", "no swarm was named")
    return ok("directory", f"joined; {view.answering} of {len(view.surveys)} peers that were asked answer")


def look_at_release(view: SwarmView) -> Diagnosis:
    """Whether the swarm's programs and this one understand each other, and which side to update."""
    if _refuses_release(view):
        return _other_release(view.error, is_alone=True)
    if not view.answering:
        return ok("release-untried", f"{VERSION} here; there was no peer to compare with")
    others = [said for about in view.abouts if (said := disagreement(about)) is not None]
    if others:
        return _other_release(others[0], is_alone=len(others) == len(view.abouts))
    if silent := sum(survey.ahead_s is not None and survey.about is None for survey in view.surveys):
        says = "1 peer says nothing of itself" if silent == 1 else f"{silent} peers say nothing of themselves"
        return hint(
            "old-peers", f"{says}: {LAST_WITHOUT_ABOUT} or older", f"ask whoever runs them to update to {VERSION}"
        )
    releases = sorted({about.release for about in view.abouts} | view.versions)
    return ok("release", f"{VERSION} here; there: {', '.join(releases)}; they understand each other")


def _refuses_release(view: SwarmView) -> bool:
    return UPDATE_HERE in view.error or UPDATE_THERE in view.error


def _other_release(said: str, *, is_alone: bool) -> Diagnosis:
    """A disagreement; where others of the swarm understand this program, it is no more than a hint."""
    level = trouble if is_alone else hint
    if UPDATE_HERE in said:
        return level("update-this-machine", said.partition(f": {UPDATE_HERE}")[0], UPDATE)
    text = said.partition(f": {UPDATE_THERE}")[0]
    return level("update-the-others", text, f"ask whoever runs its machines to update to {VERSION}")


async def clock_service() -> ClockService:
    """What systemd says about this machine's clock; nothing where there is no systemd."""
    ran = await run_program(["timedatectl", "show", "-p", "NTP", "-p", "NTPSynchronized"])
    if ran is None or ran.status != 0:
        return ClockService()
    said = dict(line.split("=", 1) for line in ran.output.splitlines() if "=" in line)
    return ClockService(
        None if "NTP" not in said else said["NTP"] == "yes",
        None if "NTPSynchronized" not in said else said["NTPSynchronized"] == "yes",
    )


JOIN_S: Final = 8.0
ASK_S: Final = 4.0
MODELS_READ: Final = 8
_LATE: Final = re.compile(rf"{SLOW}|{NO_ANSWER}|.*\(waited \d+ s\)")
"""Errors that say no more than that time ran out."""
_CLOCKS: Final = re.compile(r"local: (\d+\.\d+), peer: (\d+\.\d+)")
"""What hivemind says where clocks differ too much."""


@dataclass(frozen=True, slots=True)
class SwarmView:
    """A swarm as this machine sees it.

    Attributes:
        error: why the directory cannot be joined, or was not read; empty if it was.
        is_late: whether that is no more than a time-out.
        surveys: what peers say.
        relays: `host:port` of each relay that is lent.
        numeric_classes: of the nodes that serve, such as `cpu-float32`.
        versions: releases of those nodes.
        own_record: what is listed under this machine's identity.
    """

    error: str = ""
    is_late: bool = False
    surveys: tuple[PeerSurvey, ...] = ()
    relays: tuple[str, ...] = ()
    numeric_classes: frozenset[str] = frozenset()
    versions: frozenset[str] = frozenset()
    own_record: NodeRecord | None = None

    @property
    def abouts(self) -> list[About]:
        """What those peers say of themselves who can."""
        return [survey.about for survey in self.surveys if survey.about is not None]

    @property
    def answering(self) -> int:
        """How many of the peers that were asked answer."""
        return sum(survey.ahead_s is not None for survey in self.surveys)

    @property
    def ahead_s(self) -> list[float]:
        """Seconds by which the peers' clocks are ahead of this machine's, sorted."""
        clocks = _CLOCKS.search(self.error)
        if clocks is not None:
            return [float(clocks[2]) - float(clocks[1])]
        return sorted(survey.ahead_s for survey in self.surveys if survey.ahead_s is not None)


async def look_at_swarm(join: Sequence[str], identity: Path, membership: Membership = OPEN_SWARM) -> SwarmView:
    """Look at the swarm that these peers are of."""
    view = SwarmView()
    if not join:
        return view
    registry = DhtRegistry.open(DhtConfig(join=tuple(join), client_mode=True, membership=membership))
    try:
        async with asyncio.timeout(JOIN_S):
            await registry
    except TimeoutError:
        return replace(view, error=f"it was not joined within {JOIN_S:.0f} s", is_late=True)
    except SwarmError as error:
        return replace(view, error=str(error), is_late=_LATE.match(str(error)) is not None)
    try:
        async with asyncio.timeout(ASK_S):
            return await _ask(registry, view, own_peer(identity))
    except (TimeoutError, SwarmError) as error:
        return replace(view, error=str(error) or f"it did not answer within {ASK_S:.0f} s", is_late=True)
    finally:
        await registry.aclose()


async def _ask(registry: DhtRegistry, view: SwarmView, own: PeerId | None) -> SwarmView:
    async with asyncio.TaskGroup() as group:
        surveys, relays = group.create_task(registry.survey()), group.create_task(registry.relays())
        records = group.create_task(_records(registry))
        mine = group.create_task(_record_of(registry, own))
    serving = records.result()
    return replace(
        view,
        surveys=tuple(surveys.result()),
        relays=tuple(offer.address for offer in relays.result()),
        numeric_classes=frozenset(record.numeric_class for record in serving),
        versions=frozenset(record.version for record in serving),
        own_record=mine.result(),
    )


async def _record_of(registry: DhtRegistry, own: PeerId | None) -> NodeRecord | None:
    return None if own is None else await registry.record_of(own)


async def _records(registry: DhtRegistry) -> list[NodeRecord]:
    models = (await registry.models())[:MODELS_READ]
    found = await asyncio.gather(*(registry.records(model.fingerprint, model.num_layers) for model in models))
    return [record for records in found for record in records]


def own_peer(identity: Path) -> PeerId | None:
    """The peer id of the key in an identity file; None if there is no file, or it cannot be read."""
    try:
        own = Identity.load(identity)
    except SwarmError:
        return None
    return None if own is None else own.peer_id
