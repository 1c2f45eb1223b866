"""The walk, which verifies trees: a session's client side as a pure object (P3–P5).

    certain   deepest node whose token is certain: forced by the prompt, or the known pick of a certain parent
    pending   a token that was emitted and is not a tree node yet; the next sweep begins with it

From the certain node follow the target's picks while a child holds the picked token; the first pick without
a child is emitted too. Source: SpecExec (arXiv 2406.02532), algorithm 1; exact for any tree.

`hand_over_rows` passes the target's hidden rows from replies to the heads that draft with them. Rows that are missing
or late make worse drafts, never another text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from client.base.stats import TokenLogProbs
from client.draft.search.tree import DraftTree
from swarm.base.errors import LocalProtocolError, RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.compute.row_codec import decode_rows
from swarm.protocol.limits import BLOCK_TOKENS
from swarm.protocol.messages import Reply, Sampling, Sweep, Want
from swarm.protocol.pick_rules import DraftDistribution
from swarm.protocol.prefix import BlockNames
from swarm.protocol.session import Limits, Parent, SessionState


class Walk:
    """One sequence as its client sees it: makes sweeps, takes replies, emits tokens.

    Attributes:
        state: the rules that hops keep too.
        generation: of the route; written into sweeps.
        pending: see the module.
        want: what sweeps ask for beside picks.
        passed: nodes whose picks became certain with the last reply.
        log_probs: one per pick of `passed`, where they were asked for.
    """

    def __init__(
        self, limits: Limits, sampling: Sampling, begun: Sequence[int] = (), names: BlockNames | None = None
    ) -> None:
        """Begin a sequence.

        Args:
            limits: what the session may hold.
            sampling: how to pick.
            begun: tokens that it begins with (P15).
            names: of their blocks; it names those that follow. None where hops were not asked what they hold.
        """
        self.state = SessionState.begun(limits, begun, () if names is None else names.names)
        self._names = names
        self.generation = 0
        self.pending: int | None = None
        self.want: Want | None = None
        self.passed: tuple[TreeNodeId, ...] = ()
        self.log_probs: tuple[TokenLogProbs, ...] = ()
        self._sampling: Sampling | None = sampling
        self._certain: TreeNodeId | None = None
        self._forced_until = 0
        self._picks: dict[TreeNodeId, int] = {}
        self._log_probs: dict[TreeNodeId, TokenLogProbs] = {}
        self._answered: set[int] = set()
        self._acked = 0
        self._truncate_to: int | None = None
        self._committed_by: dict[int, int] = {}  # unanswered sweep → tokens that are committed with it
        self._held = len(begun)

    @property
    def held(self) -> tuple[int, ...]:
        """The committed tokens that every hop has for certain: it answered a sweep that came with or after them."""
        return tuple(token.token for token in self.state.committed[: self._held])

    @property
    def in_flight(self) -> int:
        """Sweeps that have no reply yet."""
        return self.state.sequence - self._acked - len(self._answered)

    @property
    def certain(self) -> TreeNodeId | None:
        """The deepest certain node, below which the tree grows: live, or the tip; None before the prompt."""
        return self._certain

    def child(self, parent: TreeNodeId, token: int) -> TreeNodeId | None:
        """The live node that holds `token` below the certain node or one below that."""
        return self.state.child(parent if parent in self.state.live else None, token)

    @property
    def room(self) -> int:
        """Nodes that the next sweep may hold, a pending token included (F1); 0 also when all sweeps are unanswered.

        While a pick is awaited one node is held back: the token that it brings needs a place, and nodes beside it die
        only when it is committed.
        """
        survivors = 0 if self._truncate_to is not None else len(self.state.below(self._commit_to))
        return max(0, self.state.room(survivors, self._acked) - self._awaits_pick)

    def restart(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Sweep | None, int]:
        """Go on with another prompt in the same session: the common prefix stays, the rest is cut off (P5).

        At least the prompt's last token runs again: it is pending now, and its pick is the text's next token.

        Returns:
            A sweep that commits what is certain, None if nothing is, and how many of the prompt's tokens are kept.
        """
        first = self.state.next_id
        commit = self._sweep((), (), picks_from=first) if self._commit_to is not None else None
        held = self.state.committed
        pairs = zip(held, prompt[:-1], strict=False)
        differing = (place for place, (ours, theirs) in enumerate(pairs) if ours.token != theirs)
        kept = next(differing, min(len(held), len(prompt) - 1))
        self._truncate_to = kept if self.state.sequence or held or self._names is not None else None
        self._certain = held[kept - 1].id if kept else None
        self._forced_until, self.pending = first, prompt[-1]
        self._sampling, self._picks, self._log_probs = sampling, {}, {}
        return commit, kept

    def prefill(self, chunk: Sequence[int], last: bool, rows: int = 0) -> Sweep:
        """Make the sweep that appends forced tokens; only the last chunk asks for a pick, after its last node.

        Args:
            chunk: the tokens.
            last: whether no further one follows.
            rows: of how many tokens, the last ones before that pick, the hidden rows are asked for.
        """
        assert chunk, "a chunk has tokens"
        first = self.state.next_id
        # The sweep commits what is certain, so its first node hangs from the tip.
        chain: list[Parent] = [None, *(TreeNodeId(first + offset) for offset in range(len(chunk) - 1))]
        want = Want(prompt_rows=rows) if rows else None
        sweep = self._sweep(tuple(chunk), tuple(chain), picks_from=first + len(chunk) - last, want=want)
        self._certain, self._forced_until = TreeNodeId(first + len(chunk) - 1), sweep.picks_from
        return sweep

    def extend(self, tree: DraftTree) -> Sweep:
        """Make the sweep that commits what is certain and appends the pending token and the tree below it."""
        assert self.pending is not None, "a sweep needs a token to start from"
        first = self.state.next_id
        parents: list[Parent] = [None]
        parents += [TreeNodeId(first + 1 + parent) if parent is not None else first for parent in tree.parents]
        sweep = self._sweep((self.pending, *tree.tokens), tuple(parents), picks_from=first, guesses=tree.guesses)
        self._certain, self.pending = first, None
        return sweep

    def grow(self, tokens: Sequence[int], parents: Sequence[TreeNodeId]) -> Sweep:
        """Make the sweep that commits what is certain and adds nodes to a tree whose picks may still be in flight.

        Legal while no token is pending; without nodes it only commits.

        Args:
            tokens: one per new node; new node i gets the id `state.next_id + i`.
            parents: of each new node: the certain node, a live node below it, or an earlier new node.

        Raises:
            LocalProtocolError: a parent is none of these.
        """
        assert self.pending is None, "the pending token comes first"
        first = self.state.next_id
        able = {self._certain, *self.state.below(self._commit_to)}
        for offset, parent in enumerate(parents):
            if parent not in able:
                raise LocalProtocolError(
                    "parents", f"node {parent} is not at or below the certain node {self._certain}"
                )
            able.add(TreeNodeId(first + offset))
        hung = tuple(None if parent == self._certain else parent for parent in parents)
        return self._sweep(tuple(tokens), hung, picks_from=first)

    def accept(self, reply: Reply) -> list[int]:
        """Take one reply (in any order, repeated or not) and return the tokens that became certain by it.

        Raises:
            RemoteProtocolError: it answers what was not asked, or lacks the pick that the sequence needs.
        """
        if not 0 < reply.sequence <= self.state.sequence:
            raise RemoteProtocolError("sequence", f"reply to sweep {reply.sequence}, which was never sent")
        for node, token in reply.picks:
            if not (0 <= node < self.state.next_id and 0 <= token < self.state.limits.vocab_size):
                raise RemoteProtocolError("picks", f"token {token} after node {node}")
        if reply.sequence > self._acked and reply.sequence not in self._answered:
            self._answered.add(reply.sequence)
            for node, token in reply.picks:
                self._picks.setdefault(node, token)
            self._note_log_probs(reply)
        while self._acked + 1 in self._answered:
            self._acked += 1
            self._answered.remove(self._acked)
            self._held = self._committed_by.pop(self._acked)
        emitted = self._follow()
        if self._lacks_pick():
            raise RemoteProtocolError("picks", f"none for node {self._certain}, which cannot be dead")
        return emitted

    def _lacks_pick(self) -> bool:
        if not self._awaits_pick or self._certain is None:
            return False
        live = self.state.live.get(self._certain)
        sequence = live.sequence if live is not None else self.state.committed[-1].sequence
        return sequence <= self._acked or sequence in self._answered

    @property
    def _awaits_pick(self) -> bool:
        return self.pending is None and self._certain is not None and self._certain >= self._forced_until

    @property
    def _commit_to(self) -> TreeNodeId | None:
        return self._certain if self._certain in self.state.live else None

    def _follow(self) -> list[int]:
        emitted: list[int] = []
        passed: list[TreeNodeId] = []
        while self.pending is None and self._certain is not None and self._certain in self._picks:
            token = self._picks[self._certain]
            emitted.append(token)
            passed.append(self._certain)
            child = self.state.child(self._commit_to, token)
            if child is None:
                self.pending = token
            else:
                self._certain = child
        self.passed = tuple(passed)
        self.log_probs = tuple(self._log_probs[node] for node in passed if node in self._log_probs)
        return emitted

    def _note_log_probs(self, reply: Reply) -> None:
        top = reply.top_log_probs or ((),) * len(reply.picks)
        for (node, token), value, best in zip(reply.picks, reply.log_probs or (), top, strict=False):
            if self._picks[node] == token:
                self._log_probs.setdefault(node, TokenLogProbs(token, value, best))

    def _sweep(
        self,
        tokens: tuple[int, ...],
        parents: tuple[Parent, ...],
        picks_from: int,
        guesses: tuple[DraftDistribution, ...] = (),
        want: Want | None = None,
    ) -> Sweep:
        truncate_to, commit_to = self._truncate_to, self._commit_to
        committed = len(self.state.committed) if truncate_to is None else truncate_to
        path = self.state.path_to(commit_to) if commit_to is not None else ()
        committed += len(path)
        sweep = Sweep(
            sequence=self.state.sequence + 1,
            committed=committed,
            first_id=self.state.next_id,
            tokens=tokens,
            parents=parents,
            picks_from=TreeNodeId(picks_from),
            generation=self.generation,
            acked=self._acked,
            truncate_to=truncate_to,
            commit_to=commit_to,
            sampling=self._sampling,
            guesses=guesses,
            names=self._name(committed, truncate_to, path),
            want=want or (self.want if picks_from < self.state.next_id + len(tokens) else None),
        )
        self._sampling = self._truncate_to = None
        self.state.apply(sweep)
        if truncate_to is not None:
            self._held = min(self._held, truncate_to)
            self._committed_by = {number: min(count, truncate_to) for number, count in self._committed_by.items()}
        self._committed_by[sweep.sequence] = sweep.committed
        alive = self.state.live
        self._picks = {node: token for node, token in self._picks.items() if node in alive}
        self._log_probs = {node: found for node, found in self._log_probs.items() if node in alive}
        return sweep

    def _name(self, committed: int, truncate_to: int | None, path: Sequence[TreeNodeId]) -> tuple[bytes, ...]:
        """The names of the blocks that are whole once so many tokens are committed."""
        if self._names is None:
            return ()
        if truncate_to is not None:
            self._names.truncate(truncate_to)
        named = len(self._names.names)
        if committed // BLOCK_TOKENS == named:
            return ()
        tokens = [token.token for token in self.state.committed[named * BLOCK_TOKENS : committed - len(path)]]
        return self._names.extend([*tokens, *(self.state.live[node].token for node in path)])


WANT_ROWS = Want(hidden_rows=True)

Observe = Callable[[Sequence[int], torch.Tensor], None]
"""Takes a sequence and the hidden rows [n, width] of its last n tokens."""


def hand_over_rows(reply: Reply, walk: Walk, sequence: Sequence[int], observe: Observe) -> None:
    """Pass on the rows of certain tokens in an accepted reply: the last run of tokens that follow one another.

    Args:
        reply: as the walk accepted it.
        walk: knows which nodes are certain.
        sequence: every certain token of the text.
        observe: takes the rows.

    Raises:
        RemoteProtocolError: a value is not finite.
    """
    if reply.rows is None:
        return
    places: list[int] = []
    end = 0
    for place, position in enumerate(positions_of_rows(reply, walk)):
        if position is None or position >= len(sequence):
            continue
        if position != end:
            places = []
        places.append(place)
        end = position + 1
    if places:
        rows = decode_rows(reply.rows, torch.float32)
        observe(sequence[:end], rows[places])


def positions_of_rows(reply: Reply, walk: Walk) -> list[int | None]:
    """Where in the text the tokens stand whose rows a reply brought; None for those that are not certain."""
    on_path = _live_path(walk)
    return [on_path.get(node, _committed_at(walk, node)) for node in reply.row_ids]


def _live_path(walk: Walk) -> dict[TreeNodeId, int]:
    """Positions of the live nodes that are certain."""
    certain = walk.certain
    if certain is None or certain not in walk.state.live:
        return {}
    return {node: walk.state.live[node].position for node in walk.state.path_to(certain)}


def _committed_at(walk: Walk, node: TreeNodeId) -> int | None:
    held = walk.state.committed
    place = bisect_left(held, node, key=lambda token: token.id)
    return place if place < len(held) and held[place].id == node else None
