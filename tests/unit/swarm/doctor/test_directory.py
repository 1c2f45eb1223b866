"""Troubles of the swarm's side, each planted in what one look at it saw: silent peers, clocks, releases."""

from __future__ import annotations

import msgpack
import pytest

from swarm.base.ids import PeerId
from swarm.directory.dht.about import OURS, About, disagreement, pack_about, parse_about
from swarm.directory.dht.registry import PeerSurvey
from swarm.doctor.directory import (
    ClockService,
    SwarmView,
    look_at_clock,
    look_at_directory,
    look_at_peers,
    look_at_release,
)
from swarm.doctor.ladder import Diagnoses, Diagnosis, Level
from swarm.doctor.network import NamedPeer, Outside
from swarm.doctor.probes import TcpAnswer
from tests.one_diagnosis import assert_hint, assert_ok, assert_trouble, assert_unknown

REFUSED_CLOCK = (
    "this machine's clock differs by more than 3 s from the swarm's: set it (NTP) and try again (ValidationError("
    "'local time must be within 3 seconds  of others(local: 1790000000.25000, peer: 1790000040.50000)'))"
)


def survey(ahead_s: float | None = 0.01, about: About | None = OURS) -> PeerSurvey:
    return PeerSurvey(PeerId("Qm"), ahead_s, about)


def look(*surveys: PeerSurvey, error: str = "", is_late: bool = False) -> SwarmView:
    return SwarmView(error, is_late, surveys)


ONE, TWO = (NamedPeer(f"/ip4/192.0.2.{n}/tcp/1/p2p/Qm", f"--join ({n} of 2)", f"192.0.2.{n}", 1) for n in (1, 2))


def peers(*answers: TcpAnswer | None, refusal: str = "", meant: tuple[NamedPeer, ...] = (ONE, TWO)) -> Diagnoses:
    return look_at_peers(meant[: len(answers)], Outside(answers), refusal)


@pytest.mark.parametrize(
    ("answer", "kind", "text", "mend"),
    [
        (TcpAnswer.SILENT, "peer-silent", "--join (1 of 2) does not answer", "present peers"),
        (TcpAnswer.NO_WAY, "peer-silent", "--join (1 of 2) does not answer", "present peers"),
        (TcpAnswer.REFUSED, "peer-gone", "the machine is there", "present peers"),
        (TcpAnswer.OPEN, "peer-other", "no peer of a swarm", "check the port"),
        (None, "peer-unnamed", "its name is not found", "check the name"),
    ],
)
async def test_a_peer_that_does_not_answer(answer: TcpAnswer | None, kind: str, text: str, mend: str) -> None:
    await assert_trouble(peers(answer), kind, text, mend)
    malformed = NamedPeer("rubbish", "CANOPY_JOIN")
    found = peers(None, meant=(malformed,))
    await assert_trouble(found, "peer-malformed", "CANOPY_JOIN is no peer address", "`swarm bootstrap`")


async def test_one_of_two_peers_that_does_not_answer_is_no_more_than_a_hint() -> None:
    found = peers(TcpAnswer.PEER, TcpAnswer.SILENT)
    assert isinstance(found, list)
    assert [(one.level, one.kind) for one in found] == [(Level.HINT, "peer-silent"), (Level.OK, "peers")]
    assert found[1].text == "1 of 2 peers answer"


async def test_silence_after_a_connection_is_no_verdict() -> None:
    await assert_unknown(
        peers(TcpAnswer.SILENT, TcpAnswer.MUTE), "--join (2 of 2) accepts connections and says nothing"
    )
    await assert_unknown(look_at_directory(look(error="it was not joined within 8 s", is_late=True)), "within 8 s")


async def test_a_directory_that_cannot_be_joined_or_was_not_named() -> None:
    refused = look_at_directory(look(error="the p2p daemon did not start: x"))
    await assert_trouble(refused, "not-joined", "the p2p daemon did not start", "ask whoever runs")
    await assert_hint(look_at_peers((), Outside(), ""), "no-swarm", "no swarm was named", "swarm doctor INVITE")
    await assert_ok(look_at_directory(look()), "directory-untried")
    await assert_ok(look_at_directory(look(survey(), survey(None))), "directory")


def clock(view: SwarmView | None, *, is_active: bool | None = None, is_set: bool | None = None) -> Diagnosis:
    return look_at_clock(view or SwarmView(), ClockService(is_active, is_set))


async def test_a_wrong_clock() -> None:
    late = look(survey(39.0), survey(40.0), survey(900.0))
    await assert_trouble(clock(late), "clock-wrong", "40.0 s behind the swarm's", "sudo timedatectl set-ntp true")
    early = look(survey(-7.0))
    mend = "sudo systemctl restart systemd-timesyncd"
    await assert_trouble(clock(early, is_active=True), "clock-wrong", "7.0 s ahead of the swarm's", mend)
    refused = look(error=REFUSED_CLOCK)
    await assert_trouble(clock(refused), "clock-wrong", "40.2 s behind the swarm's", "sudo timedatectl set-ntp true")
    await assert_hint(clock(look(survey(2.0))), "clock-off", "2.0 s behind", "timedatectl")


async def test_a_clock_that_nothing_keeps_right() -> None:
    good = look(survey())
    await assert_hint(
        clock(good, is_active=False), "clock-untended", "no time service", "sudo timedatectl set-ntp true"
    )
    waiting = clock(good, is_active=True, is_set=False)
    await assert_hint(waiting, "clock-unset", "has not set the clock yet", "timedatectl timesync-status")
    await assert_ok(clock(good, is_active=True, is_set=True), "clock")
    await assert_ok(clock(None, is_active=True, is_set=True), "clock-untried")


NEWER, OLDER = About("0.9.0", (3,), (1,)), About("0.1.0", (1,), (1,))


async def test_a_swarm_of_another_release() -> None:
    text = "this swarm runs release 0.9.0, with records of format 3; this machine runs"
    newer = look_at_release(look(survey(about=NEWER), survey(about=NEWER)))
    await assert_trouble(newer, "update-this-machine", text, "pip install -U canopy-swarm")
    older = look_at_release(look(survey(about=OLDER)))
    await assert_trouble(older, "update-the-others", "release 0.1.0", "ask whoever runs its machines to update")


async def test_a_swarm_that_refuses_this_release() -> None:
    view = look(error=str(disagreement(NEWER)))
    await assert_trouble(look_at_release(view), "update-this-machine", "release 0.9.0", "pip install -U")
    await assert_ok(look_at_directory(view), "directory-reached")
    view = look(error=str(disagreement(OLDER)))
    await assert_trouble(look_at_release(view), "update-the-others", "release 0.1.0", "ask whoever runs")


async def test_a_swarm_that_is_half_updated() -> None:
    mixed = look_at_release(look(survey(), survey(about=NEWER)))
    await assert_hint(mixed, "update-this-machine", "release 0.9.0", "pip install -U canopy-swarm")
    silent = look_at_release(look(survey(about=None), survey()))
    await assert_hint(silent, "old-peers", "1 peer says nothing of itself", "update to")
    later = About("0.9.1", (2, 3), (1, 2))
    await assert_ok(look_at_release(look(survey(about=later))), "release")
    await assert_ok(look_at_release(SwarmView()), "release-untried")
    await assert_ok(look_at_release(look(survey(None, None))), "release-untried")


def test_a_peer_says_its_clock_and_whence_the_asker_comes() -> None:
    said = parse_about(pack_about(1_790_000_000.5, "192.0.2.7"))
    assert said is not None
    assert (said, said.time, said.seen) == (OURS, 1_790_000_000.5, "192.0.2.7")
    for more in ([], [1], [0.0, "x"], [-1.0, "192.0.2.7"], [float("nan"), ""], [float("inf"), ""], ["x", 7]):
        said = parse_about(msgpack.packb(["0.9", [2], [1], *more]))
        assert said is not None
        assert (said.time, said.seen) == (None, "")
    said = parse_about(msgpack.packb(["0.9", [2], [1], 1.5, "not an address\x1b[2J", "later"]))
    assert said is not None
    assert (said.time, said.seen) == (1.5, "")
