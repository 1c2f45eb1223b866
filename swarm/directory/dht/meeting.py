"""Which swarm a machine comes into: what the peers that it is to join through say, before it speaks to any of them.

Addresses come from an invite, from `--join`, from the environment and from memory, and a peer may be of another swarm
by now. All are asked at once. Those of the swarm that is meant are joined through, the others are left out: a machine
that joined both would make one swarm of two. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swarm.base.errors import SwarmError
from swarm.base.ids import SwarmId, shown_swarm
from swarm.directory.dht.addresses import NOBODY_ANSWERS, ListenAddresses


class OtherSwarm(SwarmError):
    """The peers that answer are of another swarm than the one that is meant, or of several."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Which swarm is joined.

    Attributes:
        swarm: its id; None where no peer says one.
        listen: the peers to join through.
        others: peers that are left out: of which swarm they are, and their addresses.
        alive: those of the peers to join through that answered; hivemind would wait for each of the others.
    """

    swarm: SwarmId | None
    listen: ListenAddresses
    others: tuple[tuple[SwarmId, str], ...] = ()
    alive: tuple[str, ...] = ()


def meet(
    listen: ListenAddresses, meant: SwarmId | None, said: Mapping[str, SwarmId | None], *, is_certain: bool
) -> Meeting:
    """Decide which swarm is joined, and through whom.

    Args:
        said: per address whose peer answered, of which swarm it is.
        is_certain: whether peers that were typed cannot mean another one.

    Raises:
        OtherSwarm: they are of another swarm, or those that were typed are of two.
    """
    if not listen.join:
        return Meeting(meant, listen)
    sources = listen.sources or ((0, ""),) * len(listen.join)
    rank = dict(zip(listen.join, (rank for rank, _ in sources), strict=True))
    first = min((rank[one] for one in said), default=min(rank.values()))
    if said and first > 0 and meant is None and 0 in rank.values():
        raise OtherSwarm(f"{NOBODY_ANSWERS} {', '.join(one for one in listen.join if rank[one] == 0)}")
    known, told = meant, [said[one] for one in listen.join if one in said and rank[one] == first]
    if meant is None or (first == 0 and not is_certain and any(told) and meant not in told):
        known = None
        meant = next((swarm for swarm in told if swarm is not None), None)

    def is_of_it(one: str) -> bool:
        """Who says no id, or nothing, is of the swarm that is meant where its place in the list says so."""
        swarm = said.get(one)
        return swarm == meant if swarm is not None else known is not None or rank[one] == first

    left_out = [one for one in listen.join if not is_of_it(one)]
    typed = [one for one in left_out if rank[one] == 0 and one in said]
    if typed or (said and not any(map(is_of_it, said))):
        raise _refused(listen, meant, said, next(iter(typed), next(iter(said))))
    kept = [(one, source) for one, source in zip(listen.join, sources, strict=True) if is_of_it(one)]
    joined = replace(listen, join=tuple(one for one, _ in kept), sources=tuple(source for _, source in kept))
    others = tuple((other, one) for one in left_out if (other := said.get(one)) is not None)
    return Meeting(meant, joined, others, tuple(one for one in joined.join if one in said))


def _refused(
    listen: ListenAddresses, meant: SwarmId | None, said: Mapping[str, SwarmId | None], one: str
) -> OtherSwarm:
    """One line that names both swarms."""
    texts = dict(zip(listen.join, (text for _, text in listen.sources), strict=False))
    place = f"{one} ({texts[one]})" if texts.get(one) else one
    return OtherSwarm(
        f"the peer at {place} is of {shown_swarm(said[one])}, and {shown_swarm(meant)} is to be joined: two swarms are "
        "never made one, so name peers of one"
    )
