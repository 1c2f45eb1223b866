"""What a relay dials: services of its own machine, and listed nodes, at addresses that somebody else has found good."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from swarm.discovery.node_record import split_address
from swarm.egress.lines import MAX_LINE_BYTES, words
from swarm.egress.segments import keep_segments_small
from swarm.errors import RemoteProtocolError
from swarm.relay.connection import RelayConnection
from swarm.relay.openings import MAX_HEADER_BYTES
from swarm.transport.relayed import parse_relayed

CONNECT_S: Final = 5.0
"""How long a connection may take."""


async def dial(address: str, source: str = "") -> RelayConnection:
    """A connection to `host:port`.

    Args:
        address: its host is an IP address.
        source: IPv4 address of this machine that it comes from, where the system allows it.

    Raises:
        OSError: nothing answers there.
        RecordError: it is no address.
    """
    host, port = split_address(address)
    host = host.strip("[]")
    if source and ":" not in host:
        try:
            return await _dial(host, port, source)
        except ConnectionRefusedError:
            raise
        except OSError:  # such as on macOS, which has one loopback address
            pass
    return await _dial(host, port, "")


async def dial_node(address: str) -> RelayConnection:
    """A connection to a node at `host:port`, or at `PEER.via.HOST:PORT` behind another relay; errors as of `dial`.

    Raises:
        RemoteProtocolError: that relay does not lead there.
    """
    relayed = parse_relayed(address)
    if relayed is None:
        return await dial(address)
    far = await dial(relayed.relay)
    try:
        await far.send(f"CONNECT {relayed.peer}:1 HTTP/1.1\r\n\r\n".encode())
        status = words(await far.read_line(MAX_LINE_BYTES))
        if status[1:2] != ["200"]:
            raise RemoteProtocolError("status", "that node's relay does not lead to it")
        await skip_headers(far)
    except BaseException:
        far.close()
        raise
    return far


async def skip_headers(connection: RelayConnection) -> None:
    """Read what stands behind CONNECT, or behind its answer; none of it matters.

    Raises:
        RemoteProtocolError: it is too long.
    """
    left = MAX_HEADER_BYTES
    while (line := await connection.read_line(left)).strip():
        left -= len(line)
        if left <= 0:
            raise RemoteProtocolError("opening", f"headers have at most {MAX_HEADER_BYTES} bytes")


async def _dial(host: str, port: int, source: str) -> RelayConnection:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setblocking(False)
        keep_segments_small(sock)
        if source:
            sock.bind((source, 0))
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return RelayConnection(sock, (host, port))
