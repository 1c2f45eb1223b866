"""What simulated chains are made of: a fake target in layers, machines with KV bookkeeping, a client at a random pace.

The target is fake, but it reads every KV row of every layer that a node's mask shows: a row in the wrong place, of the
wrong node or of the wrong layer changes the text. Plain decoding with the same function is the oracle.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from client.decode.walk import Walk
from client.draft.search.tree import DraftTree
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_slots import KvSlots
from swarm.protocol.hop_log import HopLog, SweepWork
from swarm.protocol.messages import Codec, Reply, Rows, Sampling, Sweep
from swarm.protocol.session import Limits

LAYERS = 4
VOCAB = 3
ROW_BYTES = 4
PRIME = 1_000_003


def first_state(layer: int) -> int:
    """A layer's state before the first token."""
    return 7 + layer


def fold(state: int, values: Sequence[int]) -> int:
    """One layer over a path: what comes out at its end."""
    for value in values:
        state = (state * 31 + value + 1) % PRIME
    return state


def pick(value: int) -> int:
    """The head: the token that is picked where the last layer gives this value."""
    return (value >> 3) % VOCAB


def plain_decoding(prompt: Sequence[int], length: int) -> list[int]:
    """The prompt and what follows it, `length` tokens in all."""
    text, states = list(prompt), [first_state(layer) for layer in range(LAYERS)]
    for place in range(length - 1):
        value = text[place]
        for layer, state in enumerate(states):
            states[layer] = value = fold(state, (value,))
        if place + 1 == len(text):
            text.append(pick(value))
    return text[:length]


class FakeSpan:
    """One hop's span of the fake target, with its KV cache."""

    def __init__(self, limits: Limits, span: Span) -> None:
        self.slots = KvSlots(limits.window_tokens + limits.nodes)
        self.kv = {layer: [-1] * self.slots.capacity for layer in range(span.start, span.end)}

    def execute(self, work: SweepWork) -> list[int]:
        """Run a sweep's wanted nodes; what comes out of the last layer for each."""
        slots, applied = self.slots, work.applied
        if applied.truncated_to is not None:
            slots.truncate(applied.truncated_to)
        if applied.path:
            start = slots.committed
            moves = slots.commit(applied.path, applied.survivors).tolist()
            for held in self.kv.values():
                held[start : start + len(moves)] = [held[slot] for slot in moves]
        values = self._values(work)
        first, committed = slots.used, slots.committed
        positions = [applied.positions[offset] for offset in work.run]
        parents = [work.frame.sweep.parents[offset] for offset in work.run]
        mask = slots.append(work.nodes, parents, positions).tolist()
        if work.frame.sweep.sequence % 4 == 0:
            slots.check_integrity()
        seen = [[*range(committed), *(committed + slot for slot, sees in enumerate(row) if sees)] for row in mask]
        assert [len(path) - 1 for path in seen] == positions, "a mask shows another depth than the node's"
        for layer, held in self.kv.items():
            held[first : first + len(values)] = values
            values = [fold(first_state(layer), [held[slot] for slot in path]) for path in seen]
        return values

    @staticmethod
    def _values(work: SweepWork) -> list[int]:
        rows = work.frame.rows
        if rows is None:
            return [work.frame.sweep.tokens[offset] for offset in work.run]
        places = [row * ROW_BYTES for row in work.kept_rows]
        return [int.from_bytes(rows.data[place : place + ROW_BYTES], "little") for place in places]


def rows_of(values: Sequence[int]) -> Rows:
    """Hidden rows on the wire: one value per row, in four bytes."""
    data = b"".join(value.to_bytes(ROW_BYTES, "little") for value in values)
    return Rows(Codec.FP32, len(values), ROW_BYTES // Codec.FP32.item_bytes, data)


class SweepWriter:
    """A client that makes legal sweeps at random.

    It sends several sweeps ahead of the replies, and sometimes begins another turn.
    """

    def __init__(self, rng: random.Random, widest: int) -> None:
        self.rng = rng
        self.widest = widest
        self.prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 7))]
        self.limits = Limits(VOCAB, window_tokens=80, sweeps=rng.randint(1, 6), nodes=rng.choice([2, 5, 12, 40]))
        self.walk = Walk(self.limits, Sampling())
        self.text: list[int] = []
        self.left = list(self.prompt)
        self._can_send: bool | None = None

    @property
    def can_send(self) -> bool:
        """Whether the window has room for a sweep."""
        if self._can_send is None:  # asked for at every step
            self._can_send = self.walk.room > 0
        return self._can_send

    @property
    def must_send(self) -> bool:
        """Whether only the client can go on."""
        return bool(self.left) or self.walk.pending is not None

    @property
    def can_restart(self) -> bool:
        return bool(self.text) and self.walk.in_flight < self.limits.sweeps

    def sweep(self) -> Sweep:
        self._can_send = None
        rng, room = self.rng, self.walk.room
        if self.left:
            count = min(room, rng.randint(1, 4))
            chunk, self.left = self.left[:count], self.left[count:]
            return self.walk.prefill(chunk, last=not self.left and self.walk.pending is None)
        if self.walk.pending is not None:
            return self.walk.extend(self._tree(min(room - 1, rng.randint(0, self.widest))))
        return self._grow(min(room, rng.randint(0, self.widest)))

    def restart(self) -> tuple[Sweep | None, int]:
        """Another turn in the same session, whatever is in flight: some of the text stays and some is new."""
        self._can_send = None
        so_far = [*self.prompt, *self.text]
        so_far = so_far[: self.rng.randint(0, len(so_far))]
        self.prompt = (so_far + [self.rng.randrange(VOCAB) for _ in range(4)])[: self.rng.randint(1, 25)]
        self.text = []
        commit, kept = self.walk.restart(self.prompt, Sampling())
        self.left = self.prompt[kept:-1]
        return commit, kept

    def accept(self, reply: Reply) -> None:
        self._can_send = None
        self.text += self.walk.accept(reply)

    def check_text(self) -> None:
        """Compare the text so far with the oracle's.

        Raises:
            AssertionError: it is another one.
        """
        text = [*self.prompt, *self.text]
        assert text == plain_decoding(self.prompt, len(text)), "another text than plain decoding's"

    def _tree(self, count: int) -> DraftTree:
        children: set[tuple[int | None, int]] = set()
        for _ in range(count):
            parent = self.rng.choice([None, *range(len(children))])
            children.add((parent, self.rng.randrange(VOCAB)))
        pairs: list[tuple[int | None, int]] = []
        for parent, token in sorted(children, key=lambda pair: -1 if pair[0] is None else pair[0]):
            if parent is None or parent < len(pairs):
                pairs.append((parent, token))
        return DraftTree(tuple(token for _, token in pairs), tuple(parent for parent, _ in pairs), (1.0,) * len(pairs))

    def _grow(self, count: int) -> Sweep:
        """A sweep of nodes at and below the certain node, under parents whose picks are mostly still in flight."""
        state, certain = self.walk.state, self.walk.certain
        assert certain is not None
        inside = certain in state.live
        able = [certain, *state.below(certain if inside else None)]
        tokens: list[int] = []
        parents: list[TreeNodeId] = []
        for _ in range(count):
            parent, token = self.rng.choice(able), self.rng.randrange(VOCAB)
            older = state.child(parent if inside or parent != certain else None, token) is not None
            if not older and (parent, token) not in zip(parents, tokens, strict=True):
                able.append(TreeNodeId(state.next_id + len(tokens)))
                tokens.append(token)
                parents.append(parent)
        return self.walk.grow(tokens, parents)


class GlancingLog(HopLog):
    """Looks into its queue only now and then, as a hop with a bounded look-ahead may."""

    def __init__(self, limits: Limits, rng: random.Random) -> None:
        super().__init__(limits)
        self.rng = rng

    def _must_run(self, node: TreeNodeId) -> bool:
        dead = node in self._dead and self.rng.random() < 0.5
        return not dead and self.executed.live[node].parent not in self._skipped


class ForgetfulLog(GlancingLog):
    """The same without stickiness: it runs nodes below one that it skipped (breaks P7)."""

    def _must_run(self, node: TreeNodeId) -> bool:
        return node not in self._dead or self.rng.random() < 0.5
