"""Which swarm a machine comes into: what the peers that it is to join through say, before it speaks to any of them.

Addresses come from an invite, from `--join`, from the environment and from memory, and a peer may be of another swarm
by now. All are asked at once. Those of the swarm that is meant are joined through, the others are left out: a machine
that joined both would make one swarm of two. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swarm.discovery.dht.addresses import NOBODY_ANSWERS, ListenAddresses
from swarm.errors import SwarmError
from swarm.ids import SwarmId, shown_swarm


class OtherSwarm(SwarmError):
    """The peers that answer are of another swarm than the one that is meant, or of several."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Which swarm is joined.

    Attributes:
        swarm: its id; None where no peer says one.
        listen: the peers to join through.
        others: peers that are left out: of which swarm they are, and their addresses.
    """

    swarm: SwarmId | None
    listen: ListenAddresses
    others: tuple[tuple[SwarmId, str], ...] = ()


def meet(
    listen: ListenAddresses, meant: SwarmId | None, said: Mapping[str, SwarmId | None], *, is_certain: bool
) -> Meeting:
    """Decide which swarm is joined, and through whom.

    Args:
        listen: whom to join.
        meant: the swarm that is meant, if that is known.
        said: per address whose peer answered, of which swarm it is.
        is_certain: whether peers that were typed cannot mean another one.

    Raises:
        OtherSwarm: they are of another swarm, or those that were typed are of two.
    """
    if not listen.join:
        return Meeting(meant, listen)
    sources = listen.sources or ((0, ""),) * len(listen.join)
    answered = [(rank, one) for one, (rank, _) in zip(listen.join, sources, strict=True) if one in said]
    first = min(rank for rank, _ in sources)
    if meant is None and first == 0 and answered and all(rank for rank, _ in answered):
        silent = [one for one, (rank, _) in zip(listen.join, sources, strict=True) if rank == 0]
        raise OtherSwarm(f"{NOBODY_ANSWERS} at {', '.join(silent)}")
    if meant is None or not is_certain:
        meant = _chosen(listen, answered, said, first, meant)
    others = tuple((other, one) for _, one in answered if (other := said[one]) not in (None, meant) and other)
    left_out = {one for _, one in others}
    typed = [one for rank, one in answered if rank == 0 and one in left_out]
    if typed or (answered and len(left_out) == len(answered)):
        raise _refused(listen, meant, said, (typed or sorted(left_out))[0])
    kept = [(one, source) for one, source in zip(listen.join, sources, strict=True) if one not in left_out]
    joined = replace(listen, join=tuple(one for one, _ in kept), sources=tuple(source for _, source in kept))
    return Meeting(meant, joined, others)


def _chosen(
    listen: ListenAddresses,
    answered: list[tuple[int, str]],
    said: Mapping[str, SwarmId | None],
    first: int,
    meant: SwarmId | None,
) -> SwarmId | None:
    """The swarm of those whose word counts most; what was typed is never overruled by what is remembered."""
    typed = dict.fromkeys(swarm for rank, one in answered if rank == 0 and (swarm := said[one]) is not None)
    if len(typed) > 1 and meant not in typed:
        one, two = list(typed)[:2]
        raise OtherSwarm(
            f"the peers at {listen.listed()} are of two swarms, {shown_swarm(one)} and {shown_swarm(two)}: "
            "name those of one"
        )
    if typed:
        return meant if meant in typed else next(iter(typed))
    if meant is not None:
        return meant
    if first == 0:
        return None  # nothing says that the others are of the swarm that was typed
    told = [swarm for _, one in sorted(answered, key=lambda each: each[0]) if (swarm := said[one]) is not None]
    return next(iter(told), None)


def _refused(
    listen: ListenAddresses, meant: SwarmId | None, said: Mapping[str, SwarmId | None], one: str
) -> OtherSwarm:
    """One line that names both swarms."""
    texts = dict(zip(listen.join, (text for _, text in listen.sources), strict=False))
    place = f"{one} ({texts[one]})" if texts.get(one) else one
    return OtherSwarm(
        f"the peer at {place} is of {shown_swarm(said[one])}, and {shown_swarm(meant)} is to be joined: two swarms are "
        "never made one; leave out what is of the other"
    )
