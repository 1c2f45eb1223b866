"""Every error that Canopy raises on purpose, as one tree.

SwarmError
├─ ConfigError                     what the user asked for cannot be done: options, folders, models, drafts
│  ├─ UnknownModel                 no such model on disk, on the hub or in the swarm
│  ├─ HubError                     the hub refuses or cannot be reached, or what it sent cannot be kept
│  ├─ LayersError                  a span that the model does not have
│  ├─ UnsupportedModel             a model (or draft) that Canopy refuses, by name
│  ├─ IncompatibleDraft            draft and target share no tokens, or a head was made for other ones
│  ├─ ModelMismatch                two machines hold different weights, configs or tokenizers
│  ├─ NotEnoughSpace               memory or disk: needs / has / how many layers would fit
│  ├─ TooSlow                      this machine would slow down every chain that it joins
│  └─ IdentityError                the identity file is unreadable or in use
├─ ProtocolError(field)
│  ├─ LocalProtocolError           this program broke the protocol: a bug here, always loud
│  └─ RemoteProtocolError          the peer broke it: the frame is refused, the session or hop replaced
├─ HopError(peer, span)            one machine of a chain failed; another one can take its place
│  ├─ Unreachable                  cannot be dialled, or its stream broke
│  ├─ HopTimeout                   did not answer in time
│  ├─ Busy                         has no room for this session
│  ├─ HopClosed                    gone, or gave the session up
│  ├─ HopLeaving                   leaves soon, and serves until the session has moved
│  ├─ HopRefused                   says that the session itself cannot be: its model, its window, a rule that it broke
│  ├─ HopMisbehaved                broke the protocol, or lives and does not move the session's sweeps
│  │  └─ PicksRefuted              picked what its own final rows do not give
│  ├─ HopSlow                      holds sweeps back, and serves until the session has moved
│  ├─ LinkDiffers                  received other rows than its predecessor sent, they say
│  └─ ReplicasDiffer               does not compute what its replica computes
├─ RouteError(missing)             nobody serves some layers
├─ SessionError
│  ├─ SessionExpired               the swarm no longer holds this session
│  └─ ContextFull                  prompt and new tokens do not fit the session's window
├─ RegistryError                   the DHT cannot be joined or did not answer
└─ GenerationInterrupted(text)     generation ended early; carries the text and tokens so far
   └─ TextChanged                  what was shown came from a machine that was refuted, and is not the model's text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


class SwarmError(Exception):
    """Base of everything that Canopy raises on purpose; the message is one line for the user."""


class ConfigError(SwarmError):
    """What the user asked for cannot be done."""


class UnknownModel(ConfigError):
    """No such model on disk, on the hub or in the swarm."""


class HubError(ConfigError):
    """The hub refuses or cannot be reached, or what it sent cannot be kept."""


class LayersError(ConfigError):
    """A span that is malformed or outside the model."""


class UnsupportedModel(ConfigError):
    """A model that Canopy refuses, by name and reason."""


class IncompatibleDraft(ConfigError):
    """Draft and target share no tokens, or a head was made for others than the target's."""


class ModelMismatch(ConfigError):
    """Two machines hold different models under one name; the message names both fingerprints."""


class NotEnoughSpace(ConfigError):
    """Memory or disk is too small; the message says needs, has and how many layers would fit."""


class TooSlow(ConfigError):
    """This machine would slow down every chain that it joins; the message says how much, and what would help."""


class IdentityError(ConfigError):
    """The identity file cannot be read or is in use elsewhere."""


class ProtocolError(SwarmError):
    """A message that breaks the session protocol.

    Attributes:
        field: the part of the message that is at fault.
        reason: what is wrong with it.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class LocalProtocolError(ProtocolError):
    """This program broke the protocol: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol."""


class HopError(SwarmError):
    """One machine of a chain failed.

    Attributes:
        peer: base58 peer id of the machine.
        span: its layers in this chain, half-open: `start-end`.
        reason: what happened there.
        other: peer id of the other end of the link that the trouble is on, which may be at fault instead; None where
            there is none: the machine said it of itself, or whoever raised this saw it fail.
        is_even: whether nothing tells which of the two ends is at fault.
    """

    def __init__(self, peer: str, span: str, reason: str) -> None:
        super().__init__(f"node {peer} (--layers {span}): {reason}")
        self.peer = peer
        self.span = span
        self.reason = reason
        self.other: str | None = None
        self.is_even = False

    def on_link(self, other: str | None, *, is_even: bool = False) -> Self:
        """The same error, on the link between its machine and another one."""
        self.other = other
        self.is_even = is_even and other is not None
        return self


class Unreachable(HopError):
    """Cannot be dialled, or its stream broke."""


class HopTimeout(HopError):
    """Did not answer in time."""


class Busy(HopError):
    """Has no room for this session.

    Attributes:
        retry_after_s: when it is worth asking again; None where it does not say.
        position: the place among those that wait for room there, from 1; None where it keeps none.
        expected_s: when there should be room; None where it does not say.
    """

    retry_after_s: float | None = None
    position: int | None = None
    expected_s: float | None = None

    def asking_again(
        self, retry_after_s: float | None, position: int | None = None, expected_s: float | None = None
    ) -> Self:
        """The same error, with when to ask again."""
        self.retry_after_s, self.position, self.expected_s = retry_after_s, position, expected_s
        return self


class HopClosed(HopError):
    """Is gone, or gave the session up."""


class HopLeaving(HopError):
    """Leaves the swarm soon; it serves until the session has moved elsewhere."""


class HopRefused(HopError):
    """Says that the session itself cannot be. True only if machines say so that share nothing.

    Attributes:
        cause: what it says, as its user would be told: `ContextFull`, `ModelMismatch` or `RemoteProtocolError`.
    """

    def __init__(self, peer: str, span: str, cause: SwarmError) -> None:
        super().__init__(peer, span, str(cause))
        self.cause = cause


class HopMisbehaved(HopError):
    """Broke the protocol, or lives and does not move the session's sweeps."""


class PicksRefuted(HopMisbehaved):
    """Picked tokens that its own final rows do not give: what it picked is taken back."""


class HopSlow(HopError):
    """Holds sweeps back for much longer than it should need; it serves until the session has moved elsewhere."""


class LinkDiffers(HopError):
    """Says that it received something else than the machine before says it sent. Either may be wrong."""


class ReplicasDiffer(HopError):
    """Its rows are not those of its replica. The comparison cannot say which of the two is right."""


class RouteError(SwarmError):
    """Nobody serves some layers.

    Attributes:
        missing: half-open ranges `(start, end)` of those layers, in order.
        eta_s: when somebody is expected to serve them, in seconds; None where nobody knows.
    """

    def __init__(self, message: str, missing: Sequence[tuple[int, int]]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.eta_s: float | None = None


class SessionError(SwarmError):
    """The session cannot go on."""


class SessionExpired(SessionError):
    """The swarm no longer holds this session."""


class ContextFull(SessionError):
    """Prompt and new tokens do not fit the session's window."""


class RegistryError(SwarmError):
    """The DHT cannot be joined or did not answer."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a generation needs to go on where it ended.

    Attributes:
        prompt: token ids.
        options: of `generate`, by name, the seed included.
        tokens: ids that were generated so far.
    """

    prompt: tuple[int, ...]
    options: Mapping[str, Any]
    tokens: tuple[int, ...]


class GenerationInterrupted(SwarmError):
    """Generation ended early; `__cause__` is why.

    Attributes:
        text: what was generated so far.
        tokens: ids of that text.
        unfinished: what `resume` takes; None where the generation cannot go on.
    """

    def __init__(self, reason: str, text: str, tokens: Sequence[int]) -> None:
        super().__init__(f"generation interrupted after {len(tokens)} tokens: {reason}")
        self.text = text
        self.tokens = tuple(tokens)
        self.unfinished: Unfinished | None = None


class TextChanged(GenerationInterrupted):
    """Text was shown that a refuted machine picked, and the model's own goes on otherwise; `text` is the model's.

    Attributes:
        right_tokens: of those that were shown, how many from the beginning are the model's too.
    """

    def __init__(self, reason: str, text: str, tokens: Sequence[int], right_tokens: int) -> None:
        super().__init__(reason, text, tokens)
        self.right_tokens = right_tokens
