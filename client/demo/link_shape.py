"""The model of an emulated link: delay, rate, jitter, loss, a bounded queue. Pure: no clock, no I/O, no randomness.

A host has one interface out and one in; each carries one packet at a time. A packet of n bytes that host a sends to
host b over a link of rate r holds a's interface out for n/r, travels for the delay and the jitter, and holds b's
interface in for n/r. Its first bits arrive while the last ones are still sent, so where nobody else sends, one packet's
last bit arrives after n/r + delay, not 2 n/r + delay. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.errors import ConfigError

Ends = tuple[int | None, int | None]
"""One direction between hosts: `(source, target)`; None stands for every host."""


def matching(ends: Ends, links: Iterable[Ends]) -> list[Ends]:
    """Those of the links that `ends` names."""
    source, target = ends
    return [link for link in links if source in (None, link[0]) and target in (None, link[1])]


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One direction of a link."""

    delay_ms: float = 0.0
    """One way."""
    mbit: float | None = None
    """10⁶ bits per second; None: not limited, and nothing queues."""
    jitter_ms: float = 0.0
    """Each packet is late by a uniform draw from [0, jitter_ms) more; order is kept."""
    loss: float = 0.0
    """Chance of each packet to vanish, in [0, 1]; it has held the sender's interface all the same."""
    queue_ms: float = 100.0
    """A packet that would wait longer than this for an interface is dropped there."""

    def __post_init__(self) -> None:
        """Refuse what no link can be."""
        if not (self.delay_ms >= 0 and self.jitter_ms >= 0 and self.queue_ms >= 0):
            raise ConfigError(f"delay {self.delay_ms}, jitter {self.jitter_ms}, queue {self.queue_ms} ms: none below 0")
        if self.mbit is not None and not self.mbit > 0:
            raise ConfigError(f"a link of {self.mbit} Mbit/s carries nothing: give a rate above 0, or cut the link")
        if not 0 <= self.loss <= 1:
            raise ConfigError(f"loss {self.loss}: a fraction between 0 and 1")

    def transmit_s(self, size_bytes: int) -> float:
        """How long so many bytes hold an interface."""
        return 0.0 if self.mbit is None else size_bytes * 8e-6 / self.mbit


class Interface:
    """One direction of one host's connection, shared by all its links."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0
        """When all that was admitted has passed."""

    def admit(self, now_s: float, transmit_s: float, queue_s: float) -> float | None:
        """Pass a packet that is there at `now_s`; when its last bit is through, None if the queue is full."""
        start_s = max(now_s, self.free_s)
        if start_s - now_s > queue_s:
            return None
        self.free_s = start_s + transmit_s
        return self.free_s


class EmulatedLink:
    """One direction between two hosts. A later packet never overtakes an earlier one, also when the shape changes."""

    __slots__ = ("_chance", "_last_s", "incoming", "is_open", "outgoing", "shape")

    def __init__(self, shape: LinkShape, outgoing: Interface, incoming: Interface, chance: Callable[[], float]) -> None:
        """`outgoing` is the sender's, `incoming` the receiver's; `chance` draws from [0, 1)."""
        self.shape = shape
        self.outgoing = outgoing
        self.incoming = incoming
        self.is_open = True
        self._chance = chance
        self._last_s = 0.0

    def depart(self, now_s: float, size_bytes: int) -> float | None:
        """Send a packet; when its last bit reaches the receiver's interface, None if it was dropped or lost."""
        shape = self.shape
        sent_s = self.outgoing.admit(now_s, shape.transmit_s(size_bytes), shape.queue_ms / 1e3)
        if sent_s is None or (shape.loss and self._chance() < shape.loss):
            return None
        jitter_ms = shape.jitter_ms and shape.jitter_ms * self._chance()
        self._last_s = max(self._last_s, sent_s + (shape.delay_ms + jitter_ms) / 1e3)
        return self._last_s

    def arrive(self, now_s: float, size_bytes: int) -> float | None:
        """The packet's last bit is there at `now_s`; when the receiver has it, None if it was dropped.

        Called in the order of arrival over all links of the receiver.
        """
        transmit_s = self.shape.transmit_s(size_bytes)
        if self.incoming.free_s <= now_s - transmit_s:
            self.incoming.free_s = now_s
            return now_s
        return self.incoming.admit(now_s - transmit_s, transmit_s, self.shape.queue_ms / 1e3)
