"""What the tail alone has to know of a session, as the client tells it itself (P17). Pure; sends nothing.

A new tail hears first what was so before the sweeps that are unanswered: tokens that are committed or live, and how to
pick. Whatever machine gives it the structure, that is no older: so the tail finds a token for each node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from swarm.protocol.limits import MAX_TELL_NODES
from swarm.protocol.messages import Sweep, Tell
from swarm.protocol.session import SessionState


class TellLog:
    """One session's log, as far as a tail has to be told it."""

    def __init__(self, state: SessionState) -> None:
        """Begin with a session's state, before what is noted first."""
        self._before = state.copied()
        self._sweeps: deque[Sweep] = deque()

    def note(self, sweep: Sweep) -> None:
        """A sweep leaves now."""
        self._sweeps.append(sweep)
        while self._sweeps[0].sequence <= sweep.acked:
            self._before.apply(self._sweeps.popleft())

    def all(self) -> Iterator[Tell]:
        """What a tail has to know that knows nothing."""
        yield from parts_of(_tell_of_state(self._before))
        for sweep in self._sweeps:
            yield from parts_of(tell_of(sweep))


def tell_of(sweep: Sweep) -> Tell:
    """What the tail has to know of a sweep."""
    return Tell(sweep.sequence, sweep.nodes, sweep.tokens, sweep.sampling, sweep.want, sweep.guesses)


def parts_of(tell: Tell) -> Iterator[Tell]:
    """The same in parts of at most `MAX_TELL_NODES` nodes and guesses; a small one is its own part."""
    most = MAX_TELL_NODES
    count = max(len(tell.ids), len(tell.guesses))
    for start in range(0, max(count, 1), most):
        end = start + most
        ids, tokens, guesses = tell.ids[start:end], tell.tokens[start:end], tell.guesses[start:end]
        part = replace(tell, ids=ids, tokens=tokens, guesses=guesses)
        yield part if end >= count else replace(part, sampling=None, want=None, has_more=True)


def _tell_of_state(state: SessionState) -> Tell:
    nodes = [(one.id, one.token) for one in state.committed]
    nodes += [(node, one.token) for node, one in state.live.items()]
    ids, tokens = zip(*nodes, strict=True) if nodes else ((), ())
    return Tell(state.sequence, ids, tokens, state.sampling)
