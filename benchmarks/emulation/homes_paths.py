"""Which path two machines of a small Internet use, as the kernel knows it: by the ends of their connections."""

from __future__ import annotations

from enum import StrEnum

from benchmarks.emulation.homes import HomesNetwork


class HomesPath(StrEnum):
    """How a connection reaches its machine."""

    DIRECT = "direct"
    MAPPED = "mapped"
    CALLED_BACK = "called back"
    PUNCHED = "punched"
    LAN = "LAN"
    RELAYED = "relayed"


async def path_between(world: HomesNetwork, near: str, far: str) -> HomesPath:
    """The best path of the connections between two machines; relayed where no connection joins them."""
    ends = [_host(other) for _, other in await world.connections(near)]
    if world.public_address(near) == world.public_address(far) and world.address(far) in ends:
        return HomesPath.LAN
    back = [_host(other) for _, other in await world.connections(far)]
    if world.public_address(far) in ends and world.public_address(near) in back:
        return HomesPath.DIRECT
    return HomesPath.RELAYED


def _host(end: str) -> str:
    return end.rpartition(":")[0].strip("[]").removeprefix("::ffff:")
