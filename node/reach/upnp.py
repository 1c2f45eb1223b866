"""UPnP: a router's port by `miniupnpc`, where that is installed. The library blocks, so it runs on threads."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from node.reach.ladder import NoMapping
from node.reach.ports import Mapping

DISCOVER_MS: Final = 500
PORTS_TRIED: Final = 5
"""External ports that are tried where one is taken."""
DESCRIPTION: Final = "canopy"


class UpnpRouter:
    """The gateway that answers in this machine's network."""

    name = "UPnP"

    def __init__(self, internal_port: int) -> None:
        self._internal = internal_port
        self._gateway: Any = None
        self._external = 0
        self._is_wanted = True

    async def map(self, external_port: int, lifetime_s: int) -> Mapping:
        """Ask for the mapping, or renew it.

        Raises:
            NoMapping: the library is not installed, no router answers, or it refuses.
        """
        self._is_wanted = True
        try:
            return await asyncio.to_thread(self._map, external_port, lifetime_s)
        except asyncio.CancelledError:
            self._is_wanted = False  # the thread goes on until it looks
            raise

    async def holds(self) -> bool:
        """Ask whether it has the mapping, and the same address outside."""
        return await asyncio.to_thread(self._holds)

    async def unmap(self) -> None:
        """Delete the mapping."""
        if self._gateway is not None and self._external:
            await asyncio.to_thread(self._call, "deleteportmapping", self._external, "TCP")

    def _map(self, external_port: int, lifetime_s: int) -> Mapping:
        if self._gateway is None:
            self._gateway = _discover()
        for port in range(external_port, min(external_port + PORTS_TRIED, 65_536)):
            for lease_s in (lifetime_s, 0):  # some routers know permanent ones only
                if not self._is_wanted:
                    raise NoMapping("another protocol was faster")
                try:
                    added = self._call(
                        "addportmapping", port, "TCP", self._gateway.lanaddr, self._internal, DESCRIPTION, "", lease_s
                    )
                except NoMapping:
                    continue
                if added:
                    self._external = port
                    self._host = str(self._call("externalipaddress"))
                    return Mapping(self._host, port, lease_s or lifetime_s, self.name)
        raise NoMapping("the router refuses")

    def _holds(self) -> bool:
        found = self._call("getspecificportmapping", self._external, "TCP")
        is_own = bool(found) and tuple(found[:2]) == (self._gateway.lanaddr, self._internal)
        return is_own and str(self._call("externalipaddress")) == self._host

    def _call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - the library is untyped
        try:
            return getattr(self._gateway, method)(*arguments)
        except Exception as error:  # the library raises bare ones
            raise NoMapping(f"the router refuses: {str(error)[:100]}") from error


def _discover() -> Any:  # noqa: ANN401 - the library is untyped
    try:
        import miniupnpc
    except ImportError:
        raise NoMapping("not tried: pip install 'canopy-swarm[upnp]' adds it") from None
    gateway = miniupnpc.UPnP()
    gateway.discoverdelay = DISCOVER_MS
    try:
        gateway.discover()
        gateway.selectigd()
    except Exception as error:
        raise NoMapping("no router answers") from error
    return gateway
