"""An invite: one word that says all it takes to join a swarm: `canopy://` and base 58. Pure; opens no files.

    canopy:// + base58( version · msgpack body · Ed25519 signature · checksum )

The body is a list: peers, expiry, the inviter's public key, then what may be nil: model, the first 16 bytes of its
fingerprint, broker, network key, the open swarm's id; the ninth place holds peers' TLS ports, which release 0.2 cannot
read among the peers. A later release may say more behind these; it is read past. Another version is not.
The checksum tells a damaged word from one of another release. The signature tells whose word it is, and that nothing in
it was changed since. It is made with a key that belongs to the inviter's identity (`Identity.derive`): a signature of
the identity itself would be six times as long. Whoever can change a word on its way can put his own in its place: who
was meant to invite is known by the inviter's name, which both sides are shown.

Base 58 has no sign that chat programs take for mark-up, none that a shell knows, and a double click selects all of it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any, Final

import base58
import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from swarm.base.errors import ConfigError
from swarm.base.ids import SwarmId, as_swarm_id, is_model_name
from swarm.directory.dht.addresses import check_join_address
from swarm.directory.identity import Identity
from swarm.link.broker_address import parse_broker
from swarm.link.egress.ports import tls_port
from swarm.link.network_key import KEY_BYTES, NetworkKey

SCHEME: Final = "canopy://"
VERSION: Final = 1
MAX_CHARACTERS: Final = 2_000
"""Of an invite; one with two peers and a model has about 350."""
MAX_PEERS: Final = 8
MAX_DAYS: Final = 366
FINGERPRINT_DIGITS: Final = 32
"""Hex digits of a fingerprint that stand in an invite: 128 bits."""
_MAX_ADDRESS: Final = 320
_MAX_BROKER: Final = 300
_KEY, _SIGNATURE, _CHECKSUM = 32, 64, 4
_LATEST: Final = 2**32
_DOMAIN: Final = b"canopy-invite-1\n"
_PURPOSE: Final = b"invites"
_FIELDS: Final = 9
_TLS: Final = "/tls/p2p/"
_HEX: Final = re.compile(rf"[0-9a-f]{{{FINGERPRINT_DIGITS}}}")
_TCP: Final = re.compile(r"/(ip4|ip6|dns)/([^/]+)/tcp/([0-9]+)/p2p/([^/]+)")
_DIGEST: Final = b"\x12\x20"
"""How every peer id begins: of its 34 bytes an invite holds the other 32."""


@dataclass(frozen=True, slots=True)
class Invite:
    """What an invite says, checked.

    Attributes:
        peers: multiaddresses to join through, those of TLS ports last; 1 … `MAX_PEERS`.
        expires_at: Unix seconds.
        model: hub id, or a folder's name.
        fingerprint: how the model's begins, `FINGERPRINT_DIGITS` hex digits.
        broker: URL of the swarm's MQTT broker; it has a password only if whoever invites wanted that.
        network: of a private swarm. Whoever has the invite has the key.
        swarm: the id of an open swarm; None in a private one, in one that has none, and in an invite of release 0.2.
        inviter: public key of whoever invites, 32 bytes; empty until it is signed.
    """

    peers: tuple[str, ...]
    expires_at: int
    model: str | None = None
    fingerprint: str | None = None
    broker: str | None = field(default=None, repr=False)
    network: NetworkKey | None = None
    swarm: SwarmId | None = None
    inviter: bytes = b""

    @property
    def inviter_name(self) -> str:
        """Who invites, as both sides are shown it."""
        return inviter_name(self.inviter)


def inviter_name(key: bytes) -> str:
    """The first 80 bits of a key's hash, in groups that people can read to each other."""
    shown = hashlib.sha256(key).hexdigest()[:20]
    return "-".join(shown[at : at + 4] for at in range(0, 20, 4))


def is_invite(word: str) -> bool:
    """Whether a word is meant as an invite."""
    return word.strip()[: len(SCHEME)].lower() == SCHEME


def seal_invite(invite: Invite, identity: Identity) -> str:
    """Sign an invite; the word to pass on.

    Args:
        invite: what it says; the inviter is filled in.

    Raises:
        ConfigError: a part of it breaks its bounds, or all together are too long.
    """
    signer = Ed25519PrivateKey.from_private_bytes(identity.derive(_PURPOSE))
    key = signer.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    body: list[object] = [
        [_packed(peer) for peer in invite.peers if tls_port(peer) is None],
        invite.expires_at,
        key,
        invite.model,
        None if invite.fingerprint is None else bytes.fromhex(invite.fingerprint[:FINGERPRINT_DIGITS]),
        invite.broker,
        None if invite.network is None else invite.network.secret,
        invite.swarm,
        [_packed(peer.replace(_TLS, "/p2p/")) for peer in invite.peers if tls_port(peer) is not None] or None,
    ]
    while body[-1] is None and len(body) > 3:
        body.pop()
    said = bytes([VERSION]) + msgpack.packb(body)
    signed = said + signer.sign(_DOMAIN + said)
    word = SCHEME + base58.b58encode(signed + _checksum(signed)).decode()
    read_invite(word)  # raises where a reader would
    return word


def open_invite(word: str, now: float) -> Invite:
    """Read an invite of which somebody new is to make use.

    Args:
        word: as it was pasted; blanks and line ends within it are left out.
        now: Unix seconds.

    Raises:
        ConfigError: as `read_invite` and `check_expiry`.
    """
    invite = read_invite(word)
    check_expiry(invite, now)
    return invite


def check_expiry(invite: Invite, now: float) -> None:
    """Refuse an invite that has expired; to a machine that knows the swarm it does not matter.

    Raises:
        ConfigError: it has.
    """
    if now >= invite.expires_at:
        raise ConfigError(f"this invite has expired, {_ago(now - invite.expires_at)} ago: ask for a new one")


def read_invite(word: str) -> Invite:
    """Read an invite, whether or not it has expired.

    Raises:
        ConfigError: it is damaged, too long, or of another version. The message holds nothing of it.
    """
    signed = _unwrapped(word)
    said, signature = signed[:-_SIGNATURE], signed[-_SIGNATURE:]
    try:
        invite = _decoded(msgpack.unpackb(said[1:]))
        Ed25519PublicKey.from_public_bytes(invite.inviter).verify(signature, _DOMAIN + said)
    except InvalidSignature:
        raise ConfigError("this invite was changed after it was signed: ask for a new one") from None
    except (ValueError, TypeError, RecursionError, ConfigError, msgpack.UnpackException) as error:
        reason = str(error) if isinstance(error, _Malformed) else "it holds what no invite does"
        raise ConfigError(f"this invite is not sound ({reason}): ask for a new one") from None
    return invite


class _Malformed(ValueError):
    """A part that breaks its bounds; the message names it."""


def _unwrapped(word: str) -> bytes:
    """What was signed, and the signature; of this version."""
    if len(word) > 2 * MAX_CHARACTERS:
        raise _too_long()
    text = "".join(word.split())
    if len(text) > MAX_CHARACTERS:
        raise _too_long()
    try:
        data = base58.b58decode(text[len(SCHEME) :])
    except ValueError:
        data = b""
    signed, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
    if not is_invite(text) or len(signed) <= 1 + _SIGNATURE or checksum != _checksum(signed):
        raise ConfigError(f"this invite is damaged: copy all of it again, from {SCHEME} to its last letter")
    if signed[0] > VERSION:
        raise ConfigError("this invite is of a newer release of Canopy: update this machine, then use it again")
    if signed[0] < VERSION:
        raise ConfigError("this invite is of an older release of Canopy: whoever invites must update, then invite anew")
    return signed


def _too_long() -> ConfigError:
    return ConfigError(f"this is too long for an invite, which has at most {MAX_CHARACTERS} characters")


def _decoded(body: Any) -> Invite:  # noqa: ANN401 - any msgpack value
    if not isinstance(body, list) or len(body) < 3:
        raise _Malformed("body")
    peers, expires_at, key, model, fingerprint, broker, secret, swarm, tls = [*body, *[None] * _FIELDS][:_FIELDS]
    ports = [] if tls is None else tls
    if not isinstance(peers, list) or not isinstance(ports, list) or not 0 < len(peers) + len(ports) <= MAX_PEERS:
        raise _Malformed("peers")
    if type(expires_at) is not int or not 0 <= expires_at < _LATEST:
        raise _Malformed("expiry")
    if not isinstance(key, bytes) or len(key) != _KEY:
        raise _Malformed("inviter")
    return Invite(
        peers=(*map(_unpacked, peers), *(_unpacked(port).replace("/p2p/", _TLS) for port in ports)),
        expires_at=expires_at,
        model=_model(model),
        fingerprint=_fingerprint(fingerprint),
        broker=_broker(broker),
        network=_network(secret),
        swarm=_swarm(swarm),
        inviter=key,
    )


def _model(value: object) -> str | None:
    if value is not None and not (isinstance(value, str) and is_model_name(value)):
        raise _Malformed("model")
    return value


def _fingerprint(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, bytes) or _HEX.fullmatch(value.hex()) is None:
        raise _Malformed("fingerprint")
    return value.hex()


def _broker(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > _MAX_BROKER or not value.isascii() or not value.isprintable():
        raise _Malformed("broker")
    try:
        parse_broker(value)
    except ConfigError:
        raise _Malformed("broker") from None
    return value


def _network(value: object) -> NetworkKey | None:
    if value is None:
        return None
    if not isinstance(value, bytes) or len(value) != KEY_BYTES:
        raise _Malformed("network key")
    return NetworkKey(value)


def _swarm(value: object) -> SwarmId | None:
    swarm = as_swarm_id(value)
    if swarm is None and value is not None:
        raise _Malformed("swarm")
    return swarm


def _packed(address: str) -> str | list[object]:
    """A multiaddress as it stands in an invite: host, port and peer, or its text where it is of another kind."""
    found = _TCP.fullmatch(address)
    if found is None:
        return address
    kind, host, port, peer = found.groups()
    try:
        place = host if kind == "dns" else ipaddress.ip_address(host).packed
        packed: list[object] = [place, int(port), base58.b58decode(peer)[len(_DIGEST) :]]
        return packed if _unpacked(packed) == address else address
    except ValueError:
        return address  # no good one, which whoever reads it says


def _unpacked(value: object) -> str:
    """The multiaddress that stands in an invite."""
    match value:
        case str():
            address = value
        case [bytes(place), int(port), bytes(digest)] if len(place) in (4, 16):
            ip = ipaddress.ip_address(place)
            address = f"/ip{ip.version}/{ip}/tcp/{port}/p2p/{base58.b58encode(_DIGEST + digest).decode()}"
        case [str(name), int(port), bytes(digest)]:
            address = f"/dns/{name}/tcp/{port}/p2p/{base58.b58encode(_DIGEST + digest).decode()}"
        case _:
            raise _Malformed("peers")
    if len(address) > _MAX_ADDRESS:
        raise _Malformed("peers")
    try:
        check_join_address(address)
    except ConfigError:
        raise _Malformed("peers") from None
    return address


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM]


def _ago(seconds: float) -> str:
    """A time that has passed, in the largest unit of which it has two."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 1):.0f} s"
