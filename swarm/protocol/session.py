"""The session's rules (P1–P9): what one sweep does to a sequence and its tree of live nodes. Pure.

`SessionState` is a function of the client's log alone (P1): every hop and the client apply the same sweeps and reach
the same state, and all give the same verdict on a bad header (P8): on structure at every hop, on tokens where they are
known (P17). It knows nothing of KV, pruning or the network.

    committed[0 … n)   ids, tokens and sequences of committed tokens; ids rise
    live               uncommitted nodes in id order; a parent of None is the tip
    position           of a committed token: its index; of a live node: n + depth, fixed when it is appended
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from swarm.base.errors import ContextFull, RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.protocol.limits import BLOCK_TOKENS
from swarm.protocol.messages import Sampling, Snapshot, Sweep

Parent = TreeNodeId | None
"""Parent of a tree node; None is the tip, the last committed node."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session may hold.

    Attributes:
        vocab_size: token ids are below it.
        window_tokens: positions are below it.
        sweeps: unanswered sweeps at a time (F1).
        nodes: live nodes, and nodes of unanswered sweeps, at a time (F1).
    """

    vocab_size: int
    window_tokens: int
    sweeps: int
    nodes: int


@dataclass(frozen=True, slots=True)
class LiveNode:
    """An uncommitted tree node.

    Attributes:
        told: its token id; None where only structure is known (P17).
        parent: the node above it, None for the tip.
        sequence: of the sweep that appended it.
        position: committed tokens when it was appended, plus its depth below them.
    """

    told: int | None
    parent: Parent
    sequence: int
    position: int

    @property
    def token(self) -> int:
        """Its token id, at an end of the chain."""
        assert self.told is not None, "only the ends of a chain know tokens"
        return self.told


@dataclass(frozen=True, slots=True)
class CommittedToken:
    """A committed token.

    Attributes:
        id: of the tree node that it was.
        told: its token id; None where only structure is known (P17).
        sequence: of the sweep that appended the node.
    """

    id: TreeNodeId
    told: int | None
    sequence: int

    @property
    def token(self) -> int:
        """Its token id, at an end of the chain."""
        assert self.told is not None, "only the ends of a chain know tokens"
        return self.told


@dataclass(frozen=True, slots=True)
class Applied:
    """What one sweep changed, in order: truncate, commit, append.

    Attributes:
        truncated_to: committed length that was cut back to; None where nothing was cut.
        path: nodes that became committed, downwards from a child of the tip.
        survivors: nodes that stayed live, in id order.
        appended: new live nodes, in id order.
        positions: [len(appended)] their positions.
    """

    truncated_to: int | None
    path: tuple[TreeNodeId, ...]
    survivors: tuple[TreeNodeId, ...]
    appended: tuple[TreeNodeId, ...]
    positions: tuple[int, ...]


class SessionState:
    """One session's sequence and tree, advanced by sweeps.

    Attributes:
        limits: what it may hold.
        sequence: of the last sweep applied; 0 for none.
        acked: the client holds every reply up to this sequence.
        next_id: of the next node that is appended.
        sampling: how the tail picks from now on.
        committed: the committed tokens, in order.
        live: the live nodes, in id order.
        names: of blocks of committed tokens, from the first on, as far as the client gave them (P15).
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.sequence = 0
        self.acked = 0
        self.next_id = TreeNodeId(0)
        self.sampling = Sampling()
        self.committed: list[CommittedToken] = []
        self.live: dict[TreeNodeId, LiveNode] = {}
        self.names: list[bytes] = []
        self._children: dict[Parent, dict[int, TreeNodeId]] = {}  # parent → token → live child
        self._unanswered: dict[int, int] = {}  # sequence → number of its nodes

    @classmethod
    def begun(cls, limits: Limits, tokens: Sequence[int | None], names: Sequence[bytes]) -> SessionState:
        """The state of a session that begins with committed tokens (P15): ids 0, 1, 2 … of no sweep."""
        assert len(tokens) < limits.window_tokens, "there is room for a token more"
        state = cls(limits)
        state.names = list(names)
        state.committed = [CommittedToken(TreeNodeId(place), token, 0) for place, token in enumerate(tokens)]
        state.next_id = TreeNodeId(len(tokens))
        return state

    @classmethod
    def restored(cls, limits: Limits, snapshot: Snapshot) -> SessionState:
        """The state that a snapshot describes.

        Raises:
            RemoteProtocolError: it describes none that sweeps could have led to.
        """
        state = cls(limits)
        state.sequence, state.acked, state.next_id = snapshot.sequence, snapshot.acked, snapshot.next_id
        state.sampling = snapshot.sampling
        state._check_snapshot(snapshot)
        tokens = snapshot.tokens or (None,) * len(snapshot.ids)
        nodes = list(zip(snapshot.ids, tokens, snapshot.sequences, snapshot.parents, strict=True))
        state.committed = [CommittedToken(node[0], node[1], node[2]) for node in nodes[: snapshot.committed]]
        for node, token, sequence, parent in nodes[snapshot.committed :]:
            if parent is not None and parent not in state.live:
                raise RemoteProtocolError("snapshot", f"live node {node} has no live parent {parent}")
            position = snapshot.committed if parent is None else state.live[parent].position + 1
            if position >= limits.window_tokens:
                raise RemoteProtocolError("snapshot", f"more than the window of {limits.window_tokens} tokens")
            state.live[node] = LiveNode(token, parent, sequence, position)
        state._unanswered = {header.sequence: header.count for header in snapshot.headers}
        state.names = list(snapshot.names)
        if snapshot.tokens:
            state._index_children("snapshot")
        return state

    def tell(self, tokens: Mapping[TreeNodeId, int], sampling: Sampling) -> None:
        """Learn what a snapshot of structure left out (P17).

        Args:
            tokens: of all nodes, by id.
            sampling: how the tail picks.

        Raises:
            RemoteProtocolError: a token is missing, is none of the vocabulary, or stands twice under a node.
        """
        known = [tokens.get(node) for node in (*(one.id for one in self.committed), *self.live)]
        if any(token is None or not 0 <= token < self.limits.vocab_size for token in known):
            raise RemoteProtocolError("tokens", "one is missing, or outside the vocabulary")
        self.sampling = sampling
        self.committed = [replace(one, told=tokens[one.id]) for one in self.committed]
        self.live = {node: replace(one, told=tokens[node]) for node, one in self.live.items()}
        self._index_children("tokens")

    def _index_children(self, field: str) -> None:
        """Find live nodes by their tokens from now on."""
        self._children = {}
        for node, one in self.live.items():
            if self._children.setdefault(one.parent, {}).setdefault(one.token, node) != node:
                raise RemoteProtocolError(field, f"a token stands twice under node {one.parent}")

    def copied(self) -> SessionState:
        """The same state, which goes its own way from here on."""
        copy = SessionState(self.limits)
        copy.sequence, copy.acked, copy.next_id, copy.sampling = self.sequence, self.acked, self.next_id, self.sampling
        copy.committed, copy.live, copy.names = [*self.committed], {**self.live}, [*self.names]
        copy._children = {parent: {**children} for parent, children in self._children.items()}
        copy._unanswered = {**self._unanswered}
        return copy

    def apply(self, sweep: Sweep) -> Applied:
        """Advance by the next sweep, or leave the state as it is and raise.

        Raises:
            RemoteProtocolError: the sweep breaks a rule; `field` names the part at fault.
            ContextFull: a node would lie beyond the window.
        """
        applied = self.check(sweep)
        if applied.truncated_to is not None:
            del self.committed[applied.truncated_to :]
            self.live, self._children = {}, {}
            del self.names[applied.truncated_to // BLOCK_TOKENS :]
        self.names += sweep.names
        self._commit(applied)
        self._append(sweep, applied)
        self.sequence = sweep.sequence
        self.acked = max(self.acked, sweep.acked)
        self.sampling = sweep.sampling or self.sampling
        self._unanswered = {number: count for number, count in self._unanswered.items() if number > self.acked}
        self._unanswered[sweep.sequence] = len(sweep.parents)
        return applied

    def check(self, sweep: Sweep) -> Applied:
        """What `apply` would do; the state stays as it is.

        Raises:
            RemoteProtocolError: the sweep breaks a rule; `field` names the part at fault.
            ContextFull: a node would lie beyond the window.
        """
        self._check_numbers(sweep)
        length = self._check_truncate(sweep)
        path, survivors = self._check_commit(sweep)
        if sweep.committed != length + len(path):
            raise RemoteProtocolError("committed", f"{sweep.committed}, but {length + len(path)} tokens are committed")
        positions = self._check_nodes(sweep, survivors, length + len(path))
        named = len(self.names) if sweep.truncate_to is None else min(len(self.names), length // BLOCK_TOKENS)
        if sweep.names and named + len(sweep.names) > sweep.committed // BLOCK_TOKENS:
            raise RemoteProtocolError("names", f"of {named + len(sweep.names)} blocks in {sweep.committed} tokens")
        appended = tuple([TreeNodeId(sweep.first_id + offset) for offset in range(len(sweep.parents))])
        return Applied(sweep.truncate_to, path, survivors, appended, positions)

    def room(self, survivors: int, acked: int) -> int:
        """Nodes that the next sweep may append by the credits (F1); the window may allow less.

        Args:
            survivors: how many nodes that sweep leaves live.
            acked: the sequence that it acknowledges.

        Returns:
            0 while no further sweep may be unanswered at all.
        """
        unanswered = self._counts_after(acked)
        if len(unanswered) >= self.limits.sweeps:
            return 0
        return self.limits.nodes - max(sum(unanswered), survivors)

    def child(self, parent: Parent, token: int) -> TreeNodeId | None:
        """The live child of `parent` that holds `token`."""
        return self._children.get(parent, {}).get(token)

    def is_alive(self, node: TreeNodeId) -> bool:
        """Whether the node is live or committed: anything else never matters again (P7)."""
        if node in self.live:
            return True
        place = bisect_left(self.committed, node, key=lambda token: token.id)
        return place < len(self.committed) and self.committed[place].id == node

    def below(self, node: Parent) -> tuple[TreeNodeId, ...]:
        """Live nodes below `node` in id order; all of them below the tip."""
        if node is None:
            return tuple(self.live)
        above: set[Parent] = {node}
        found: list[TreeNodeId] = []
        for candidate, live in self.live.items():
            if live.parent in above:
                above.add(candidate)
                found.append(candidate)
        return tuple(found)

    def path_to(self, node: TreeNodeId) -> tuple[TreeNodeId, ...]:
        """Live nodes from a child of the tip down to `node`."""
        path: list[TreeNodeId] = []
        step: Parent = node
        while step is not None:
            path.append(step)
            step = self.live[step].parent
        return tuple(reversed(path))

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        limits, ids = self.limits, snapshot.ids
        live = len(ids) - snapshot.committed
        unanswered = [header.sequence for header in snapshot.headers]
        rules = {
            f"{snapshot.committed} committed and {live} live nodes": (
                snapshot.committed <= limits.window_tokens and 0 <= live <= limits.nodes
            ),
            "ids that do not rise": all(a < b for a, b in pairwise((*ids, snapshot.next_id))),
            "a token outside the vocabulary": all(token < limits.vocab_size for token in snapshot.tokens),
            "a node of a later sweep": all(number <= snapshot.sequence for number in snapshot.sequences),
            "other headers than those of the unanswered sweeps": (
                unanswered == list(range(snapshot.acked + 1, snapshot.sequence + 1))
            ),
            "more unanswered sweeps than credits": (
                len(unanswered) <= limits.sweeps and sum(header.count for header in snapshot.headers) <= limits.nodes
            ),
        }
        for what, holds in rules.items():
            if not holds:
                raise RemoteProtocolError("snapshot", f"has {what}")

    def _check_numbers(self, sweep: Sweep) -> None:
        if sweep.sequence != self.sequence + 1:
            raise RemoteProtocolError("sequence", f"{sweep.sequence} after {self.sequence}")
        if not 0 <= sweep.acked <= self.sequence:
            raise RemoteProtocolError("acked", f"{sweep.acked} of {self.sequence} sweeps")
        if sweep.first_id != self.next_id and not self._may_begin_at(sweep):
            raise RemoteProtocolError("first_id", f"{sweep.first_id}, but the next node is {self.next_id}")
        count = sweep.count
        if sweep.tokens and len(sweep.tokens) != count:
            raise RemoteProtocolError("parents", f"{count} for {len(sweep.tokens)} tokens")
        if not 0 <= sweep.picks_from - sweep.first_id <= count:
            raise RemoteProtocolError("picks_from", f"{sweep.picks_from} is not one of this sweep's nodes")
        unanswered = self._counts_after(sweep.acked)
        if len(unanswered) >= self.limits.sweeps:
            raise RemoteProtocolError("sequence", f"more than {self.limits.sweeps} unanswered sweeps")
        if sum(unanswered) + count > self.limits.nodes:
            raise RemoteProtocolError("tokens", f"more than {self.limits.nodes} unanswered nodes")

    def _may_begin_at(self, sweep: Sweep) -> bool:
        """Whether ids begin anew with it: the first sweep where hops began with tokens, cut to what all have (P15)."""
        cut = sweep.truncate_to
        return self.sequence == 0 and bool(self.committed) and cut is not None and sweep.first_id >= cut

    def _check_truncate(self, sweep: Sweep) -> int:
        if sweep.truncate_to is None:
            return len(self.committed)
        if not 0 <= sweep.truncate_to <= len(self.committed):
            raise RemoteProtocolError("truncate_to", f"{sweep.truncate_to} of {len(self.committed)} committed tokens")
        if sweep.commit_to is not None:
            raise RemoteProtocolError("commit_to", "truncation kills every live node, so none can be committed")
        return sweep.truncate_to

    def _check_commit(self, sweep: Sweep) -> tuple[tuple[TreeNodeId, ...], tuple[TreeNodeId, ...]]:
        if sweep.truncate_to is not None:
            return (), ()
        if sweep.commit_to is None:
            return (), self.below(None)
        if sweep.commit_to not in self.live:
            raise RemoteProtocolError("commit_to", f"node {sweep.commit_to} is not live")
        return self.path_to(sweep.commit_to), self.below(sweep.commit_to)

    def _counts_after(self, acked: int) -> list[int]:
        """Node counts of the sweeps that are unanswered once the client holds every reply up to `acked`."""
        return [count for number, count in self._unanswered.items() if number > acked]

    def _check_nodes(self, sweep: Sweep, survivors: tuple[TreeNodeId, ...], length: int) -> tuple[int, ...]:
        if len(survivors) + len(sweep.parents) > self.limits.nodes:
            raise RemoteProtocolError("tokens", f"more than {self.limits.nodes} live nodes")
        alive = set(survivors)
        placed: dict[Parent, int] = {None: length - 1}
        siblings: set[tuple[Parent, int]] = set()
        tokens = sweep.tokens or (None,) * len(sweep.parents)
        if sweep.tokens and not 0 <= min(sweep.tokens) <= max(sweep.tokens) < self.limits.vocab_size:
            raise RemoteProtocolError("tokens", f"one is outside the vocabulary of {self.limits.vocab_size}")
        for offset, (token, parent) in enumerate(zip(tokens, sweep.parents, strict=True)):
            if parent not in placed:
                if parent not in alive:
                    raise RemoteProtocolError("parents", f"node {sweep.first_id + offset} has no live parent {parent}")
                placed[parent] = self.live[parent].position
            if token is not None:
                if (parent, token) in siblings or self._sibling_after(sweep, parent, token) is not None:
                    raise RemoteProtocolError("tokens", f"one stands twice under node {parent}")
                siblings.add((parent, token))
            placed[TreeNodeId(sweep.first_id + offset)] = placed[parent] + 1
            if placed[parent] + 1 >= self.limits.window_tokens:
                raise ContextFull(f"the session's window of {self.limits.window_tokens} tokens is full")
        return tuple([placed[TreeNodeId(sweep.first_id + offset)] for offset in range(len(sweep.parents))])

    def _sibling_after(self, sweep: Sweep, parent: Parent, token: int) -> TreeNodeId | None:
        """The surviving child of `parent` with this token, where None is the tip after the sweep's commit."""
        if sweep.truncate_to is not None:
            return None
        return self.child(sweep.commit_to if parent is None and sweep.commit_to is not None else parent, token)

    def _commit(self, applied: Applied) -> None:
        if not applied.path:
            return
        tip = applied.path[-1]
        for node in applied.path:
            self.committed.append(CommittedToken(node, self.live[node].told, self.live[node].sequence))
        kept: dict[TreeNodeId, LiveNode] = {}
        self._children = {None: {}}
        for node in applied.survivors:
            old = self.live[node]
            parent = None if old.parent == tip else old.parent
            kept[node] = LiveNode(old.told, parent, old.sequence, old.position)
            if old.told is not None:
                self._children.setdefault(parent, {})[old.told] = node
        self.live = kept

    def _append(self, sweep: Sweep, applied: Applied) -> None:
        tokens = sweep.tokens or (None,) * len(sweep.parents)
        for node, token, parent, position in zip(
            applied.appended, tokens, sweep.parents, applied.positions, strict=True
        ):
            self.live[node] = LiveNode(token, parent, sweep.sequence, position)
            if token is not None:
                self._children.setdefault(parent, {})[token] = node
        self.next_id = sweep.end_id
