"""What a DHT peer says of itself to whoever asks: its release, its formats, its clock, and whence the asker comes.

The handler's name has no number: releases that understand nothing else of each other still understand this answer, and
each knows which side to update. Fields are only ever added.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgpack

from swarm.discovery import record_fields as fields
from swarm.discovery.node_record import RECORD_FORMAT
from swarm.discovery.record_fields import RecordError
from swarm.discovery.registry import ROOT
from swarm.ids import PeerId
from swarm.runtime.quota import Quota, QuotaLimits, RateLimit, parse_ip
from swarm.runtime.version import VERSION

HANDLER: Final = "canopy/about"
MAX_ANSWER_BYTES: Final = 1_024
SESSION_FORMAT: Final = 1
"""The number in the name of the gRPC service (`swarm.wire`)."""
DIRECTORY_FORMAT: Final = int(ROOT.rpartition("v")[2])
MAX_VERSION: Final = 32
_QUESTIONS = "questions about this peer"
_LIMITS = QuotaLimits(rates={_QUESTIONS: RateLimit(per_key=0.5, burst=20.0, total=50.0, total_burst=200.0)})
_FORMATS: Final = (1, 1_000)
_UNIX_S: Final = (0.0, 1e11)


@dataclass(frozen=True, slots=True)
class AboutPeer:
    """What a peer says of itself.

    Attributes:
        version: the release that it runs.
        record: format of the records that it writes.
        directory: number in the directory's keys.
        session: number in the name of the service through which sessions run.
        time: its clock, Unix seconds.
        seen: IP address from which the asker comes, an IPv6 address up to its /64; empty where it cannot tell.
    """

    version: str = VERSION
    record: int = RECORD_FORMAT
    directory: int = DIRECTORY_FORMAT
    session: int = SESSION_FORMAT
    time: float = 0.0
    seen: str = ""


class OtherSide(enum.Enum):
    """How a peer's formats stand to this program's."""

    SAME = "same"
    OLDER = "older"
    NEWER = "newer"


def other_side(about: AboutPeer) -> OtherSide:
    """Whether a peer speaks as this program does, or which of the two is older."""
    theirs = (about.directory, about.record, about.session)
    ours = (DIRECTORY_FORMAT, RECORD_FORMAT, SESSION_FORMAT)
    if theirs == ours:
        return OtherSide.SAME
    return OtherSide.NEWER if theirs > ours else OtherSide.OLDER


class AboutDesk:
    """Answers for this machine."""

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Answer nobody yet.

        Args:
            clock: DHT time in seconds.
            monotonic: for the quota, in seconds.
        """
        self._clock = clock
        self._quota = Quota(_LIMITS, monotonic)

    def answer(self, peer: PeerId, seen: str) -> bytes:
        """The packed answer; nothing for who asks too often.

        Args:
            peer: who asks; libp2p has authenticated it.
            seen: whence it comes.
        """
        if not self._quota.spend(_QUESTIONS, peer):
            return b""
        return pack_about(AboutPeer(time=self._clock(), seen=seen))


def pack_about(about: AboutPeer) -> bytes:
    """An answer as it travels: a map in msgpack."""
    packed: bytes = msgpack.packb(asdict(about))
    return packed


def parse_about(answer: bytes) -> AboutPeer | None:
    """What a peer answered; None if it is malformed. Fields of later releases are read past."""
    if len(answer) > MAX_ANSWER_BYTES:
        return None
    try:
        raw: Any = msgpack.unpackb(answer)
        seen = raw.get("seen", "")
        return AboutPeer(
            version=fields.text("version", raw["version"], MAX_VERSION),
            record=fields.whole("record", raw["record"], _FORMATS),
            directory=fields.whole("directory", raw["directory"], _FORMATS),
            session=fields.whole("session", raw["session"], _FORMATS),
            time=fields.within("time", raw["time"], _UNIX_S),
            seen=str(ip) if isinstance(seen, str) and (ip := parse_ip(seen)) is not None else "",
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, RecordError, msgpack.UnpackException):
        return None
