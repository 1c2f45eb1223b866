"""The model of an emulated link: delay, rate, jitter, loss, a bounded queue. Pure: no clock, no I/O, no randomness.

A host has one outgoing and one incoming interface; each carries one packet at a time. A packet of n bytes from host a
to host b over a link of rate r occupies a's outgoing interface for n/r, travels for delay + jitter, and occupies b's
incoming interface for n/r. Its first bits arrive while its last ones are still being sent: on an idle link, the last
bit arrives after n/r + delay, not 2 n/r + delay. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.base.errors import ConfigError

Ends = tuple[int | None, int | None]
"""One direction between hosts: `(source, target)`; None stands for every host."""


def matching_links(ends: Ends, links: Iterable[Ends]) -> list[Ends]:
    """The links that `ends` names; None in `ends` matches every host."""
    source, target = ends
    return [link for link in links if source in (None, link[0]) and target in (None, link[1])]


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One direction of a link."""

    delay_ms: float = 0.0
    """One way."""
    mbit: float | None = None
    """Rate in 10⁶ bits per second; None: unlimited, so nothing queues."""
    jitter_ms: float = 0.0
    """Each packet is delayed by a further uniform draw from [0, jitter_ms); the order is kept."""
    loss: float = 0.0
    """Probability in [0, 1] that a packet is lost; it occupies the sender's interface all the same."""
    queue_ms: float = 100.0
    """An interface drops a packet that would wait longer than this for it."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is out of range.
        """
        if not (self.delay_ms >= 0 and self.jitter_ms >= 0 and self.queue_ms >= 0):
            raise ConfigError(f"delay {self.delay_ms}, jitter {self.jitter_ms}, queue {self.queue_ms} ms: none below 0")
        if self.mbit is not None and not self.mbit > 0:
            raise ConfigError(f"a link of {self.mbit} Mbit/s carries nothing: give a rate above 0, or cut the link")
        if not 0 <= self.loss <= 1:
            raise ConfigError(f"loss {self.loss}: a fraction between 0 and 1")

    def transmit_s(self, size_bytes: int) -> float:
        """Seconds for which a packet of this size occupies an interface."""
        return 0.0 if self.mbit is None else size_bytes * 8e-6 / self.mbit


class Interface:
    """One direction of one host's connection, shared by all its links."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0
        """When the last admitted packet has passed."""

    def admit(self, now_s: float, transmit_s: float, queue_s: float) -> float | None:
        """Admit a packet that arrives at `now_s`.

        Args:
            transmit_s: how long it occupies the interface.
            queue_s: the longest time that it may wait.

        Returns:
            When its last bit has passed; None if the packet is dropped.
        """
        start_s = max(now_s, self.free_s)
        if start_s - now_s > queue_s:
            return None
        self.free_s = start_s + transmit_s
        return self.free_s


class EmulatedLink:
    """One direction between two hosts; packets stay in order, also when the shape changes.

    Attributes:
        shape: may be replaced at any time; it holds from the next packet on.
        outgoing: the sender's interface.
        incoming: the receiver's interface.
        is_open: False while the link is cut; the user of the link checks it.
    """

    __slots__ = ("_draw", "_last_s", "incoming", "is_open", "outgoing", "shape")

    def __init__(self, shape: LinkShape, outgoing: Interface, incoming: Interface, draw: Callable[[], float]) -> None:
        """`outgoing` is the sender's, `incoming` the receiver's; `draw` gives uniform numbers in [0, 1)."""
        self.shape = shape
        self.outgoing = outgoing
        self.incoming = incoming
        self.is_open = True
        self._draw = draw
        self._last_s = 0.0

    def depart(self, now_s: float, size_bytes: int) -> float | None:
        """Send a packet; returns when its last bit reaches the receiver's interface, None if it is dropped or lost."""
        shape = self.shape
        sent_s = self.outgoing.admit(now_s, shape.transmit_s(size_bytes), shape.queue_ms / 1e3)
        if sent_s is None or (shape.loss and self._draw() < shape.loss):
            return None
        jitter_ms = shape.jitter_ms and shape.jitter_ms * self._draw()
        self._last_s = max(self._last_s, sent_s + (shape.delay_ms + jitter_ms) / 1e3)
        return self._last_s

    def arrive(self, now_s: float, size_bytes: int) -> float | None:
        """Receive a packet whose last bit arrives at `now_s`; returns when the receiver has it, None if it is dropped.

        Called in the order of arrival over all links of the receiver.
        """
        transmit_s = self.shape.transmit_s(size_bytes)
        if self.incoming.free_s <= now_s - transmit_s:
            self.incoming.free_s = now_s
            return now_s
        return self.incoming.admit(now_s - transmit_s, transmit_s, self.shape.queue_ms / 1e3)
