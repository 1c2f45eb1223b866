"""What a machine keeps of texts whose sessions are over: blocks of 64 committed tokens, found by name (P15).

    scope   what the numbers depend on beside the tokens: the hops in front, the layers, the codec
    block   KV of every layer, the rows that left this hop, states of mixers within it; child of a block. At an end of a
            chain its token ids too

A session that adopts blocks copies them, so nothing here is in use by anybody, and any block can be given up at any
time. Of the owner who holds most, the block goes that was not used for the longest: never a parent before its child,
since who uses a block uses those before it after it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, islice

import torch

from swarm.base.errors import LocalProtocolError
from swarm.protocol.limits import BLOCK_TOKENS
from swarm.protocol.messages import Border, Rows

KEPT_S = 1_800.0
"""A block that no session begins with for so long is given up: texts do not stay on strangers' machines."""
MAX_BLOCKS = 1 << 16
"""Blocks of a pool, however small: bookkeeping for 4 million tokens."""


@dataclass(frozen=True, slots=True)
class KvBlock:
    """What one hop holds of `BLOCK_TOKENS` committed tokens.

    Attributes:
        tokens: their ids; None where only structure came by (P17).
        kv: as `KvCache.cut` gives them: each [heads, BLOCK_TOKENS, width].
        rows: what left this hop for them; None at the tail, and where the journal was given up.
        states: of mixers, by committed length within this block.
    """

    tokens: tuple[int, ...] | None
    kv: tuple[torch.Tensor, ...]
    rows: Rows | None = None
    states: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        states = sum(part.nbytes for parts in self.states.values() for part in parts)
        return sum(part.nbytes for part in self.kv) + (0 if self.rows is None else self.rows.size_bytes) + states


@dataclass(frozen=True, slots=True)
class NamedText:
    """A text on one hop.

    Attributes:
        scope: what its KV depends on beside the tokens.
        names: of its whole blocks.
    """

    scope: bytes
    names: tuple[bytes, ...]

    def key(self, place: int) -> bytes:
        """By which a pool finds a block; b"" for what is before the first one."""
        return self.scope + self.names[place] if place >= 0 else b""


@dataclass(frozen=True, slots=True)
class _Entry:
    block: KvBlock
    parent: bytes
    place: int
    owner: str
    cost: int


class KvPool:
    """Blocks of one node.

    Attributes:
        tokens: what all blocks cost of the node's KV budget, in KV tokens.
    """

    def __init__(
        self,
        bytes_per_token: int,
        weight: Callable[[str], int] = lambda _: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Hold nothing.

        Args:
            bytes_per_token: what a token of the budget stands for.
            weight: how many shares an owner has.
        """
        self.tokens = 0
        self._bytes_per_token = max(bytes_per_token, 1)
        self._weight = weight
        self._clock = clock
        self._blocks: dict[bytes, _Entry] = {}
        self._used: dict[str, OrderedDict[bytes, float]] = {}  # owner → when its blocks were used, the last at the end
        self._costs: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, scope: bytes, prefix: Sequence[Border]) -> tuple[list[KvBlock], list[bytes]]:
        """The blocks of the longest beginning that is held, and their names; none where none is.

        Args:
            scope: of the session that asks.
            prefix: the longest first.
        """
        for border in prefix:
            keys = self._chain(scope + border.name)
            if len(keys) * BLOCK_TOKENS == border.tokens:
                self._use(keys)
                return [self._blocks[key].block for key in keys], [key[len(scope) :] for key in keys]
        return [], []

    def lacks(self, text: NamedText) -> range:
        """Places of its blocks that are not held, behind those that are, which count as used now."""
        held = 0
        while held < len(text.names) and (found := self._blocks.get(text.key(held))) is not None:
            if (found.place, found.parent) != (held, text.key(held - 1)):
                return range(0)  # the name stands for something else already: its client's mistake
            held += 1
        self._use([text.key(place) for place in range(held)])
        return range(held, len(text.names))

    def add(self, text: NamedText, first: int, blocks: Sequence[KvBlock], owner: str, room: int) -> int:
        """Keep further blocks of a text, as many as leave the pool within its room beside those before them.

        Args:
            first: which of its blocks the first one is; those before it are held.
            blocks: in order.
            owner: who pays for them.
            room: KV tokens that blocks may take now.

        Returns:
            how many of them are held now; behind fewer than all, none can be.
        """
        chain = self._chain(text.key(first - 1))
        if len(chain) != first:
            return 0
        self._use(chain)
        costs = [-(-block.size_bytes // self._bytes_per_token) for block in blocks]
        sums = accumulate(costs, initial=sum(self._blocks[key].cost for key in chain))
        fitting = sum(taken <= room for taken in islice(sums, 1, None))
        if fitting:
            self.shrink(room - sum(costs[:fitting]), MAX_BLOCKS - fitting, spared=frozenset(chain))
        for place, block, cost in zip(count(first), blocks[:fitting], costs, strict=False):
            key, parent = text.key(place), text.key(place - 1)
            known = self._blocks.get(key)
            if known is None and (self.tokens + cost > room or len(self._blocks) >= MAX_BLOCKS):
                break
            if known is not None and known.parent != parent:
                break
            if known is None:
                self._blocks[key] = _Entry(block, parent, place, owner, cost)
                self.tokens += cost
                self._costs[owner] += cost
            chain.append(key)
        self._use(chain)
        return len(chain) - first

    def shrink(self, room: int, blocks: int = MAX_BLOCKS, spared: Collection[bytes] = ()) -> None:
        """Give blocks up until they cost no more than so many KV tokens, or the next one is to be spared."""
        while self._blocks and (self.tokens > room or len(self._blocks) > blocks):
            owner = max(self._costs, key=lambda one: (self._costs[one] / self._weight(one), one))
            oldest = next(iter(self._used[owner]))
            if oldest in spared:
                return
            self._drop(oldest)

    def forget_old(self) -> None:
        """Give up what nobody used for `KEPT_S`."""
        since = self._clock() - KEPT_S
        for used in list(self._used.values()):
            for key in [key for key, at_s in used.items() if at_s <= since]:
                self._drop(key)

    def clear(self) -> None:
        """Give all up: the layers are others now."""
        self.shrink(-1)

    def check_integrity(self) -> None:
        """Raise LocalProtocolError when an entry is lost or counted twice."""
        held = self._blocks.values()
        costs = Counter(dict.fromkeys(self._costs, 0))
        for one in held:
            costs[one.owner] += one.cost
        sound = (
            costs == self._costs
            and self.tokens == sum(one.cost for one in held) == sum(costs.values())
            and sorted(key for keys in self._used.values() for key in keys) == sorted(self._blocks)
            and all(one.block.tokens is None or len(one.block.tokens) == BLOCK_TOKENS for one in held)
        )
        if not sound:
            raise LocalProtocolError("blocks", f"bookkeeping is inconsistent at {len(self._blocks)} blocks")

    def _chain(self, key: bytes) -> list[bytes]:
        """A block and those before it, the first one first; none where one of them is missing."""
        keys: list[bytes] = []
        while key:
            held = self._blocks.get(key)
            if held is None:
                return []
            keys.append(key)
            key = held.parent
        return keys[::-1]

    def _use(self, keys: Iterable[bytes]) -> None:
        for key in [*keys][::-1]:  # the first one last: it goes last
            self._used.setdefault(self._blocks[key].owner, OrderedDict())[key] = self._clock()
            self._used[self._blocks[key].owner].move_to_end(key)

    def _drop(self, key: bytes) -> None:
        held = self._blocks.pop(key)
        self.tokens -= held.cost
        del self._used[held.owner][key]
        self._costs[held.owner] -= held.cost
        if not self._used[held.owner]:
            del self._used[held.owner], self._costs[held.owner]
