"""The parts of hivemind that a directory needs: a Kademlia node, its p2p daemon, and the rules for what it stores.

Only `swarm.discovery.dht.process` imports this. `import hivemind` loads torch and scipy, which takes seconds and much
memory; its Kademlia and libp2p modules need neither, so their packages are entered without their `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgpack

from swarm.discovery.dht.addresses import ListenAddresses
from swarm.discovery.node_record import RecordError, open_filed
from swarm.discovery.registry import record_keys


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

from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.protocol import ValidationError  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.validation import DHTRecord, RecordValidatorBase  # noqa: E402
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID  # noqa: E402

__all__ = ["DHTID", "DHTNode", "Daemon", "P2PContext", "P2PDaemonError", "P2PHandlerError", "PeerID", "ValidationError"]

MAX_KEYS = 4_096
"""Storage keys that one DHT peer holds for others; those that expire first are dropped first."""

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


class RecordRules(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """What the DHT stores: sealed node records under their own keys and their signer's id, and nothing else."""

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record that another peer sent is valid; that it has not expired, its readers check."""
        try:
            peer, data = msgpack.unpackb(record.subkey), msgpack.unpackb(record.value)
            if not isinstance(data, bytes):
                return False
            sealed = open_filed(data, peer, record.expiration_time, time.time())
        except (RecordError, ValueError, RecursionError, msgpack.UnpackException):
            return False
        return any(DHTID.generate(key).to_bytes() == record.key for key in record_keys(sealed.record))


async def start_daemon(listen: ListenAddresses, identity_path: str) -> Daemon:
    """Start libp2p under this identity."""
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
        **options,
    )
    return daemon


async def start_node(daemon: Daemon, listen: ListenAddresses) -> DHTNode:
    """Join the DHT. Values are read from its peers each time: nothing is cached here."""
    node = await DHTNode.create(
        p2p=daemon,
        initial_peers=list(listen.join) or None,
        client_mode=listen.client,
        record_validator=RecordRules(),
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        reuse_get_requests=False,
    )
    node.protocol.storage.maxsize = MAX_KEYS
    node.protocol.cache.maxsize = MAX_KEYS
    return node


async def store(node: DHTNode, keys: Sequence[str], subkey: str, value: bytes, expires_at: float) -> bool:
    """Store one sealed record under all its keys.

    hivemind reports the last peer's answer alone, and a peer that got this very record from another peer refuses it, so
    a refusal is checked by reading.

    Args:
        node: the DHT node.
        keys: storage keys.
        subkey: the signer's peer id.
        value: the sealed record.
        expires_at: DHT time in seconds.

    Returns:
        Whether the record is stored under every key now.
    """
    taken = await node.store_many(list(keys), [value] * len(keys), expires_at, subkeys=[subkey] * len(keys))
    return all([done or value in await fetch(node, [key]) for (key, _), done in taken.items()])


async def fetch(node: DHTNode, keys: Sequence[str]) -> list[bytes]:
    """Every value under these keys, from all the peers that should hold them."""
    # "Sufficient" is NaN, which no expiry reaches: else one peer could end the search by claiming a late expiry.
    found = await node.get_many(list(keys), sufficient_expiration_time=math.nan)
    dictionaries = [entry.value for entry in found.values() if entry is not None and isinstance(entry.value, dict)]
    return [entry.value for dictionary in dictionaries for entry in dictionary.values()]
