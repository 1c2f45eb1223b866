"""What a node signs of itself: msgpack of [public key, body, signature]. Pure; time is a parameter.

The body is msgpack of [format, *fields of a declaration]. A later release may sign more fields behind these; they are
read past.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, Final, Generic, Protocol, TypeVar

import msgpack

from swarm.base.declared import ListForm, Printable, Rule, Within, Written
from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import ModelIdentity, PeerId, is_model_name
from swarm.base.version import UPDATE, VERSION
from swarm.directory.identity import Identity
from swarm.protocol.limits import MAX_LAYERS
from swarm.protocol.peer_keys import is_peer_id, verify

MAX_TTL_S: Final = 90.0
"""How far ahead anything signed may expire."""
CLOCK_SLACK_S: Final = 5.0  # the DHT tolerates clocks that differ by 3 s
UNIX_S: Final = Within(0.0, 1e11)
AnyPeer = Annotated[PeerId, Printable(64), Rule("a peer id", is_peer_id)]
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class RecordError(RemoteProtocolError):
    """A record that is not valid; `field` names the part at fault."""


def _is_whole_model(model: ModelIdentity) -> bool:
    digests = (model.fingerprint, model.config_digest, model.weights_digest, model.tokenizer_digest)
    has_form = (
        is_model_name(model.name) and all(map(_DIGEST.fullmatch, digests)) and 1 <= model.num_layers <= MAX_LAYERS
    )
    return has_form and model.is_consistent


ListedModel = Annotated[
    ModelIdentity,
    Written(as_one=True),
    Rule("a model by its name, whose fingerprint is that of its digests and layers", _is_whole_model),
]


class _Sealable(Protocol):
    """What is sealed: its declaration begins with `left` and `peer`."""

    @property
    def peer(self) -> PeerId: ...
    @property
    def expires_at(self) -> float: ...


T = TypeVar("T", bound=_Sealable)


class Seal(Generic[T]):
    """How facts of one class are signed, each by the peer that it names.

    Args:
        kind: the class.
        what: what one is called in messages.
        number: of its format. It grows when an older release cannot go on without what is new.
        domain: what a signature is made for.
        limit: bytes of one sealed.
        kept: facts whose signatures are not checked again.
    """

    def __init__(self, kind: type[T], what: str, number: int, domain: bytes, *, limit: int, kept: int) -> None:  # noqa: PLR0913
        self.what, self.number, self.domain, self.limit = what, number, domain, limit
        self.form = ListForm(kind, RecordError)
        self._opened = lru_cache(kept)(self._open_signed)

    def sign(self, body: list[Any], identity: Identity) -> bytes:
        packed = msgpack.packb(body)
        sealed: bytes = msgpack.packb([identity.public_key, packed, identity.sign(self.domain + packed)])
        return sealed

    def body(self, fact: T) -> list[Any]:
        """What is signed of a fact."""
        return [self.number, *self.form.encode(fact)]

    def close(self, fact: T, identity: Identity) -> bytes:
        """Encode and sign a fact.

        Raises:
            RecordError: it breaks its own bounds, or names another peer.
        """
        if fact.peer != identity.peer_id:
            raise RecordError("peer", f"{self.what} is signed by the peer that it names")
        sealed = self.sign(self.body(fact), identity)
        self.open(sealed, fact.expires_at)
        return sealed

    def open(self, data: bytes, now: float) -> T:
        """Decode a fact and check everything but whether it has expired.

        Args:
            now: DHT time in seconds.

        Raises:
            RecordError: the field at fault and why.
        """
        fact = self._opened(bytes(data))
        if fact.expires_at > now + MAX_TTL_S + CLOCK_SLACK_S:
            raise RecordError("expires_at", f"more than {MAX_TTL_S:.0f} s ahead")
        return fact

    def parts(self, data: bytes) -> tuple[bytes, bytes, bytes]:
        """Public key, body and signature; whether the signature holds is not checked.

        Raises:
            RecordError: it is nothing sealed.
        """
        if len(data) > self.limit:
            raise RecordError("data", f"{len(data)} bytes; {self.what} has at most {self.limit}")
        match _unpacked(data):
            case [bytes(public_key), bytes(body), bytes(signature)]:
                return public_key, body, signature
            case _:
                raise RecordError("data", f"not {self.what}")

    def claimed_peer(self, data: bytes) -> str | None:
        """The peer id that it claims, before its signature is checked; None if it is no sealed record."""
        try:
            values = _unpacked(self.parts(data)[1])
        except RecordError:
            return None
        return values[2] if len(values) > 2 and isinstance(values[2], str) else None

    def _open_signed(self, data: bytes) -> T:
        """A fact whose signature and bounds hold at some time; the same bytes are verified once."""
        public_key, body, signature = self.parts(data)
        number, *values = _unpacked(body) or [None]
        if number != self.number or type(number) is not int:
            raise RecordError("data", self._another_format(number))
        fact = self.form.decode(values, sealed=data)
        if not verify(fact.peer, public_key, self.domain + body, signature):
            raise RecordError("signature", f"not made by {fact.peer}")
        return fact

    def _another_format(self, found: object) -> str:
        """Which side is to be updated."""
        if type(found) is not int:
            return f"{self.what} of no format"
        side = f"update this machine ({UPDATE})" if found > self.number else "its machine is to be updated"
        return f"{self.what} of format {found}; release {VERSION} reads format {self.number}: {side}"


def _unpacked(data: bytes) -> list[Any]:
    try:
        values = msgpack.unpackb(data)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError("data", "malformed") from error
    if not isinstance(values, list):
        raise RecordError("data", "malformed")
    return values
