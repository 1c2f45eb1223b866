"""What a relay and those who use it say to each other before bytes are passed: lines of text, parsed and bounded. Pure.

Whoever connects says one line, which ends with a line feed and may have a carriage return before it:

    HERE PEER                        a machine that keeps this connection, to be reached through it
    CONNECT PEER:1 HTTP/1.1          a dialler, as gRPC says it to an HTTP proxy; headers follow, and an empty line
    TAKE TOKEN                       the machine's end of a circuit that somebody asked for
    SEEN                             asks for the address that this connection comes from
    PUNCH PEER ADDRESSES             a dialler that wants a hole: the circuit carries what both ends must agree on
    CALL PEER HOST:PORT TOKEN        a dialler that can be dialled itself, and wants to be
    LOAD                             asks what the relay carries
    WHO NONCE                        asks whose relay this is: 16 bytes in hex, to be signed

To HERE the relay answers `PROVE RELAY-PEER NONCE`; the machine answers `PROOF KEY SIGNATURE` (`prove_presence`),
and the relay `OK HOST:PORT`, the address that the machine comes from, or `NO REASON`. Another relay cannot use the
proof: its name is in what is signed. Nobody can use it later: the nonce is the relay's. In a private swarm both sides
put `NetworkKey.presence` behind the nonce, so that its relays carry members only. From then on the relay says

    OPEN TOKEN ADDRESS               somebody connects from there: open a connection here with TAKE TOKEN
    PUNCH TOKEN ADDRESSES            somebody wants a hole and knocks from these addresses: TAKE TOKEN first
    CALL TOKEN HOST:PORT             somebody wants to be called: open a connection there with TAKE TOKEN
    PING                             every 5 s: the machine answers PONG; who is silent for 15 s is gone, on either side

A machine that says HERE again replaces its older connection, which is closed. Circuits outlive both.

The ADDRESS of OPEN is a hint, for the machine's quotas: a relay that lies can say any. The others are answered:

    SEEN            SEEN HOST:PORT, and the connection stays open for 30 s, so that a router keeps its mapping
    LOAD            LOAD CIRCUITS LIMIT MBIT LENT-MBIT: circuits now and at most, Mbit/s carried and lent
    WHO             WHO KEY SIGNATURE (`swarm.directory.address_proof`)
    CONNECT         an HTTP status line and an empty line: 200 once the machine has taken it, 404 where nobody of that
                    name is here, 429 where somebody has too many, 504 where the machine does not take it in 10 s
    PUNCH           OK HOST:PORT once the machine has taken it, whence that comes, or NO REASON
    CALL            OK once it was passed on, or NO REASON

Of PUNCH and CALL the first HOST must be the one that the dialler comes from: so each end knows whence the other comes.

After 200, after OK to PUNCH and after TAKE the connection carries the circuit's bytes and nothing else. A circuit of
PUNCH ends after 30 s or 64 KiB. Whatever a relay refuses otherwise it closes.
"""

from __future__ import annotations

import binascii
import enum
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Final

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.directory.identity import Identity
from swarm.directory.node_record import split_address
from swarm.directory.sealing import RecordError
from swarm.link.egress.streams import words
from swarm.protocol.peer_keys import is_peer_id, verify

NONCE_BYTES: Final = 16
_DOMAIN: Final = b"canopy-relay-here-1\n"


def prove_presence(identity: Identity, relay: PeerId, nonce: bytes) -> tuple[str, str]:
    """Public key and signature, in base 64.

    Args:
        nonce: the relay's, 16 bytes; in a private swarm with the secret of its members behind it.
    """
    signature = identity.sign(_DOMAIN + relay.encode() + b"\n" + nonce)
    return b64encode(identity.public_key).decode(), b64encode(signature).decode()


def check_presence(peer: PeerId, relay: PeerId, nonce: bytes, key: str, signature: str) -> bool:
    """Whether a proof was made by this peer, for this relay and this nonce; never raises."""
    try:
        public_key, signed = b64decode(key, validate=True), b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        return False
    return verify(peer, public_key, _DOMAIN + relay.encode() + b"\n" + nonce, signed)


MAX_PROOF_BYTES: Final = 2_048
"""Of the one line that holds a public key and a signature."""
MAX_HEADER_BYTES: Final = 4_096
"""Of all headers behind CONNECT."""
OPENING_S: Final = 5.0
"""How long an opening may take, its headers included."""
TOKEN_BYTES: Final = 16
PING_S: Final = 5.0
"""How often a relay says PING."""
DEAD_S: Final = 15.0
"""How long either side of a standing connection may be silent."""
TAKE_S: Final = 10.0
"""How long a machine has to take a circuit."""
MEETING_S: Final = 30.0
"""How long the circuit of a PUNCH lives."""
MEETING_BYTES: Final = 65_536
"""What it may carry, in both directions together."""
SEEN_S: Final = 30.0
"""How long a connection stays open that asked for its address."""
MAX_ADDRESSES: Final = 6
"""Addresses in one PUNCH, at most."""


class Verb(enum.Enum):
    """The first word of an opening."""

    HERE = "HERE"
    CONNECT = "CONNECT"
    TAKE = "TAKE"
    SEEN = "SEEN"
    PUNCH = "PUNCH"
    CALL = "CALL"
    LOAD = "LOAD"
    WHO = "WHO"


@dataclass(frozen=True, slots=True)
class Opening:
    """One opening, checked.

    Attributes:
        verb: what is wanted.
        peer: whom it is about; None for TAKE, SEEN, LOAD and WHO.
        token: of TAKE and CALL, 32 lower-case hex digits; else empty.
        addresses: of PUNCH and CALL: `host:port`, with IP addresses; else empty.
        nonce: of WHO; else empty.
    """

    verb: Verb
    peer: PeerId | None = None
    token: str = ""
    addresses: tuple[str, ...] = ()
    nonce: bytes = b""


def parse_opening(line: bytes) -> Opening:
    """Read the first line of a connection.

    Raises:
        RemoteProtocolError: it is none; `field` is `opening`.
    """
    match words(line):
        case ["HERE", peer]:
            return Opening(Verb.HERE, _peer(peer))
        case ["CONNECT", target, "HTTP/1.0" | "HTTP/1.1"]:
            return Opening(Verb.CONNECT, _peer(target.removesuffix(":1")))
        case ["TAKE", token]:
            return Opening(Verb.TAKE, token=check_token(token))
        case ["SEEN"]:
            return Opening(Verb.SEEN)
        case ["PUNCH", peer, listed]:
            return Opening(Verb.PUNCH, _peer(peer), addresses=parse_addresses(listed))
        case ["CALL", peer, address, token]:
            return Opening(Verb.CALL, _peer(peer), check_token(token), parse_addresses(address, limit=1))
        case ["LOAD"]:
            return Opening(Verb.LOAD)
        case ["WHO", nonce]:
            return Opening(Verb.WHO, nonce=_nonce(nonce))
        case _:
            raise RemoteProtocolError("opening", "no opening of a relay")


def parse_addresses(listed: str, limit: int = MAX_ADDRESSES) -> tuple[str, ...]:
    """Read `host:port` addresses between commas; hosts are IP addresses, so that nobody looks up a stranger's name.

    Raises:
        RemoteProtocolError: there are none, too many, or one is malformed.
    """
    addresses = tuple(listed.split(","))
    if len(addresses) > limit:
        raise RemoteProtocolError("opening", f"more than {limit} addresses")
    for address in addresses:
        try:
            host, _ = split_address(address)
        except RecordError as error:
            raise RemoteProtocolError("opening", f"{address[:80]!r} is not host:port") from error
        if not host.startswith("[") and _IPV4.fullmatch(host) is None:
            raise RemoteProtocolError("opening", f"{address[:80]!r} names a machine; an IP address is wanted")
    return addresses


def check_token(token: str) -> str:
    """A token as it is.

    Raises:
        RemoteProtocolError: it is none.
    """
    if _TOKEN.fullmatch(token) is None:
        raise RemoteProtocolError("opening", f"a token has {2 * TOKEN_BYTES} lower-case hex digits")
    return token


def _nonce(word: str) -> bytes:
    if len(word) != 2 * NONCE_BYTES or _HEX.fullmatch(word) is None:
        raise RemoteProtocolError("opening", f"a nonce has {2 * NONCE_BYTES} lower-case hex digits")
    return bytes.fromhex(word)


def _peer(word: str) -> PeerId:
    if not is_peer_id(word):
        raise RemoteProtocolError("opening", f"{word[:80]!r} is no peer id")
    return PeerId(word)


_TOKEN = re.compile(rf"[0-9a-f]{{{2 * TOKEN_BYTES}}}")
_HEX = re.compile(r"[0-9a-f]+")
_IPV4 = re.compile(r"\d{1,3}(\.\d{1,3}){3}", re.ASCII)
