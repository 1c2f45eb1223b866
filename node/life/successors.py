"""The connection to the machine that comes next: only to one that the directory lists, and only where it may be.

A session's client names that machine and brings its signed record. Anyone can sign a record, so the record alone would
let a stranger choose whom this node calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count

import grpc.aio

from node.session.admission import DIALLED, SUCCESSORS
from node.session.context import HopDial
from swarm.base.errors import RegistryError, Unreachable
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.quota import Quota
from swarm.directory.dialable import DialPolicy
from swarm.directory.node_record import NodeRecord, claimed_peer, unseal
from swarm.directory.registry import KNOWN_S, RECENT_S, Registry
from swarm.directory.sealing import RecordError
from swarm.link.dial import Connection, Dialer
from swarm.protocol.messages import RouteHop

LISTED_S = 300.0
"""How long a machine counts as listed after the directory had it: the directory may take seconds, a repair may not."""
ASK_S = 4.0
"""How long a repair waits for the directory; the client tries another machine by then."""
MAX_LISTED = 4_096
MAX_TRIED = 64
"""Machines that one session may come back to without their counting as new."""

logger = logging.getLogger(__name__)
_numbers = count()


@dataclass(slots=True)
class Tried:
    """The machines that one session went on with.

    Attributes:
        owner: who pays for the session.
        peers: them, the latest last.
        key: the session, as the quota knows it: its id would not do, for a client may open it again and again.
    """

    owner: str
    peers: OrderedDict[PeerId, None] = field(default_factory=OrderedDict)
    key: str = field(default_factory=lambda: f"session {next(_numbers)}")

    def is_known(self, peer: PeerId) -> bool:
        """Whether the session went on with it before."""
        if peer not in self.peers:
            return False
        self.peers.move_to_end(peer)
        return True

    def add(self, peer: PeerId) -> None:
        """It goes on with this machine."""
        self.peers[peer] = None
        if len(self.peers) > MAX_TRIED:
            self.peers.popitem(last=False)


class Successors:
    """Finds and dials the next machines of one node's sessions."""

    def __init__(
        self, registry: Registry, dialer: Dialer, policy: DialPolicy, identity: ModelIdentity, quota: Quota
    ) -> None:
        self._registry = registry
        self._dialer = dialer
        self._policy = policy
        self._identity = identity
        self._quota = quota
        self._listed: OrderedDict[PeerId, float] = OrderedDict()
        self._asking = asyncio.Lock()

    def note_listed(self, records: Iterable[NodeRecord]) -> None:
        """The directory has these machines now."""
        now = time.monotonic()
        for record in records:
            self._listed[record.peer] = now
            self._listed.move_to_end(record.peer)
        while len(self._listed) > MAX_LISTED:
            self._listed.popitem(last=False)

    def is_listed(self, peer: PeerId) -> bool:
        """Whether the directory had this machine lately."""
        return time.monotonic() - self._listed.get(peer, float("-inf")) < LISTED_S

    def of_session(self, owner: str) -> HopDial:
        """How a session that `owner` pays for comes to its next machines."""
        tried = Tried(owner)
        return lambda hop, records, stuck: self.dial(hop, records, tried, stuck)

    async def dial(
        self, hop: RouteHop, records: Iterable[bytes], tried: Tried, stuck: grpc.aio.Channel | None = None
    ) -> Connection:
        """The connection to a hop at the address of its own signed record and nowhere else.

        Args:
            records: signed ones that the client passed on: with one of a listed machine the directory is not asked.
            tried: whom this session went on with so far.
            stuck: a connection on which nothing comes through any more; another one is made.

        Raises:
            Unreachable: it has no such record, is not listed, may not be dialled, or is one of too many.
        """
        if not tried.is_known(hop.peer):
            if not (self._quota.spend(SUCCESSORS, tried.key) and self._quota.spend(DIALLED, tried.owner)):
                raise Unreachable(hop.peer, str(hop.span), "too many new machines were tried in a minute")
            tried.add(hop.peer)
        record = self._carried(hop, records) if self.is_listed(hop.peer) else None
        record = record or await self._find(hop)
        if record is None:
            raise Unreachable(hop.peer, str(hop.span), "has no valid record in the registry")
        address = await self._policy.resolve(record.address)
        if address is None:
            raise Unreachable(hop.peer, str(hop.span), "lists an address that this node does not call")
        endpoint = replace(record.endpoint, address=address)
        channel, is_cold = self._dialer.channel(endpoint, stuck), self._dialer.was_cold(endpoint)
        return Connection(channel, endpoint, is_cold, self._dialer.is_member)

    def _carried(self, hop: RouteHop, records: Iterable[bytes]) -> NodeRecord | None:
        """The hop's own record among those that the client brought; only its signature is checked."""
        for data in records:
            if claimed_peer(data) != hop.peer:
                continue
            try:
                record = unseal(data, time.time())
            except RecordError:
                continue
            if record.model.fingerprint == self._identity.fingerprint and record.span.contains(hop.span):
                return record
        return None

    async def _find(self, hop: RouteHop) -> NodeRecord | None:
        """The hop's record in the directory: in its last answer, else in a new one."""
        try:
            async with asyncio.timeout(ASK_S), self._asking:  # a flood of unknown machines shares one question
                fingerprint, num_layers = self._identity.fingerprint, self._identity.num_layers
                for within_s in (KNOWN_S, RECENT_S):
                    records = await self._registry.records(fingerprint, num_layers, within_s=within_s)
                    self.note_listed(records)
                    for record in records:
                        if record.peer == hop.peer and record.span.contains(hop.span):
                            return record
        except (RegistryError, TimeoutError) as error:
            logger.info("the directory did not say where %s is: %s", hop.peer, error or "no answer in time")
        return None
