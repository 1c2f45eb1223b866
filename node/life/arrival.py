"""How a node comes to be in the directory, and to be reached: before the model is found, and again while it serves.

    join the directory → is the identity free? → answer Hello → climb the ladder → join anew, if the way in asks for it

A machine that nobody can dial takes part in the DHT as a client: others would wait for it in vain. Whoever can be
dialled is a server.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Final

import grpc.aio

from node.life.duplicate_identity import check_alone
from node.life.reach.circuits import Circuits, LocalServer
from node.life.reach.hello import HelloOnly
from node.life.reach.ladder import Ladder, Reached, Rungs, Whereabouts, candidates, is_public_swarm, knows_ipv6_alone
from node.life.reach.punch import PunchAnswerer
from node.life.reach.standing import PunchRequest, Standing, StandingOptions
from node.life.reach.watch import Senses, Sight
from node.model.config import ServeConfig
from node.model.loading import Say
from swarm.base.errors import ConfigError, RegistryError, SwarmError
from swarm.base.ids import shown_swarm
from swarm.base.tasks import TaskScope, unending
from swarm.directory.address_proof import NONCE_BYTES, check_hello
from swarm.directory.dht.addresses import DhtConfig, free_port
from swarm.directory.dht.dialback import call_hello
from swarm.directory.dht.registry import DhtRegistry
from swarm.directory.dialable import DialPolicy, behind_router, interface_addresses
from swarm.directory.node_record import NodeRecord, Reach
from swarm.directory.registry import Registry, RelayOffer
from swarm.link.certificate import ServerCertificate
from swarm.link.egress.streams import bracketed, connect
from swarm.link.endpoint import Endpoint, is_loopback
from swarm.reach.gateway.messages import PCP_NONCE_BYTES
from swarm.reach.gateway.ports import NoMapping, PcpRouter, PmpRouter, PortMapper, Router, UpnpRouter, default_gateways

REMEMBER_S: Final = 120.0
"""How often it is asked who lends a relay, also where none is needed now."""
ASK_AGAIN_S: Final = 2.0
"""Peers of a joined swarm that were all too busy to dial back are asked once more after so long."""


@dataclass(frozen=True, slots=True)
class BoundServer:
    """A gRPC server that has its port.

    Attributes:
        server: answers no call yet.
        port: its TCP port.
        certificate: with which it answers; None with `--insecure`.
    """

    server: grpc.aio.Server
    port: int
    certificate: ServerCertificate | None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A node that is in the directory and can be reached.

    Attributes:
        registry: its membership; another one than was given, where it joined anew.
        whereabouts: how it is reached; changes while it serves.
        left_behind: the record of an earlier run.
        scope: owns the node's background tasks.
        hello: answers Hello until the service does.
    """

    registry: Registry
    whereabouts: Whereabouts
    left_behind: NodeRecord | None
    scope: TaskScope
    hello: HelloOnly | None


class Arrival:
    """The steps. It lives on with the node: the watch climbs the same ladder."""

    def __init__(self, config: ServeConfig, say: Say, stack: AsyncExitStack, bound: BoundServer) -> None:
        self._config = config
        self._say = say
        self._stack = stack
        self._bound = bound
        self._registry: Registry | None = None
        self._scope: TaskScope | None = None
        self._standing: Standing | None = None
        self._mapper: PortMapper | None = None
        self._others: dict[int, PortMapper] = {}
        self._is_public = self._is_serving = False
        self._known_relays: list[RelayOffer] = []
        self._ladder: Ladder | None = None

    @property
    def registry(self) -> Registry:
        """The present membership."""
        assert self._registry is not None, "no directory was joined"
        return self._registry

    @property
    def standing(self) -> Standing | None:
        """Connections to relays, once one was needed."""
        return self._standing

    async def run(self, opened: Registry) -> Arrived:
        """Take the steps.

        Args:
            opened: joins when it is entered; a membership of the DHT may be replaced by one of another kind.

        Raises:
            SwarmError: the directory cannot be joined, or no peer reaches this machine.
        """
        config, stack, bound = self._config, self._stack, self._bound
        self._is_public = await is_public_swarm(config.join)
        is_client = self._expects_no_caller() and isinstance(opened, DhtRegistry)
        if is_client:
            opened = DhtRegistry.open(replace(config.dht(), client_mode=True))
        if config.join:
            self._say(f"joining: {len(config.join)} {'address is' if len(config.join) == 1 else 'addresses are'} tried")
        self._registry = await stack.enter_async_context(opened)
        if config.join:
            swarm = opened.swarm_id if isinstance(opened, DhtRegistry) else None
            self._say(
                f"joined{'' if swarm is None else f' {shown_swarm(swarm)}'}; others are asked to call this machine"
            )
        network = config.membership.network
        left_behind = await check_alone(self.registry, self._fallback(), insecure=config.insecure, network=network)
        self._scope = await stack.enter_async_context(TaskScope())
        hello = None
        if bound.certificate is None:
            self._say("insecure: links are plain text, and nobody but this machine is to use them")
            reached = Reached(config.announce_address or self._fallback(), Reach.DIRECT, "")
        else:
            hello = HelloOnly(self.registry.identity, bound.certificate.digest)
            bound.server.add_generic_rpc_handlers((hello,))
            await bound.server.start()
            stack.push_async_callback(bound.server.stop, None)
            reached = await self._climb_first()
        await self._join_for(reached, is_client=is_client)
        return Arrived(self.registry, Whereabouts(reached), left_behind, self._scope, hello)

    def senses(self) -> Senses:
        """What the watch asks, for a node that has arrived; who announces is left out."""
        assert self._ladder is not None, "the ladder was climbed"

        async def nobody() -> None:
            return None

        ladder, self._is_serving = self._ladder, True

        async def climb(quickly: bool) -> Reached:
            return await ladder.climb(quickly=quickly)

        return Senses(self.registry.peer_id, self._look, self._dial_back, climb, nobody, self._say)

    async def _climb_first(self) -> Reached:
        self._ladder = ladder = Ladder(self._rungs())
        try:
            reached = await ladder.climb()
        except ConfigError:
            for line in ladder.tried:
                self._say(line)
            raise
        return reached

    def _rungs(self) -> Rungs:
        config, egress = self._config, self.registry.egress
        return Rungs(
            peer=self.registry.peer_id,
            announced=config.announce_address,
            own=self._own,
            fallback=self._fallback(),
            is_first=not config.join,
            dial_back=self._dial_back,
            # A network that lets little out does not let a machine call itself through a relay.
            call_self=self._call_self if egress is None else self._dial_back,
            map_port=None if config.no_port_mapping else self._map_port,
            unmap=self._unmap,
            relays=None if config.relay == "off" else self._stand,
            is_narrow=egress is not None and egress.is_narrow,
        )

    def _own(self) -> list[str]:
        """Own addresses to ask about: as the DHT knows them first."""
        host, port = self._config.host, self._bound.port
        by_ipv6 = knows_ipv6_alone(self._config.join)
        own = candidates(host, port, interface_addresses(), only_public=self._is_public, prefers_ipv6=by_ipv6)
        fallback = self._fallback()
        if self._is_public and fallback not in own:
            return own
        others = [one for one in own if one != fallback]
        if by_ipv6 and others and others[0].startswith("["):
            return [others[0], fallback, *others[1:]][: len(own)]
        kept = others[: max(len(own) - 1, 0)]
        if kept:
            kept[-1] = others[-1]  # which may be the one of another family
        return [fallback, *kept]

    def _fallback(self) -> str:
        """Under which address others reach this machine if nothing is known: the DHT's, or an interface's own."""
        config = self._config
        if config.announce_address is not None:
            return config.announce_address
        host = config.host
        if host in ("0.0.0.0", "::"):
            listed = [address.split("/")[2] for address in self.registry.join_addresses()]
            host = next(iter([*listed, *map(str, interface_addresses())]), "127.0.0.1")
        return f"{bracketed(host)}:{self._bound.port}"

    def _expects_no_caller(self) -> bool:
        """Whether it is likely that nobody can dial in: a private machine that joins a public swarm."""
        config = self._config
        is_open = config.announce_address is not None or not config.join
        return self._is_public and not is_open and behind_router(interface_addresses())

    async def _dial_back(self, address: str) -> bool | None:
        certificate = self._bound.certificate
        assert certificate is not None, "nobody dials back in plain text"
        endpoint = Endpoint(self.registry.peer_id, address, certificate.der)
        verdict = await self.registry.dial_back(endpoint, secrets.token_bytes(NONCE_BYTES))
        if verdict is None and self._config.join and not self._is_serving:
            await asyncio.sleep(ASK_AGAIN_S)
            verdict = await self.registry.dial_back(endpoint, secrets.token_bytes(NONCE_BYTES))
        return verdict

    async def _call_self(self, address: str) -> bool:
        """Whether a relay leads here: this machine is its own caller."""
        certificate = self._bound.certificate
        assert certificate is not None, "nobody calls in plain text"
        endpoint, nonce = Endpoint(self.registry.peer_id, address, certificate.der), secrets.token_bytes(NONCE_BYTES)
        try:
            answer = await call_hello(endpoint, nonce)
        except (grpc.aio.AioRpcError, SwarmError):
            return False
        return check_hello(endpoint.peer, nonce, endpoint.digest, answer)

    async def _map_port(self) -> tuple[str, str]:
        if is_loopback(self._config.host) or not behind_router(interface_addresses()):
            raise NoMapping("no router lies between this machine and others")
        if self._mapper is None:
            self._mapper = self._new_mapper(self._bound.port)
        mapping = await self._mapper.open()
        return mapping.address, mapping.protocol

    async def _unmap(self) -> None:
        if self._mapper is not None:
            await self._mapper.close()

    async def map_other_port(self, port: int) -> str:
        """Have the router map another port of this machine, until the node ends; its external `host:port`.

        Raises:
            NoMapping: it does not.
        """
        mapper = self._others.get(port)
        if mapper is None:
            mapper = self._others[port] = self._new_mapper(port)
        mapping = mapper.mapping or await mapper.open()
        return mapping.address

    def _new_mapper(self, port: int) -> PortMapper:
        """Keeps a port mapped until the node ends."""
        assert self._scope is not None, "background work has an owner by now"
        mapper = PortMapper(port, lambda: self._routers(port))
        self._stack.push_async_callback(mapper.close)
        self._scope.spawn(unending(mapper.keep, "port mapping"))
        return mapper

    def _routers(self, port: int) -> list[Router]:
        routers: list[Router] = []
        gateways = list(map(str, default_gateways(interface_addresses())))
        for gateway in gateways:
            # The same in the next run, so that what this one may leave behind is its own.
            secret = self.registry.identity.sign(f"canopy-port-1\n{gateway} {port}".encode())
            nonce = hashlib.sha256(secret).digest()[:PCP_NONCE_BYTES]
            routers += [PcpRouter(gateway, port, nonce), PmpRouter(gateway, port)]
        # Its library asks by IPv4 alone, and complains on the terminal where that leads nowhere.
        return [*routers, UpnpRouter(port)] if gateways else routers

    def _stand(self) -> Standing:
        """Standing connections, begun when they are first needed."""
        if self._standing is None:
            assert self._scope is not None, "background work has an owner by now"
            config = self._config
            network = config.membership.network
            egress = self.registry.egress
            dial = connect if egress is None else egress.open_relay
            circuits = Circuits(LocalServer(config.host, self._bound.port), self._scope, dial=dial)
            punches = PunchAnswerer(circuits.adopt)

            async def punch(request: PunchRequest) -> None:
                await punches.answer(request.relay, request.token, request.addresses)

            options = StandingOptions(
                policy=DialPolicy(only_public=self._is_public and not config.allow_private),
                only=None if config.relay == "auto" else config.relay,
                on_punch=punch if egress is None else None,
                egress=egress,
                members=b"" if network is None else network.presence,
            )
            self._standing = Standing(self.registry.identity, circuits, self._relays, options)
            self._scope.spawn(unending(self._standing.run, "standing connections"))
        return self._standing

    async def _relays(self) -> list[RelayOffer]:
        """The relays that are lent; where nobody answers, those that were lent when somebody last did."""
        try:
            found = await self.registry.relays()
        except RegistryError:
            found = []
        self._known_relays = found or self._known_relays
        return self._known_relays

    async def remember_relays(self) -> None:
        """Know relays, for ever: when the way in is lost, the directory often is too, for a while."""
        while self._config.relay == "auto" and self._config.announce_address is None:
            await self._relays()
            await asyncio.sleep(REMEMBER_S)

    def _look(self) -> Sight:
        mapping = None if self._mapper is None else self._mapper.mapping
        is_wide = ip_address(self._config.host).is_unspecified if self._config.host != "localhost" else False
        return Sight(
            own=tuple(map(str, interface_addresses())) if is_wide else (),
            mapped=None if mapping is None else mapping.address,
            is_doubtful=self._mapper is not None and self._mapper.is_silent,
            relays=() if self._standing is None else self._standing.relays,
        )

    async def _join_for(self, reached: Reached, *, is_client: bool) -> None:
        """Take part in the DHT as the way in asks for: a client where nobody can dial in, else a server."""
        wants_client = reached.reach is Reach.RELAYED
        if wants_client == is_client or not isinstance(self.registry, DhtRegistry):
            return
        config = self._config.dht()
        if wants_client:
            return await self._rejoin(replace(config, client_mode=True))
        if reached.reach is Reach.MAPPED:
            return await self._join_mapped()
        await self._rejoin(config)

    async def _join_mapped(self) -> None:
        """Have the router map the DHT's port too; where it does not, a client is enough."""
        config = self._config.dht()
        port = config.port or free_port(6 if ":" in config.host else 4)
        try:
            mapping = await self._new_mapper(port).open()
        except NoMapping:
            return
        await self._rejoin(replace(config, port=port, announce_host=mapping.host, announce_port=mapping.port))

    async def _rejoin(self, config: DhtConfig) -> None:
        """Leave the DHT and join it otherwise, under the same identity.

        Raises:
            RegistryError: no peer answers any more.
        """
        await self.registry.aclose()
        self._registry = await self._stack.enter_async_context(DhtRegistry.open(config))
