"""Bounds the connections of one address: gRPC bounds all of them together only, so one stranger could have them all.

gRPC tells nobody of its connections, so they are found among this process's own files, and the surplus is shut down.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from node.session.admission import weight_of
from swarm.base.logs import CountedLog, describe
from swarm.base.quota import address_key

PER_ADDRESS = 64
"""Connections of one address; a machine needs one or two, a household or an office some more."""
LOOK_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AcceptedConnection:
    """A connection from another machine.

    Attributes:
        file: its descriptor here; later connections mostly have higher ones.
        peer: the other end's IP address and port.
    """

    file: int
    peer: tuple[str, int]


def connections_to(port: int) -> list[AcceptedConnection]:
    """The open connections that others made to a port of this process."""
    found = psutil.Process().net_connections("tcp")
    return [
        AcceptedConnection(one.fd, (one.raddr[0], one.raddr[1]))
        for one in found
        if one.status == psutil.CONN_ESTABLISHED and one.laddr[1] == port and one.raddr and one.fd >= 0
    ]


def surplus(connections: Iterable[AcceptedConnection], per_address: int = PER_ADDRESS) -> list[AcceptedConnection]:
    """Those that are too many for their address: the latest go, so that what works goes on."""
    by_address: defaultdict[str, list[AcceptedConnection]] = defaultdict(list)
    for connection in sorted(connections, key=lambda one: one.file):
        by_address[address_key(connection.peer[0])].append(connection)
    return [one for key, own in by_address.items() for one in own[per_address * weight_of(key) :]]


def shut_down(connection: AcceptedConnection) -> None:
    """End a connection, if its file still is that connection."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.file)) as other:
        if other.getpeername()[:2] == connection.peer:
            other.shutdown(socket.SHUT_RDWR)


async def keep_connections_bounded(
    port: int,
    per_address: int = PER_ADDRESS,
    look_s: float = LOOK_S,
    shut_out: Callable[[], frozenset[str]] = frozenset,
) -> None:
    """Look every second, for ever; with few files open and nobody shut out there is nothing to look for.

    Args:
        port: where others connect to.
        per_address: connections of an address.
        look_s: between looks.
        shut_out: the addresses that are refused for what they did. Their connections are shut down too: each call that
            comes over one is work even where it is refused.
    """
    log = CountedLog(logger)
    process = psutil.Process()
    while True:
        await asyncio.sleep(look_s)
        try:
            refused = shut_out()
            if os.name == "posix" and process.num_fds() <= per_address and not refused:
                continue
            connections = await asyncio.to_thread(connections_to, port)
            unwanted = [one for one in connections if address_key(one.peer[0]) in refused]
            for connection in [*surplus(connections, per_address), *unwanted]:
                log.say(address_key(connection.peer[0]), f"shut down connections of {address_key(connection.peer[0])}")
                shut_down(connection)
        except Exception as trouble:  # noqa: BLE001 - a node serves on without this
            log.say("looking", f"cannot look at the connections: {describe(trouble)}")
