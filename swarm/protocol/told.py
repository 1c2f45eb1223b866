"""What the tail of a chain hears of its session from the client itself: tokens, and how to pick (P17). Pure.

    the chain   structure: ids, parents, what is committed, rows
    the client  the tokens of the same nodes, sampling, guesses, what is wanted beside picks

Either may come first. What came early is kept until the other comes, within the session's credits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.protocol.messages import Sampling, Snapshot, Sweep, Tell, Want
from swarm.protocol.pick_rules import DraftDistribution
from swarm.protocol.session import Limits, SessionState


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a sweep says beside its nodes."""

    sampling: Sampling | None = None
    want: Want | None = None
    guesses: tuple[DraftDistribution, ...] = ()


class Told:
    """What the client said, and the chain has not brought yet.

    Attributes:
        sequence: of the last sweep of which all was said; None while nothing is known of the session.
    """

    def __init__(self, *, is_new: bool) -> None:
        """Begin with no tells received.

        Args:
            is_new: the session begins, so nothing came before its first sweep.
        """
        self.sequence: int | None = 0 if is_new else None
        self._tokens: dict[TreeNodeId, int] = {}
        self._asked: dict[int, _Settings] = {}
        self._guesses: dict[int, DraftDistribution] = {}
        self._part_of: int | None = None
        self._sampling = Sampling()

    def take(self, tell: Tell, limits: Limits) -> bool:
        """Keep what the client says; what it said before is dropped. Whether all of a sweep is known by it.

        Raises:
            RemoteProtocolError: it says more than the session may hold, or of what the model has not.
        """
        if self.sequence is not None and tell.sequence <= self.sequence:
            return False
        _check(tell, limits)
        if self._part_of != tell.sequence:
            self._part_of, self._guesses = tell.sequence, {}
        self._tokens.update(zip(tell.ids, tell.tokens, strict=True))
        if tell.guesses:
            self._guesses |= {guess.offset: guess for guess in tell.guesses}
        if not tell.has_more:
            guesses = tuple(self._guesses[offset] for offset in sorted(self._guesses)) if self._guesses else ()
            self._asked[tell.sequence] = _Settings(tell.sampling, tell.want, guesses)
            self.sequence, self._part_of, self._guesses = tell.sequence, None, {}
        if len(self._tokens) > limits.window_tokens + 3 * limits.nodes or len(self._asked) > 2 * limits.sweeps + 1:
            raise RemoteProtocolError("tell", "the client says more than the session may hold")
        return not tell.has_more

    def covers(self, sequence: int) -> bool:
        """Whether all was said of the sweeps up to this one."""
        return self.sequence is not None and sequence <= self.sequence

    def covers_all(self, snapshot: Snapshot) -> bool:
        """Whether all was said of a snapshot's nodes. One that is older than what the client said waits for another."""
        return self.covers(snapshot.sequence) and all(node in self._tokens for node in snapshot.ids)

    def join(self, sweep: Sweep) -> Sweep:
        """A sweep as the client made it, from its structure.

        Raises:
            RemoteProtocolError: what the client said of it is of other nodes.
        """
        if any(node not in self._tokens for node in sweep.nodes):
            raise RemoteProtocolError("tell", f"names other nodes than sweep {sweep.sequence} has")
        asked = self._asked.pop(sweep.sequence, _Settings())
        if any(guess.offset >= sweep.count for guess in asked.guesses):
            raise RemoteProtocolError("guesses", "are of nodes that the sweep has not")
        self._sampling = asked.sampling or self._sampling
        tokens = tuple(self._tokens.pop(node) for node in sweep.nodes)
        return replace(sweep, tokens=tokens, sampling=asked.sampling, want=asked.want, guesses=asked.guesses)

    def remember(self, state: SessionState) -> None:
        """A snapshot takes the place of this state: its tokens may be wanted once more."""
        known = [(one.id, one.told) for one in state.committed]
        known += [(node, one.told) for node, one in state.live.items()]
        self._tokens = {node: token for node, token in known if token is not None} | self._tokens

    def fill(self, snapshot: Snapshot, state: SessionState) -> tuple[Sweep, ...]:
        """Put tokens into the state that a snapshot of structure describes, and say how to pick from there on.

        Returns:
            the snapshot's headers with what the client asked for; what replies lack that it holds is not wanted.

        Raises:
            RemoteProtocolError: the tokens break a rule.
        """
        earlier = sorted(sequence for sequence in self._asked if sequence <= snapshot.sequence)
        asked = {sequence: self._asked.pop(sequence) for sequence in earlier}
        self._sampling = _last(self._sampling, (asked[sequence].sampling for sequence in earlier))
        state.tell(self._tokens, self._sampling)
        self._tokens = {node: token for node, token in self._tokens.items() if node >= snapshot.next_id}
        return tuple(
            replace(header, want=asked[header.sequence].want) if header.sequence in asked else header
            for header in snapshot.headers
        )


def _last(sampling: Sampling, later: Iterable[Sampling | None]) -> Sampling:
    for one in later:
        sampling = one or sampling
    return sampling


def _check(tell: Tell, limits: Limits) -> None:
    """That it names nothing that the model has not."""
    if max((max(tell.tokens, default=0), *(max(one.tokens) for one in tell.guesses))) >= limits.vocab_size:
        raise RemoteProtocolError("tokens", "one is outside the vocabulary")
    if tell.sampling is not None and (problem := tell.sampling.beyond(limits.vocab_size)) is not None:
        raise RemoteProtocolError("sampling", " ".join(problem))
