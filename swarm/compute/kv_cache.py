"""The KV tensors of one session on one machine. `swarm.compute.kv_slots` places rows; nothing is computed here.

    [0, n)        committed tokens, in order: slot = position
    [n, n + m)    live tree nodes, in the order of their ids
    [n + m, cap)  free, never read

Keys hold their position (RoPE) already, so a commit moves rows and never changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from swarm.base.errors import LocalProtocolError
from swarm.compute.kernels.support import kernel_support
from swarm.compute.kv_slots import KvSlots
from swarm.compute.position_attention import POSITIONS
from swarm.compute.state_slots import MixerState, SessionStates, state_entries

if TYPE_CHECKING:
    from swarm.base.ids import TreeNodeId
    from swarm.base.layers import Span
    from swarm.compute.kernels.kv_moves import RowMover


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one layer keeps per token.

    Attributes:
        index: the layer's number in the whole model.
        kv_heads: keys, and values, per token.
    """

    index: int
    kv_heads: int
    key_width: int
    value_width: int


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Further rows that a layer keeps per token: what a mixer is given, an indexer's keys.

    Attributes:
        index: the layer's number in the whole model.
        name: tells the rows of a layer apart.
    """

    index: int
    name: str
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What the layers of a span keep per token. A layer may keep keys and values, rows, both or nothing.

    Attributes:
        layers: those that keep keys and values, in the order in which they run.
        states: what mixers keep of a text, whatever its length.
        by_positions: whether attention adds up along positions (`swarm.compute.position_attention`).
    """

    layers: tuple[LayerKv, ...]
    dtype: torch.dtype
    device: torch.device
    rows: tuple[LayerRows, ...] = ()
    states: tuple[MixerState, ...] = ()
    by_positions: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Memory for one token in every layer."""
        width = sum(layer.kv_heads * (layer.key_width + layer.value_width) for layer in self.layers)
        return width * self.dtype.itemsize + sum(each.width * each.dtype.itemsize for each in self.rows)

    @property
    def state_bytes(self) -> int:
        """Memory for the state after one token in every layer."""
        return sum(state.size_bytes for state in self.states)

    def states_bytes(self, nodes: int) -> int:
        """Memory for all states of a session with so many live nodes at most."""
        return self.state_bytes * state_entries(self.state_bytes, nodes)

    def within(self, sub: Span) -> KvLayout:
        """The part of a session that uses only the layers of `sub` (R12)."""
        return replace(
            self,
            layers=tuple(layer for layer in self.layers if sub.start <= layer.index < sub.end),
            rows=tuple(each for each in self.rows if sub.start <= each.index < sub.end),
            states=tuple(each for each in self.states if sub.start <= each.index < sub.end),
        )


class KvCache:
    """Keys and values of one session.

    Attributes:
        slots: where the rows lie; it has `capacity` slots, for which memory is taken as they are needed.
        version: changes when the memory lies elsewhere.
        moves_in_kernel: whether a commit is one kernel for all layers.
        states: of its mixers; None where no layer has one.
    """

    def __init__(self, layout: KvLayout, capacity: int, nodes: int | None = None, at_first: int | None = None) -> None:
        """Take the memory.

        Args:
            capacity: tokens, at most.
            nodes: how many of them may be live at a time (default: all).
            at_first: tokens for which memory is taken now (default: all).
        """
        self.layout = layout
        self.slots = KvSlots(capacity, nodes)
        self.moves_in_kernel = kernel_support(layout.device).kernels
        self._mover: RowMover | None = None  # made for the first commit that moves a row
        self._keys: dict[int, torch.Tensor] = {}  # layer → [kv_heads, taken, key_width]
        self._values: dict[int, torch.Tensor] = {}  # layer → [kv_heads, taken, value_width]
        self.version = 0
        self._taken = self._room(capacity if at_first is None else min(capacity, max(at_first, 1)))
        for layer in layout.layers:
            self._keys[layer.index] = self._empty(layer.kv_heads, layer.key_width)
            self._values[layer.index] = self._empty(layer.kv_heads, layer.value_width)
        self._rows: dict[tuple[int, str], torch.Tensor] = {  # layer, name → [1, taken, width]
            (each.index, each.name): torch.empty(1, self._taken, each.width, dtype=each.dtype, device=layout.device)
            for each in layout.rows
        }
        entries = state_entries(layout.state_bytes, self.slots.nodes)
        self.states = SessionStates(layout.states, entries, layout.device) if entries else None

    @property
    def bytes_per_token(self) -> int:
        """Memory for one token in every layer."""
        return self.layout.bytes_per_token

    def addresses(self) -> torch.Tensor:
        """Where kernels find this session, int64 [layers, 3] on the CPU, layers in the order in which they run.

        Per layer: address of its keys, of its values, slots. Valid while this object lives and its version is the same.
        """
        layers = [layer.index for layer in self.layout.layers]
        where = [(self._keys[index].data_ptr(), self._values[index].data_ptr(), self._taken) for index in layers]
        return torch.tensor(where, dtype=torch.int64).reshape(-1, 3)

    def state_addresses(self) -> torch.Tensor:
        """Where kernels find what mixers keep, int64 [n] on the CPU: rows, then parts of states, as in the layout.

        Valid while this object lives and its version is the same.
        """
        return torch.tensor([tensor.data_ptr() for tensor in self.state_tensors()], dtype=torch.int64)

    def state_tensors(self) -> list[torch.Tensor]:
        """What mixers keep, as `state_addresses` has it."""
        return [*self._rows.values(), *([] if self.states is None else self.states.tensors())]

    def cut(self, start: int, end: int) -> tuple[tuple[torch.Tensor, ...], dict[int, tuple[torch.Tensor, ...]]]:
        """A copy of committed tokens [start, end) in host memory: rows, and states of mixers by committed length.

        Returns:
            all that has a row per token, each [heads, end - start, width]; parts of states, as `SessionStates.within`.

        Raises:
            LocalProtocolError: there are not so many.
        """
        if end > self.slots.committed:
            raise LocalProtocolError("prefix", f"{end} of {self.slots.committed} committed tokens")
        states = {} if self.states is None else self.states.within(start, end)
        rows = (tensor[:, start:end] for tensor in self._tensors())
        return tuple(row.to("cpu", copy=True, memory_format=torch.contiguous_format) for row in rows), states

    def adopt(self, kv: Sequence[torch.Tensor], states: Mapping[int, Sequence[torch.Tensor]], tokens: int) -> None:
        """Have so many committed tokens more, of the same bits: what `cut` gives of a session in the same layers."""
        start = self.slots.committed
        self.slots.extend(tokens)
        self._take(self.slots.used)
        for own, its in zip(self._tensors(), kv, strict=True):
            own[:, start : start + tokens] = its
        if self.states is not None:
            for length, parts in states.items():
                self.states.keep(length, parts)

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens and no live node."""
        self.slots.truncate(length)
        if self.states is not None:
            self.states.slots.truncate(length)

    def commit(self, path: Sequence[TreeNodeId], survivors: Sequence[TreeNodeId]) -> None:
        """Make `path` the next committed tokens and keep `survivors` live; see `KvSlots.commit`."""
        start = self.slots.committed
        moves = self.slots.commit(path, survivors)
        if self.states is not None:
            self.states.slots.commit(start, path, survivors)
        stay = 0  # a row that keeps its slot is not copied
        while stay < len(moves) and moves[stay] == start + stay:
            stay += 1
        if stay == len(moves):
            return
        if self.moves_in_kernel:
            self._made_mover().move(moves[stay:], start + stay)
            return
        source = torch.from_numpy(moves[stay:]).to(self.layout.device)
        target = slice(start + stay, start + len(moves))
        for tensor in self._tensors():
            tensor[:, target] = tensor.index_select(1, source)

    def append(
        self, ids: Sequence[TreeNodeId], parents: Sequence[TreeNodeId | None], positions: Sequence[int]
    ) -> torch.Tensor:
        """Give each new node a slot; their keys and values come with `store`.

        Returns:
            bool [len(ids), used slots] on the CPU: what each new node sees.
        """
        live = torch.from_numpy(self.slots.append(ids, parents, positions))
        self._take(self.slots.used)
        if self.states is not None:
            self.states.slots.begin()
        return torch.cat([torch.ones(len(ids), self.slots.committed, dtype=torch.bool), live], dim=1)

    def withdraw(self, count: int) -> None:
        """Remove the last `count` nodes again: the forward that would have stored their keys and values failed."""
        nodes = self.slots.ids[len(self.slots.ids) - count :]
        self.slots.withdraw(count)
        if self.states is not None:
            self.states.slots.withdraw(nodes)

    def store(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the keys and values of r new nodes.

        Args:
            layer: the layer's number in the whole model.
            start: slot of the first of them.
            keys: [kv_heads, r, key_width]
            values: [kv_heads, r, value_width]
        """
        end = start + keys.shape[1]
        self._keys[layer][:, start:end] = keys
        self._values[layer][:, start:end] = values

    def view(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` slots, not copied: keys [kv_heads, length, key_width], values likewise.

        Where attention adds up along positions, the rest of the last block too, whatever it holds.
        """
        length = self._room(length)
        return self._keys[layer][:, :length], self._values[layer][:, :length]

    def store_rows(self, layer: int, name: str, start: int, rows: torch.Tensor) -> None:
        """Write what a layer keeps of new nodes beside keys and values.

        Args:
            layer: the layer's number in the whole model.
            rows: [r, width]
        """
        self._rows[layer, name][0, start : start + len(rows)] = rows

    def view_rows(self, layer: int, name: str, length: int) -> torch.Tensor:
        """The rows of the first `length` slots, not copied: [length, width]."""
        return self._rows[layer, name][0, :length]

    def check_integrity(self) -> None:
        """Raise LocalProtocolError when bookkeeping is inconsistent; in tests and when idle."""
        self.slots.check_integrity()
        if self.states is not None:
            self.states.slots.check_integrity()

    def _take(self, tokens: int) -> None:
        """Have memory for so many tokens: a copy of what is there, twice as large."""
        if tokens <= self._taken:
            return
        old, self._taken = self._taken, self._room(min(self.slots.capacity, max(tokens, 2 * self._taken)))
        made = torch.Tensor.new_zeros if self.layout.by_positions else torch.Tensor.new_empty

        def grown(tensor: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode(mode=False):  # a commit outside a forward writes into it
                larger = made(tensor, (tensor.shape[0], self._taken, tensor.shape[2]))
            larger[:, :old] = tensor
            return larger

        for layer in self._keys:  # one after the other, so that the old ones are free soon
            self._keys[layer] = grown(self._keys[layer])
            self._values[layer] = grown(self._values[layer])
        for place in self._rows:
            self._rows[place] = grown(self._rows[place])
        self._mover, self.version = None, self.version + 1

    def _made_mover(self) -> RowMover:
        if self._mover is None:
            from swarm.compute.kernels.kv_moves import RowMover  # Triton, which only machines with kernels have

            self._mover = RowMover(self._tensors())
        return self._mover

    def _tensors(self) -> list[torch.Tensor]:
        """All that has a row per slot, each [heads, capacity, width]."""
        return [*self._keys.values(), *self._values.values(), *self._rows.values()]

    def _room(self, tokens: int) -> int:
        """Slots for so many tokens: whole blocks where attention takes such."""
        return tokens + -tokens % POSITIONS if self.layout.by_positions else tokens

    def _empty(self, heads: int, width: int) -> torch.Tensor:
        made = torch.zeros if self.layout.by_positions else torch.empty  # what nobody sees must be a number there
        return made(heads, self._taken, width, dtype=self.layout.dtype, device=self.layout.device)
