"""The process that carries packets between the emulated hosts, each when its link's model says. Reads no payload.

`python -m benchmarks.emulation.packets SETUP` makes the hosts, prints a line that names their namespaces, then obeys
lines on standard input until it closes: `[number, verb, link, …]` is answered by `[number, {…}]` once it has taken
effect. The verbs are shape, cut, join, give (an address to the link's target) and load. A link is `[source, target]`,
with null for every host. Losses and jitter are seeded per link: its traffic alone decides what happens to it.
"""

from __future__ import annotations

import ctypes
import gc
import heapq
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

from benchmarks.emulation.namespaces import make_host, make_namespace
from client.tools.demo.link_shape import EmulatedLink, Ends, Interface, LinkShape, matching_links
from swarm.base.errors import SwarmError

SUBNET = "10.88.0"
PREFIX6 = "2600:1188"
"""Public addresses; nothing in the namespaces leads to who has them."""
IPV4, IPV6 = 4, 6
NETWORK6_BYTES = 8
BURST = 64
"""Packets read from one device before the ones that are due get their turn."""
PACKET_BYTES = 1 << 16
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29

QueuedPacket = tuple[float, int, EmulatedLink, int, bytes, bool]
"""Due time, number (a tie-break), link, receiver's device, packet, whether it has passed the receiver's interface."""


@dataclass(frozen=True, slots=True)
class CarrierSetup:
    """What the process is started with.

    Attributes:
        shape: Of every link, at the beginning.
        mtu: Of every interface, in bytes.
        subnet: The first three bytes of every host's IPv4 address, as `a.b.c`.
        ipv6: Whether the hosts have IPv6 addresses too.
        inner: How many namespaces to make besides, which are on no link.
    """

    hosts: int
    shape: LinkShape
    mtu: int
    seed: int
    subnet: str
    ipv6: bool = False
    inner: int = 0

    @classmethod
    def from_json(cls, text: str) -> CarrierSetup:
        fields = json.loads(text)
        return cls(**{**fields, "shape": LinkShape(**fields["shape"])})


def address(host: int, subnet: str = SUBNET) -> str:
    return f"{subnet}.{host + 1}"


def address6(host: int, network: int = 0) -> str:
    """An IPv6 address of a host: each has the networks 0 and 1, of 2**64 addresses each, and routes the second one."""
    return f"{PREFIX6}:{network}:{host + 1:x}::1"


def route_key(target: str) -> bytes:
    """What finds a packet's link: its IPv4 address, or the network of its IPv6 address."""
    ip = ip_address(target)
    return ip.packed if ip.version == IPV4 else ip.packed[:NETWORK6_BYTES]


class Carrier:
    """The links between the hosts; `devices[host]` is the host's TUN device."""

    def __init__(self, devices: Sequence[int], setup: CarrierSetup) -> None:
        self.packets = 0
        self.dropped = 0
        self._devices = devices
        self._waiting: list[QueuedPacket] = []
        self._numbers = itertools.count()
        self._cut: set[Ends] = set()
        outgoing = [Interface() for _ in devices]
        incoming = [Interface() for _ in devices]
        self._links: dict[Ends, EmulatedLink] = {}
        self._routes: dict[int, dict[bytes, tuple[EmulatedLink, int]]] = {device: {} for device in devices}
        for source, target in itertools.permutations(range(len(devices)), 2):
            chance = random.Random(f"{setup.seed}: {source} to {target}").random
            self._links[source, target] = EmulatedLink(setup.shape, outgoing[source], incoming[target], chance)
        for host in range(len(devices)):
            self._give(host, address(host, setup.subnet))
            for network in range(2) if setup.ipv6 else ():
                self._give(host, address6(host, network))

    def obey(self, verb: str, link: Sequence[int | None], *words: object) -> dict[str, float]:
        """Change links, and report what was carried so far."""
        source, target = link
        match verb, *words:
            case "shape", dict(shape):
                for ends in matching_links((source, target), self._links):
                    self._links[ends].shape = LinkShape(**shape)
            case ("cut",):
                self._cut.add((source, target))
            case ("join",):
                self._cut.discard((source, target))
            case "give", str(given) if target is not None:
                self._give(target, given)
            case ("load",):
                pass
            case _:
                raise ValueError(f"no such order: {verb} {words}")
        closed = {ends for cut in self._cut for ends in matching_links(cut, self._links)}
        for ends, changed in self._links.items():
            changed.is_open = ends not in closed
        return {"packets": self.packets, "dropped": self.dropped, "cpu_s": time.process_time()}

    def _give(self, host: int, given: str) -> None:
        """Carry what is sent to this address to this host."""
        key = route_key(given)
        mine = self._devices[host]
        for source, device in enumerate(self._devices):
            if source == host:
                self._routes[mine].pop(key, None)
            else:
                self._routes[device][key] = (self._links[source, host], mine)

    def take(self, device: int) -> None:
        """Read what a host has sent."""
        routes = self._routes[device]
        for _ in range(BURST):
            try:
                packet = os.read(device, PACKET_BYTES)
            except BlockingIOError:
                return
            version = packet[0] >> 4
            route = routes.get(packet[16:20] if version == IPV4 else packet[24:32] if version == IPV6 else b"")
            if route is None:
                continue  # multicast, strangers: nobody here
            link, target = route
            due_s = link.depart(time.monotonic(), len(packet)) if link.is_open else None
            if due_s is None:
                self.dropped += 1
            else:
                heapq.heappush(self._waiting, (due_s, next(self._numbers), link, target, packet, False))

    def deliver(self) -> float | None:
        """Hand over what is due; seconds until the next is, None if none waits."""
        waiting = self._waiting
        while waiting:
            early_s = waiting[0][0] - time.monotonic()
            if early_s > 0:
                return early_s
            due_s, number, link, target, packet, passed = heapq.heappop(waiting)
            done_s = due_s if passed or not link.is_open else link.arrive(due_s, len(packet))
            if done_s is None or not link.is_open:
                self.dropped += 1
            elif done_s > due_s:
                heapq.heappush(waiting, (done_s, number, link, target, packet, True))
            else:
                self.packets += 1
                with suppress(OSError):  # the receiver's kernel will not have it
                    os.write(target, packet)
        return None


def _serve(carrier: Carrier, devices: Sequence[int], orders: int) -> None:
    inputs = (*devices, orders)  # what was sent before an order was given goes by the old rules
    unread = b""
    while True:
        ready, _, _ = select.select(inputs, (), (), carrier.deliver())  # to the µs, where poll counts in ms
        for source in ready:
            if source != orders:
                carrier.take(source)
                continue
            read = os.read(orders, PACKET_BYTES)
            if not read:
                return
            *lines, unread = (unread + read).split(b"\n")
            for line in lines:
                number, *order = json.loads(line)
                _say(number, carrier.obey(*order))


def _say(number: int | None, answer: object) -> None:
    sys.stdout.write(json.dumps([number, answer]) + "\n")
    sys.stdout.flush()


def _addresses(host: int, setup: CarrierSetup) -> list[str]:
    """With their prefixes: all hosts are on one network."""
    return [f"{address(host, setup.subnet)}/24", *([f"{address6(host)}/32"] if setup.ipv6 else [])]


def _prefer() -> None:
    """Die with the parent; wake to the µs, and before the programs whose packets these are, where that is allowed."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_TIMERSLACK, 1)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()  # nothing here makes cycles


def main() -> None:
    setup = CarrierSetup.from_json(sys.argv[1])
    try:
        hosts = [make_host(_addresses(host, setup), setup.mtu) for host in range(setup.hosts)]
        inner = [make_namespace() for _ in range(setup.inner)]
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        _say(None, {"error": f"the hosts cannot be made: {str(reason).strip()}"})
        sys.exit(1)
    devices = [device for _, device in hosts]
    carrier = Carrier(devices, setup)
    _prefer()
    namespaces = [*(namespace for namespace, _ in hosts), *inner]
    _say(None, {"namespaces": [f"/proc/{os.getpid()}/fd/{namespace}" for namespace in namespaces]})
    with suppress(SwarmError, BrokenPipeError):
        _serve(carrier, devices, sys.stdin.fileno())


if __name__ == "__main__":
    main()
