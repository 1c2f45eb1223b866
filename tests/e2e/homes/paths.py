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

    @property
    def seen_as(self) -> HomesPath:
        """What the ends of a connection tell of it: from there all that crosses the Internet once is direct."""
        return self if self in (HomesPath.LAN, HomesPath.RELAYED) else HomesPath.DIRECT

    @property
    def legs(self) -> int:
        """How often it crosses the Internet."""
        return {HomesPath.LAN: 0, HomesPath.RELAYED: 2}.get(self, 1)

    def fits(self, delay_ms: float, leg_ms: float) -> bool:
        """Whether a delay, one way, is that of so many legs: nearer to it than to one leg more or less."""
        return abs(delay_ms - self.legs * leg_ms) < leg_ms / 2


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
