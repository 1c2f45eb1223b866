"""The spans that one machine serves on one port: which of them a call is for. Owns no session.

An attach names its model's fingerprint; later calls name the session alone.
"""

from __future__ import annotations

import asyncio
from typing import Final

from node.session.hop_session import HopSession
from node.session.settle import show
from node.session.table import SessionTable
from swarm.base.ids import SessionId
from swarm.base.tasks import TaskScope
from swarm.protocol import wire
from swarm.protocol.manifest import Manifest
from swarm.protocol.messages import Show, Shown, ShowReply
from swarm.trust.receipt import opened

MODEL: Final = "canopy-model"
"""Metadata of a call that is about one of several models: its fingerprint."""


class ServedSpans:
    """By the fingerprints of their models. One that moves, pauses or leaves stays, and refuses for its own reason."""

    def __init__(self) -> None:
        self._tables: dict[str, SessionTable] = {}
        self._manifests: dict[str, bytes] = {}

    def put(self, fingerprint: str, sessions: SessionTable, manifest: Manifest) -> None:
        """Serve a span, or another one of the same model in its place."""
        self._tables[fingerprint] = sessions
        self._manifests[fingerprint] = wire.encode_manifest(manifest)

    def table(self, fingerprint: str | None) -> SessionTable:
        """The sessions of a model; of one that is not served, those of the first, which refuses it."""
        first = next(iter(self._tables))
        return self._tables[fingerprint if fingerprint in self._tables else first]

    def manifest(self, fingerprint: str | None) -> bytes:
        """The list of a model's weight files, encoded; of one that is not served, the first one's."""
        first = next(iter(self._manifests))
        return self._manifests[fingerprint if fingerprint in self._manifests else first]

    def find(self, session: SessionId) -> HopSession | None:
        """The session of this name, of whichever model, unless it is over."""
        found = (table.find(session) for table in self._tables.values())
        return next((hop for hop in found if hop is not None), None)

    def settled(self, session: SessionId) -> bytes | None:
        """What was signed of a session that is over."""
        found = (table.settled.sealed(session) for table in self._tables.values())
        return next((sealed for sealed in found if sealed is not None), None)

    def receipt(self, sealed: bytes) -> None:
        """Take what a client signed for, with the model that it names.

        Raises:
            RemoteProtocolError: the session is not of this node, or did not compute so much here.
        """
        receipt = opened(sealed)
        self.table(receipt.fingerprint).take_receipt(receipt, sealed)

    def show(self, asked: Show) -> ShowReply:
        """Leaves or rows of a session that was settled, whether or not it is over."""
        hop = self.find(asked.session)
        if hop is not None:
            return show(asked, hop.commitments, hop.journal)
        found = (table.settled.show(asked) for table in self._tables.values())
        return next((one for one in found if one.state is not Shown.UNKNOWN), ShowReply(Shown.UNKNOWN))

    async def find_tail(self, session: SessionId, seconds: float) -> HopSession | None:
        """The session, if it ends here or comes to within so many seconds."""
        found: asyncio.Future[HopSession] = asyncio.get_running_loop().create_future()

        async def look(table: SessionTable) -> None:
            hop = await table.find_tail(session, seconds)
            if hop is not None and not found.done():
                found.set_result(hop)

        if len(self._tables) == 1:
            return await self.table(None).find_tail(session, seconds)
        async with TaskScope() as scope:
            looking = {scope.spawn(look(table)) for table in self._tables.values()}
            while looking and not found.done():
                _, looking = await asyncio.wait(looking, return_when=asyncio.FIRST_COMPLETED)
        return found.result() if found.done() else None
