"""Duplicate identity: another machine has a copy of this node's key file. It is found by the record that it wrote.

No stranger can sign such a record, so no stranger can make either check fail.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

import grpc.aio

from swarm.base.errors import IdentityError, SwarmError
from swarm.directory.address_proof import NONCE_BYTES, check_hello
from swarm.directory.dht.dialback import call_hello
from swarm.directory.node_record import NodeRecord
from swarm.directory.registry import RECORD_TTL_S, Registry
from swarm.directory.sealing import MAX_TTL_S
from swarm.link.network_key import NetworkKey

logger = logging.getLogger(__name__)


async def check_alone(
    registry: Registry, address: str, *, insecure: bool = False, network: NetworkKey | None = None
) -> NodeRecord | None:
    """Before this node listens: refuse to start while its identity is in use elsewhere.

    A record alone may be what an earlier run of this machine left behind, so its address is called, unless it is the
    one that this node has bound: no other program can listen there, and its own socket does not answer yet.

    Args:
        address: `host:port` of this node.

    Returns:
        What an earlier run left behind, if it has not expired.

    Raises:
        IdentityError: another machine answers under this identity.
    """
    found = await registry.mine()
    if found is not None and found.address != address and await _answers(found, insecure, network):
        raise _duplicate(found)
    return found


async def check_still_alone(
    registry: Registry, newest: Callable[[], NodeRecord], left_behind: NodeRecord | None = None
) -> None:
    """Before each later announcement: a record that expires after this run's last one is another machine's.

    The machine that has announced itself less often gives way; the other one says so and goes on.

    Args:
        newest: what this run announced last. It is asked once the directory has answered: this node may have changed
            its address and announced that while the directory was read.
        left_behind: what an earlier run of this machine left behind: with a clock that was set back since, it may
            expire later than what this run announces.

    Raises:
        IdentityError: another machine has served under this identity for longer.
    """
    found = await registry.mine()
    announced = newest()
    if found is None or found.expires_at <= announced.expires_at or found == left_behind:
        return
    if (announced.sequence, announced.address) <= (found.sequence, found.address):
        raise _duplicate(found)
    logger.warning("another machine, at %s, uses a copy of this node's identity file; stop it", found.address)


def next_expiry(now: float, *earlier: NodeRecord | None) -> float:
    """Until when the next record lives: longer than every earlier one, also after the clock was set back.

    Args:
        now: DHT time in seconds.
        earlier: what this run announced last, and what an earlier run left behind.

    Returns:
        DHT time in seconds; no further ahead than a record may expire, though then the DHT keeps the earlier one.
    """
    latest = max((record.expires_at for record in earlier if record is not None), default=0.0)
    return min(max(now + RECORD_TTL_S, latest + 0.01), now + MAX_TTL_S - 1.0)


async def _answers(found: NodeRecord, insecure: bool, network: NetworkKey | None) -> bool:
    nonce, endpoint = secrets.token_bytes(NONCE_BYTES), found.endpoint
    try:
        answer = await call_hello(endpoint, nonce, insecure=insecure, network=network)
    except (grpc.aio.AioRpcError, SwarmError):
        return False
    return check_hello(found.peer, nonce, endpoint.digest, answer)


def _duplicate(found: NodeRecord) -> IdentityError:
    return IdentityError(
        f"another machine, at {found.address}, already serves under this node's identity {found.peer}; "
        "give this one a key of its own with --identity FILE"
    )
