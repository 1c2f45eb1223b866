"""The parts of hivemind that a directory needs, its p2p daemon among them.

Only the DHT process imports this. `import hivemind` loads torch and scipy, which takes seconds and much
memory; its Kademlia and libp2p modules need neither, so their packages are entered without their `__init__`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

from swarm.directory.dht.addresses import ListenAddresses


def _enter_package(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"no package {name}")
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules[name] = package
    return package


os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
_enter_package("hivemind")
_utils = _enter_package("hivemind.utils")
_enter_package("hivemind.dht")
for _module, _names in {
    "logging": ["get_logger"],
    "serializer": ["MSGPackSerializer", "SerializerBase"],
    "timed_storage": ["get_dht_time"],
}.items():
    for _name in _names:
        setattr(_utils, _name, getattr(importlib.import_module(f"hivemind.utils.{_module}"), _name))

from hivemind.dht import node as node_module  # noqa: E402
from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.protocol import DHTProtocol, ValidationError  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.traverse import traverse_dht  # noqa: E402
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg  # noqa: E402
from hivemind.proto import dht_pb2, p2pd_pb2  # noqa: E402
from hivemind.utils.auth import AuthorizerBase  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

__all__ = [
    "DHTID",
    "AuthorizerBase",
    "DHTNode",
    "DHTProtocol",
    "Daemon",
    "Multiaddr",
    "P2PContext",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "ValidationError",
    "dht_pb2",
    "node_module",
    "traverse_dht",
]

_FIND_PEER_NS = 1_000_000_000
_DIE_WITH_PARENT = (
    "import ctypes,os,signal,sys;"
    "ctypes.CDLL(None).prctl(1,signal.SIGKILL);"  # 1 = PR_SET_PDEATHSIG
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);"
    "os.execv(sys.argv[2],sys.argv[2:])"
)


class Daemon(P2P):  # type: ignore[misc]  # hivemind is untyped
    """libp2p's daemon; on Linux the kernel kills it when this process dies, for whatever reason."""

    @staticmethod
    def _make_process_args(*args: object, **kwargs: object) -> list[str]:
        command: list[str] = P2P._make_process_args(*args, **kwargs)
        if sys.platform != "linux":
            return command
        return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]

    @classmethod
    def keep_sockets_in(cls, folder: str) -> None:
        """Put the daemon's control sockets into a private folder."""
        cls._UNIX_SOCKET_PREFIX = f"/unix{folder}/"

    async def wait_ended(self) -> None:
        """Return when the daemon has died."""
        await self._child.wait()

    async def hang_up(self, peer: PeerID) -> None:
        """Give up the connections to a peer, if there are any; whoever calls it next dials."""
        with suppress(P2PDaemonError, OSError, asyncio.IncompleteReadError):
            await self._client.disconnect(peer)

    async def addresses_of(self, peer: PeerID) -> list[str]:
        """Under which multiaddresses a peer said that it listens, without its id; none where the daemon has forgotten.

        A connected peer's are known to the daemon; of others it asks its own DHT. hivemind has no call for this.
        """
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.DHT,
            dht=p2pd_pb2.DHTRequest(type=p2pd_pb2.DHTRequest.FIND_PEER, peer=peer.to_bytes(), timeout=_FIND_PEER_NS),
        )
        reader, writer = await self._client.control.daemon_connector.open_connection()
        try:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
        finally:
            writer.close()
        return [str(Multiaddr(raw)) for raw in response.dht.peer.addrs]


async def start_daemon(listen: ListenAddresses, identity_path: str, start_s: float = 15.0) -> Daemon:
    """Start libp2p under this identity; `start_s` is for how long it may take."""
    options: dict[str, Any] = {"no_listen": True, "dht_mode": "client"} if listen.client else {"dht_mode": "server"}
    daemon: Daemon = await Daemon.create(
        initial_peers=list(listen.join) or None,
        host_maddrs=None if listen.client else list(listen.host),
        announce_maddrs=listen.announce,
        identity_path=identity_path,
        check_if_identity_free=False,
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
        startup_timeout=start_s,
        **options,
    )
    return daemon
