"""What the nodes of one machine share where it serves several models: its port, its name in the directory, its memory.

A node of one model has a machine of its own. Owns no span.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc.aio

from node.life.report import NodeDescription, RefutedPeers
from node.session.admission import Admission
from node.session.spans import ServedSpans
from swarm.directory.node_record import NodeRecord


@dataclass(slots=True)
class SharedMachine:
    """One identity on one port.

    Attributes:
        models: how many it serves.
        spans: which session is whose.
        admission: what each address may cost all of them together.
        server: that answers on the port; None before the first span is served.
        newest: the record that was written last, of whichever model: each must expire later than the one before.
        sequence: its number.
        kv_bytes: what sessions of each model may take, by fingerprint; it is taken as they come.
        announce_again: writes the record of each model at once.
        descriptions: what is published of the node of each model.
        refuted: machines that it found wrong.
    """

    models: int = 1
    spans: ServedSpans = field(default_factory=ServedSpans)
    admission: Admission = field(default_factory=Admission)
    server: grpc.aio.Server | None = None
    newest: NodeRecord | None = None
    sequence: int = 0
    kv_bytes: dict[str, int] = field(default_factory=dict)
    announce_again: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    descriptions: list[NodeDescription] = field(default_factory=list)
    refuted: RefutedPeers = field(default_factory=RefutedPeers)

    @property
    def is_shared(self) -> bool:
        """Whether the port stays open while one model's span moves."""
        return self.models > 1

    def share_bytes(self, fingerprint: str, free_bytes: int) -> int:
        """What one model may have of the memory that is free now: its part beside those that are not loaded yet."""
        others = [taken for name, taken in self.kv_bytes.items() if name != fingerprint]
        return max(free_bytes - sum(others), 0) // max(self.models - len(others), 1)

    async def say_again(self) -> None:
        """Others reach this machine otherwise now."""
        for announce in self.announce_again:
            await announce()
