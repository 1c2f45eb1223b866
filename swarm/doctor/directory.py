"""The swarm's side: its clock, its peers, its release. All is read from one look, `SwarmView`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from swarm.discovery.dht.about import UPDATE_HERE, UPDATE_THERE, disagreement
from swarm.doctor.ladder import Diagnoses, Diagnosis, hint, ok, trouble, unknown
from swarm.doctor.network import NamedPeer, Outside
from swarm.doctor.probes import TcpAnswer
from swarm.doctor.processes import run_program
from swarm.doctor.swarm_view import SwarmView
from swarm.runtime.version import UPDATE, VERSION

MAX_CLOCK_S: Final = 3.0
"""What hivemind allows between two machines."""
CLOSE_CLOCK_S: Final = 1.0
STRANGER: Final = "private swarm"
"""What a peer of a private swarm says to whom has not its key (`swarm.discovery.dht.admission`)."""
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
    """Whether any of the peers that are meant answers as one.

    Args:
        peers: those that are meant.
        outside: what they answered, in the same order.
        refusal: why it is not clear which swarm is meant, such as an invite that has run out; empty if it is.
    """
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
