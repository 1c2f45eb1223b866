"""Which states of a session's text are kept and where, and the tensors that hold them.

A state after a token stands for all of the text up to it. States are a cache: what a mixer was given per token is kept
beside the KV, so any state that is not here is computed again from the nearest one before it.

    snapshots   committed length → entry; the longest one is never given up for another
    live        tree node → entry
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from swarm.base.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from swarm.base.ids import TreeNodeId


StateKey = tuple[Literal["conv", "recurrent", "linear"], int]
"""A state of a mixer: what its cache calls it, and its number."""


MAX_SNAPSHOTS = 16
"""States of committed tokens that a session keeps at most."""
MIN_ENTRIES = 4
"""States of a session, however large they are: where it starts from, where it ends, and one each before them."""
POOL_BYTES = 256 << 20
"""Memory for the states of a session, where more than `MIN_ENTRIES` fit."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state.

    Attributes:
        shape: for one sequence, without the batch.
    """

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class MixerState:
    """What a mixer keeps of a text.

    Attributes:
        index: the layer's number in the whole model.
        name: of the mixer in its layer.
    """

    index: int
    name: str
    parts: tuple[StatePart, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


class SessionStates:
    """States of one session in every mixer of a span, allocated at once.

    Attributes:
        slots: which entry is after which token.
    """

    def __init__(self, mixers: Sequence[MixerState], entries: int, device: torch.device) -> None:
        self.slots = StateSlots(entries)
        self._parts = {
            (mixer.index, mixer.name): [
                torch.empty(entries, *part.shape, dtype=part.dtype, device=device) for part in mixer.parts
            ]
            for mixer in mixers
        }

    def tensors(self) -> list[torch.Tensor]:
        """All parts of all mixers, each [entries, …], in the order of the layout."""
        return [part for parts in self._parts.values() for part in parts]

    def within(self, start: int, end: int) -> dict[int, tuple[torch.Tensor, ...]]:
        """States after committed lengths in (start, end], copied: each part [1, *shape], as `tensors` has them."""
        places = [(length, entry) for length, entry in self.slots.snapshots.items() if start < length <= end]
        return {
            length: tuple(part[entry : entry + 1].to("cpu", copy=True) for part in self.tensors())
            for length, entry in places
        }

    def keep(self, length: int, parts: Sequence[torch.Tensor]) -> None:
        """Keep the state after a committed length, as `within` gives it."""
        entry = self.slots.reserve([Place(length)], [])[Place(length)]
        self.slots.begin()
        for own, part in zip(self.tensors(), parts, strict=True):
            own[entry : entry + 1] = part

    def read(self, layer: int, name: str, entries: torch.Tensor) -> list[torch.Tensor]:
        """A mixer's states at some entries, copied: each [len(entries), *shape]."""
        return [part.index_select(0, entries) for part in self._parts[layer, name]]

    def write(self, layer: int, name: str, entries: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Keep a mixer's states, each [len(entries), *shape]."""
        for part, state in zip(self._parts[layer, name], states, strict=True):
            part.index_copy_(0, entries, state.to(part.dtype))


def state_entries(state_bytes: int, nodes: int) -> int:
    """How many states a session keeps.

    Args:
        state_bytes: of one, in all layers; 0 where layers have none.
        nodes: that are live at a time.
    """
    if not state_bytes:
        return 0
    return max(MIN_ENTRIES, min(MAX_SNAPSHOTS + nodes, POOL_BYTES // state_bytes))


@dataclass(frozen=True, slots=True)
class Place:
    """After which token a state is.

    Attributes:
        length: so many committed tokens; not used where there is a node.
        node: a live node; None for the last of `length` committed tokens.
    """

    length: int = 0
    node: TreeNodeId | None = None


class StateSlots:
    """Entries of one session.

    Attributes:
        max_snapshots: of them for committed tokens.
        snapshots: committed length → entry, by rising length.
    """

    def __init__(self, entries: int) -> None:
        self.entries = entries
        self.max_snapshots = max(1, min(MAX_SNAPSHOTS, entries // 2))
        self.snapshots: dict[int, int] = {}
        self.live: dict[TreeNodeId, int] = {}
        self._free = list(range(entries))
        self._written: list[Place] = []  # by the forward that runs

    def begin(self) -> None:
        """A forward begins: what the one before wrote stays."""
        self._written.clear()

    def find(self, place: Place) -> int | None:
        """The entry with the state after a token; None if there is none."""
        return self.snapshots.get(place.length) if place.node is None else self.live.get(place.node)

    def last_before(self, length: int) -> int:
        """The longest committed text of no more than `length` tokens with a state; 0 if there is none."""
        return max((each for each in self.snapshots if each <= length), default=0)

    def truncate(self, length: int) -> None:
        """Keep states of the first `length` committed tokens and of no live node."""
        self._release(Place(each) for each in [*self.snapshots] if each > length)
        self._release(Place(node=node) for node in [*self.live])

    def commit(self, committed: int, path: Sequence[TreeNodeId], survivors: Collection[TreeNodeId]) -> None:
        """Live nodes become committed tokens.

        Args:
            committed: tokens before.
            survivors: nodes that stay live; all others are freed.
        """
        for length, node in enumerate(path, start=committed + 1):
            if node in self.live:
                self.snapshots[length] = self.live.pop(node)
        kept = set(survivors)
        self._release(Place(node=node) for node in [*self.live] if node not in kept)
        while len(self.snapshots) > self.max_snapshots:
            self._release([self._least_useful()])

    def withdraw(self, nodes: Sequence[TreeNodeId]) -> None:
        """A forward failed: forget its nodes, and whatever it wrote."""
        self._release(place for place in self._written if self.find(place) is not None)
        self._release(Place(node=node) for node in nodes if node in self.live)
        self._written.clear()

    def reserve(
        self, needed: Sequence[Place], wanted: Sequence[Place], spared: Collection[int] = ()
    ) -> dict[Place, int]:
        """Entries for states that a forward will write. It may read what was there: a mixer reads before it writes.

        Args:
            needed: places that get an entry even if others lose theirs.
            wanted: places that get one while some are free.
            spared: entries that none loses, for kernels that read and write at a time.
        """
        given: dict[Place, int] = {}
        for place in needed:
            if not self._free:
                self._give_up_one([*given.values(), *spared])
            if self._free:
                given[place] = self._take(place)
        for place in wanted:
            if not self._free:
                break
            if place not in given:
                given[place] = self._take(place)
        return given

    def check_integrity(self) -> None:
        """Raise LocalProtocolError when an entry is lost or used twice."""
        used = [*self.snapshots.values(), *self.live.values(), *self._free]
        if sorted(used) != list(range(self.entries)):
            raise LocalProtocolError("states", f"{len(used)} entries are accounted for, of {self.entries}")

    def _take(self, place: Place) -> int:
        entry = self._free.pop()
        if place.node is not None:
            self.live[place.node] = entry
        else:
            self.snapshots[place.length] = entry
            self.snapshots = dict(sorted(self.snapshots.items()))
        self._written.append(place)
        return entry

    def _give_up_one(self, spared: Collection[int]) -> None:
        """Free an entry: of the oldest live node, else of a snapshot that is not the longest."""
        nodes = (Place(node=node) for node, entry in self.live.items() if entry not in spared)
        shorter = [Place(length) for length, entry in [*self.snapshots.items()][:-1] if entry not in spared]
        place = next(nodes, shorter[-1] if shorter else None)
        if place is not None:
            self._release([place])

    def _least_useful(self) -> Place:
        """The snapshot, not the longest one, without which the gap between its neighbours is smallest."""
        lengths = [0, *self.snapshots]
        gaps = {lengths[at]: lengths[at + 1] - lengths[at - 1] for at in range(1, len(lengths) - 1)}
        return Place(min(gaps, key=gaps.__getitem__))

    def _release(self, places: Iterable[Place]) -> None:
        for place in [*places]:
            self._free.append(self.snapshots.pop(place.length) if place.node is None else self.live.pop(place.node))
