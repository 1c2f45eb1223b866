"""The swarm's side: its peers, its clock, its release. Everything is read from one look, `SwarmView`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, Final

from swarm.discovery.dht.about import UPDATE_HERE, UPDATE_THERE, disagreement
from swarm.doctor.diagnosis import Diagnosis, hint, ok, trouble
from swarm.doctor.processes import run_program
from swarm.doctor.swarm_view import JoinState, SwarmView
from swarm.runtime.version import UPDATE, VERSION

MAX_CLOCK_S: Final = 3.0
"""What hivemind allows between two machines."""
CLOSE_CLOCK_S: Final = 1.0
STRANGER: Final = "private swarm"
"""What a peer of a private swarm says to whom has not its key (`swarm.discovery.dht.admission`)."""
LAST_WITHOUT_ABOUT: Final = "0.2.0"
"""The last release whose peers say nothing of themselves."""

AskSwarm = Callable[[], Awaitable[SwarmView | None]]


@dataclass(frozen=True, slots=True)
class ClockService:
    """What keeps this machine's clock right.

    Attributes:
        is_active: whether a time service is switched on; None if unknown.
        is_synchronized: whether it has set the clock; None if unknown.
    """

    is_active: bool | None = None
    is_synchronized: bool | None = None


@dataclass(frozen=True, slots=True)
class DhtCheck:
    """Whether the named peers let this machine in.

    Attributes:
        view: the look.
        refusal: why it is not clear which swarm is meant, such as an invite that has run out; empty if it is.
    """

    name: ClassVar[str] = "directory"
    view: AskSwarm
    refusal: str = ""

    async def look(self) -> Sequence[Diagnosis]:
        """Those that do not answer; then the directory as a whole."""
        if self.refusal:
            return [
                trouble(
                    "swarm-unclear",
                    self.refusal,
                    "get a new invite: whoever is in the swarm makes it by `swarm invite`",
                )
            ]
        view = await self.view()
        if view is None:
            return [hint("no-swarm", "no swarm was named, so none was looked at", "swarm doctor --join PEER")]
        found = [said for number, state in enumerate(view.joined, 1) if (said := self._one(number, state, view))]
        if JoinState.ANSWERS not in view.joined:
            return found
        if STRANGER in view.error:
            mend = "get an invite (`swarm invite`) and give it to --join, or --network-key FILE"
            return [*found, trouble("private-swarm", "the swarm is private, and this machine has not its key", mend)]
        if view.error and not view.ahead_s and not _refuses_release(view):
            return [
                *found,
                trouble(
                    "not-joined",
                    f"the directory cannot be joined: {view.error}",
                    "swarm doctor --verbose once more; then ask whoever runs the swarm",
                ),
            ]
        answered = sum(survey.ahead_s is not None for survey in view.surveys)
        if not view.error:
            found.append(ok("directory", f"joined; {answered} of {len(view.surveys)} peers that were asked answer"))
        return found or [ok("directory-reached", "its peers answer")]

    def _one(self, number: int, state: JoinState, view: SwarmView) -> Diagnosis | None:
        which = f"--join {number} of {len(view.joined)}"
        is_alone = JoinState.ANSWERS not in view.joined
        level = trouble if is_alone else hint
        match state:
            case JoinState.ANSWERS:
                return None
            case JoinState.MALFORMED:
                text = f"{which} is no peer address; it looks like /ip4/203.0.113.5/tcp/31337/p2p/Qm…"
                return level("peer-malformed", text, "copy the line that `swarm bootstrap` or `node serve` printed")
            case JoinState.NO_NAME:
                return level(
                    "peer-unnamed", f"{which}: its name is not found", "check the name, or ask for an IP address"
                )
            case JoinState.OTHER:
                text = f"{which}: something answers there that is no peer of a swarm"
                return level("peer-other", text, "check the port; /tcp/ in it is the directory's, not the node's")
            case JoinState.SILENT:
                mend = "ask for the swarm's present peers; or let outgoing TCP through your firewall"
                return level("peer-silent", f"{which} does not answer", mend if is_alone else "leave it out")


@dataclass(frozen=True, slots=True)
class ClockCheck:
    """This machine's clock against the swarm's, and what keeps it right.

    Attributes:
        view: the look.
        service: what the system says.
    """

    name: ClassVar[str] = "clock"
    view: AskSwarm
    service: Callable[[], Awaitable[ClockService]]

    async def look(self) -> Sequence[Diagnosis]:
        """The difference first."""
        service, view = await self.service(), await self.view()
        ahead = view.ahead_s if view is not None else []
        if ahead and abs(median(ahead)) > CLOSE_CLOCK_S:
            return [self._differs(median(ahead), service)]
        if service.is_active is False:
            text = "no time service is switched on: the clock will drift, and the swarm refuses 3 s"
            return [hint("clock-untended", text, "sudo timedatectl set-ntp true")]
        if service.is_synchronized is False:
            text = "the time service has not set the clock yet"
            return [hint("clock-unset", text, "timedatectl timesync-status says which server it waits for")]
        if not ahead:
            return [
                ok(
                    "clock-untried",
                    "its service is on; there was no peer to compare with"
                    if service.is_active
                    else "there was no peer to compare with",
                )
            ]
        return [ok("clock", f"{abs(median(ahead)):.1f} s from the swarm's")]

    def _differs(self, ahead_s: float, service: ClockService) -> Diagnosis:
        text = f"{abs(ahead_s):.1f} s {'behind' if ahead_s > 0 else 'ahead of'} the swarm's"
        mend = "sudo timedatectl set-ntp true"
        if service.is_active:
            mend = "sudo systemctl restart systemd-timesyncd, or the time service that you use"
        if abs(ahead_s) > MAX_CLOCK_S:
            return trouble("clock-wrong", f"{text}: more than {MAX_CLOCK_S:.0f} s is refused", mend)
        return hint("clock-off", f"{text}: {MAX_CLOCK_S:.0f} s is the most that is taken", mend)


@dataclass(frozen=True, slots=True)
class ReleaseCheck:
    """Whether the swarm's programs and this one understand each other, and which side to update.

    Attributes:
        view: the look.
    """

    name: ClassVar[str] = "release"
    view: AskSwarm

    async def look(self) -> Sequence[Diagnosis]:
        """The formats of those peers that say theirs."""
        view = await self.view()
        if view is not None and _refuses_release(view):
            return [_other_release(view.error, is_alone=True)]
        if view is None or not any(survey.ahead_s is not None for survey in view.surveys):
            return [ok("release-untried", f"{VERSION} here; there was no peer to compare with")]
        others = [said for about in view.abouts if (said := disagreement(about)) is not None]
        if others:
            return [_other_release(others[0], is_alone=len(others) == len(view.abouts))]
        if silent := sum(survey.ahead_s is not None and survey.about is None for survey in view.surveys):
            says = "1 peer says nothing of itself" if silent == 1 else f"{silent} peers say nothing of themselves"
            text = f"{says}: {LAST_WITHOUT_ABOUT} or older"
            return [hint("old-peers", text, f"ask whoever runs them to update to {VERSION}")]
        releases = sorted({about.release for about in view.abouts} | view.versions)
        return [ok("release", f"{VERSION} here; there: {', '.join(releases)}; they understand each other")]


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
