"""Forwards through fixed addresses, held as CUDA graphs: one launch per sweep (docs/design/kernels.md, "Graphs").

    batch ──▶ pieces that fit a bucket ──▶ plan, one copy ──▶ replay ──▶ a copy of the rows
                                                │
                 address table ◀── sessions     └── rows behind the batch's are nobody's: they store nothing

The model stays Hugging Face's: a graph records what `RaggedModel.run_layers` starts. Any topological cut of a batch
gives the same result (F3), so what does not fit is cut. Owns no session: a cache is known only while it lives.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch import nn

from swarm.base.errors import LocalProtocolError
from swarm.base.layers import Span
from swarm.compute.kernels.batch_plan import BatchPlan, PlannedSession, part_count, plan_batch, plan_words
from swarm.compute.kernels.support import on_device
from swarm.compute.ragged_batch import HeadOutput, SessionRows
from swarm.compute.recurrent.static_plan import (
    FIELDS,
    StateLimits,
    StateOverflow,
    StateRows,
    missing_states,
    plan_again,
    plan_states,
)
from swarm.compute.state_step import NONE, StateStep
from swarm.compute.tree_attention import ADDRESSES, StaticStep
from swarm.files.pretrained import first_line

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from swarm.compute.kv_cache import KvCache, KvLayout
    from swarm.compute.ragged_batch import RaggedModel
    from swarm.compute.recurrent.mixer import RecurrentMixer
    from swarm.compute.state_slots import StateKey


CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
RECOMPILE_LIMIT = 256
"""Kinds of layers and shapes that one class may be compiled for."""
INDUCTOR = "inductor"
SAME_BITS = {"deterministic": True, "batch_invariant": True, "split_reductions": False}
"""Inductor's settings, those of them that it has: it chooses no kernel by timing, which differs from card to card, and
cuts no sum by how many rows there are."""


SHORT_TOKENS = 8_192
"""Every bucket has room for sessions of so many tokens; a batch of many rows of longer ones may have to be cut."""
WARM_UPS = 2
"""Calls before a recording: kernels are compiled and libraries set up, neither of which can be recorded."""
MAX_EXTRA = 24
"""Recordings of parts of the span (R12) that are kept; the one used least recently goes."""
OutputT = TypeVar("OutputT")
logger = logging.getLogger(__name__)
SPILL_BYTES, MIN_SPILLS = 128 << 20, 16
"""Memory for states of rows whose children do not come next, and how many there are room for at least."""
MAX_AGAIN = 8
"""Runs in which missing states are made again for a batch, beside one for each largest bucket of tokens."""
HEAD_BUCKET = 128
"""The largest bucket of the head, whose output is large."""


class CompiledLayers:
    """Layers whose forward can be exchanged for a compiled one, the same program for all layers of a kind."""

    def __init__(self, layers: Sequence[nn.Module], backend: str | None) -> None:
        """Prepare them; each is compiled when it first runs.

        Args:
            layers: of the model class, and other parts of it that compute.
            backend: torch's name of the compiler; None leaves the layers as they are.
        """
        self.backend = backend
        self._forwards = {}
        if backend is not None:
            options = _known_settings() if backend == INDUCTOR else None
            # One program for all numbers of rows: one for each would sum in another order.
            self._forwards = {
                layer: torch.compile(layer.forward, dynamic=True, fullgraph=True, backend=backend, options=options)
                for layer in layers
            }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the layers run compiled."""
        if not self._forwards:
            yield
            return
        own = {layer: layer.__dict__.get("forward") for layer in self._forwards}  # of a mixer, what stands before it
        for layer, forward in self._forwards.items():
            layer.forward = forward
        try:
            limits: dict[str, Any] = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), RECOMPILE_LIMIT)
            with torch._dynamo.config.patch(limits):
                yield
        finally:
            for layer, before in own.items():
                if before is None:
                    del layer.forward
                else:
                    layer.forward = before


def _known_settings() -> dict[str, str | int | bool | Callable[..., object]]:
    import torch._inductor.config as settings  # loads the compiler

    return {name: value for name, value in SAME_BITS.items() if hasattr(settings, name)}


def keep_programs(folder: Path) -> None:
    """Keep compiled programs in a folder, so that a restart need not compile; a user's own choice stays."""
    os.environ.setdefault(CACHE_VARIABLE, str(folder))


@dataclass(frozen=True, slots=True)
class StaticLimits:
    """What fixed memory is laid out for.

    Attributes:
        max_tokens: of one session, live nodes included.
        sessions: that have a line of the address table at a time, and run together at most.
        buckets: numbers of rows that are run, rising; a batch is filled up to the next one.
    """

    max_tokens: int
    sessions: int
    buckets: tuple[int, ...]


class FixedMemory:
    """Inputs and scratch of all graphs of a model.

    Attributes:
        positions: int64 [B] on the device.
        token_ids: int64 [B] on the device.
        rows: [B, hidden_size] on the device, in the compute dtype.
        states: what a plan of states has room for.
        staged_states: its words on the host; `wait` before they are written.
        step: what travels through the model in place of an `AttentionStep`.
    """

    def __init__(self, model: RaggedModel, limits: StaticLimits, tile: int) -> None:
        """Take the memory.

        Args:
            tile: rows of a session that one work item of the attention takes.
        """
        most, short = limits.buckets[-1], min(limits.max_tokens, SHORT_TOKENS)
        rooms = [(limits.buckets[0], limits.max_tokens), *((bucket, short) for bucket in limits.buckets)]
        self._parts = max(part_count(*room) for room in rooms)
        words = max(plan_words(*room) for room in rooms)
        device, layers = model.device, model.layout.layers
        heads = _heads(model)
        width = max((layer.value_width for layer in layers), default=1)
        self.states = _state_limits(model, limits)
        front = 4 * most + self.states.words
        self._device = torch.zeros(front + words, dtype=torch.int32, device=device)
        self.positions = self._device[: 2 * most].view(torch.int64)
        self.token_ids = self._device[2 * most : 4 * most].view(torch.int64)
        self.rows = torch.zeros(most, model.hidden_size, dtype=model.dtype, device=device)
        self.step = StaticStep(
            plan=self._device[front:],
            part_out=torch.empty(self._parts * heads * width, device=device),
            part_ml=torch.empty(self._parts * heads * 2, device=device),
            tile=tile,
            states=_state_step(model, self.states, self._device[4 * most : front]),
        )
        self._staged = torch.zeros(front + words, dtype=torch.int32, pin_memory=device.type == "cuda")
        staged: NDArray[np.int32] = self._staged.numpy()
        self._staged_positions = staged[: 2 * most].view(np.int64)
        self._staged_ids = staged[2 * most : 4 * most].view(np.int64)
        self.staged_states = staged[4 * most : front]
        self._staged_words = staged[front:]
        self.forget_states()
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fits(self, plan: BatchPlan) -> bool:
        """Whether there is room for a plan and for the partial sums that it makes."""
        return len(plan.words) <= len(self._staged_words) and plan.parts <= self._parts

    def put(self, plan: BatchPlan, bucket: int, token_ids: torch.Tensor | None = None) -> None:
        """Copy a batch's plan to the device, and its token ids: one copy, which nothing waits for.

        Args:
            bucket: rows behind r are nobody's: at position 0, with token 0.
            token_ids: int64 [r]
        """
        self.wait()
        _fill(self._staged_positions, plan.positions, bucket)
        if token_ids is not None:
            _fill(self._staged_ids, token_ids.cpu().numpy(), bucket)
        end = len(self._staged) - len(self._staged_words) + len(plan.words)
        self._staged_words[: len(plan.words)] = plan.words
        self._device[:end].copy_(self._staged[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))

    def forget_states(self) -> None:
        """Let the next batch's rows be nobody's, whose states are nowhere."""
        self.staged_states.fill(NONE)
        self.states.cut(self.staged_states)[2].fill(0)

    def wait(self) -> None:
        """Until what was staged before has left."""
        if self._copied is not None:
            self._copied.synchronize()

    def step_of(self, bucket: int) -> StaticStep:
        """The step of so many rows: there are no more sessions than rows."""
        states = self.step.states
        if states is None:
            return self.step
        return replace(self.step, states=replace(states, segments=states.segments[:bucket]))

    def put_rows(self, rows: torch.Tensor, bucket: int) -> None:
        """Copy hidden rows [r, hidden_size] to the device; those behind r become zeros."""
        self.rows[: len(rows)].copy_(rows, non_blocking=True)
        self.rows[len(rows) : bucket].zero_()


def _heads(model: RaggedModel) -> int:
    return int(getattr(model.config, "num_attention_heads", None) or 1)


def _state_limits(model: RaggedModel, limits: StaticLimits) -> StateLimits:
    """What a plan of states has room for; nothing where no layer keeps one."""
    parts = [part for state in model.layout.states for part in state.parts]
    if not parts:
        return StateLimits(0, 0, 1, 0)
    most = limits.buckets[-1]
    taps = max([part.shape[-1] for part in parts if part.key[0] == "conv"], default=1)
    spilled = 4 * max([math.prod(part.shape) for part in parts if part.key[0] == "recurrent"], default=0)
    spills = min(most, max(MIN_SPILLS, SPILL_BYTES // spilled)) if spilled else most
    return StateLimits(most, min(limits.sessions, most), taps, spills)


def _state_step(model: RaggedModel, limits: StateLimits, words: torch.Tensor) -> StateStep | None:
    """The same words, cut as kernels read them."""
    if not limits.rows:
        return None
    fields, sources, segments = torch.split(
        words, [len(FIELDS) * limits.rows, limits.taps * limits.rows, 2 * limits.sessions]
    )
    parts = [part for state in model.layout.states for part in state.parts if part.key[0] == "recurrent"]
    numbers = max((math.prod(part.shape) for part in parts), default=0)
    scratch = torch.empty(limits.spills * numbers, dtype=torch.float32, device=words.device)
    named = dict(zip(FIELDS, fields.view(len(FIELDS), -1), strict=True))
    return StateStep(**named, sources=sources.view(-1, limits.taps), segments=segments.view(-1, 2), scratch=scratch)


def _fill(into: NDArray[np.int64], values: NDArray[np.int64], bucket: int) -> None:
    into[: len(values)] = values
    into[len(values) : bucket] = 0


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph was recorded of.

    Attributes:
        sub: the layers; None is the head.
    """

    sub: Span | None
    bucket: int


@dataclass(frozen=True, slots=True)
class Recording(Generic[OutputT]):
    """A recorded call.

    Attributes:
        graph: None where it could not be recorded: its kernels are started one by one.
    """

    graph: torch.cuda.CUDAGraph | None
    output: OutputT | None


class SweepGraphs(Generic[OutputT]):
    """The graphs of a model, in one pool of memory. One thread at a time.

    Attributes:
        kept: keys that are never given up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recordings: OrderedDict[GraphKey, Recording[OutputT]] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.kept: set[GraphKey] = set()

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._recordings

    def record(self, key: GraphKey, call: Callable[[], OutputT]) -> None:
        """Record a call. What it reads must be nobody's rows now: warming up runs it for real.

        Raises:
            RuntimeError: it cannot be recorded, or whatever the call raises.
        """
        if self._device.type != "cuda":
            self._recordings[key] = Recording(None, None)
            self._give_up()
            return
        with torch.cuda.device(self._device):
            here, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(here)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    call()
            here.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may copy and allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = call()
        self._recordings[key] = Recording(graph, output)
        self._give_up()

    def do_without(self, key: GraphKey) -> None:
        """Start a call's kernels one by one from now on."""
        if self._device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()  # a recording that broke off may have left the old one unusable
        self._recordings[key] = Recording(None, None)

    def run(self, key: GraphKey, call: Callable[[], OutputT]) -> OutputT:
        """Replay what was recorded; the next replay overwrites what this returns."""
        recording = self._recordings[key]
        self._recordings.move_to_end(key)
        if recording.graph is None or recording.output is None:
            return call()
        recording.graph.replay()
        return recording.output

    def clear(self) -> None:
        """Give the graphs and their memory up."""
        self._recordings.clear()

    def _give_up(self) -> None:
        extra = [key for key in self._recordings if key not in self.kept]
        for key in extra[: max(0, len(extra) - MAX_EXTRA)]:
            del self._recordings[key]


class AddressTable:
    """Lines of addresses on the device.

    Attributes:
        table: int64 [layers, lines, 3]: keys, values and capacity of each session in each layer of the layout.
        lines: how many sessions it has room for.
    """

    def __init__(self, layout: KvLayout, lines: int) -> None:
        self.lines = lines
        parts = sum(len(state.parts) for state in layout.states)
        self.states = torch.zeros(len(layout.rows) + parts, lines, dtype=torch.int64, device=layout.device)
        self._kept_rows = {(each.index, each.name): place for place, each in enumerate(layout.rows)}
        self._kept_parts = {
            place: len(layout.rows) + at
            for at, place in enumerate(
                (each.index, each.name, part.key) for each in layout.states for part in each.parts
            )
        }
        self.table = torch.zeros(len(layout.layers), lines, 3, dtype=torch.int64, device=layout.device)
        self._places = {layer.index: place for place, layer in enumerate(layout.layers)}
        # Least recently used first. An entry goes with its cache, so an address is never used after its memory.
        self._held: weakref.WeakKeyDictionary[KvCache, int] = weakref.WeakKeyDictionary()
        self._versions: dict[int, int] = {}  # of what is written in a line

    def __len__(self) -> int:
        return len(self._held)

    def line(self, kv_cache: KvCache, together: Collection[KvCache]) -> int:
        """The line of a session, which is written when it is new, or has grown.

        Args:
            together: what runs in the same forward, at most `lines`: none of these loses its line.
        """
        line = self._held.pop(kv_cache, None)
        if line is None or self._versions[line] != kv_cache.version:
            line = self._free(together) if line is None else line
            self._write(line, kv_cache)
            self._versions[line] = kv_cache.version
        self._held[kv_cache] = line
        return line

    def _free(self, together: Collection[KvCache]) -> int:
        """A line that nobody has, or that of the session that ran least recently."""
        free = set(range(self.lines)) - set(self._held.values())
        if free:
            return min(free)
        oldest = next(held for held in list(self._held) if held not in together)
        return self._held.pop(oldest)

    def _write(self, line: int, kv_cache: KvCache) -> None:
        """Put a session's addresses in; replays that run still read the old ones, for both go through one stream."""
        rows = torch.zeros(len(self._places), 3, dtype=torch.int64)
        places = [self._places[layer.index] for layer in kv_cache.layout.layers]
        rows[places] = kv_cache.addresses().cpu()
        self.table[:, line].copy_(rows)
        if len(self.states):
            layout = kv_cache.layout
            own = [self._kept_rows[each.index, each.name] for each in layout.rows]
            own += [self._kept_parts[each.index, each.name, part.key] for each in layout.states for part in each.parts]
            addresses = torch.zeros(len(self.states), dtype=torch.int64)
            addresses[own] = kv_cache.state_addresses()
            self.states[:, line].copy_(addresses)
        if self.table.is_cuda:
            stream = torch.cuda.current_stream(self.table.device)
            for layer in kv_cache.layout.layers:  # the allocator gives the memory away only when this stream is past it
                for held in kv_cache.view(layer.index, 1):
                    held.record_stream(stream)
            for held in kv_cache.state_tensors():
                held.record_stream(stream)

    def of_rows(self, layer: int, name: str) -> torch.Tensor:
        """int64 [lines]: where each session keeps rows of a mixer."""
        return self.states[self._kept_rows[layer, name]]

    def of_state(self, layer: int, name: str, key: StateKey) -> torch.Tensor:
        """int64 [lines]: where each session keeps a part of a mixer's states."""
        return self.states[self._kept_parts[layer, name, key]]


@dataclass(frozen=True, slots=True)
class StaticOutput:
    """What a recorded call leaves where the next replay overwrites it.

    Attributes:
        values: [bucket, hidden_size], or the head's logits, float32 [bucket, vocab_size].
        entered: the head only: [bucket, width], the hidden rows that its matrix took, if it has one.
    """

    values: torch.Tensor
    entered: torch.Tensor | None = None


class StaticForward:
    """A model's forwards in buckets of rows. One thread at a time.

    Attributes:
        limits: what its memory was laid out for.
        buckets: numbers of rows that it runs, rising.
        table: lines of the sessions that ran.
        has_graphs: whether replays are recorded; on a CPU each starts its kernels one by one.
        prove_late: what is wrong with a graph that was recorded while sessions run; empty if nothing is.
    """

    def __init__(self, model: RaggedModel, limits: StaticLimits, *, backend: str | None = None) -> None:
        """Take the memory; nothing runs.

        Args:
            model: whose layers. Its attention modules get their lines of the address table.
            backend: torch's name of the compiler that the layers go through; None leaves them as they are.
        """
        from swarm.compute.kernels.tree_attention import tile_rows  # registers the op; imports Triton

        self.limits = limits
        self.buckets = limits.buckets
        self.has_graphs = model.device.type == "cuda"
        self.prove_late: Callable[[GraphKey], str] = lambda _: ""
        self._model = model
        group = max((_heads(model) // layer.kv_heads for layer in model.layout.layers), default=1)
        self._tile = tile_rows(group, model.dtype)
        self._memory = FixedMemory(model, limits, self._tile)
        self.table = AddressTable(model.layout, limits.sessions)
        for module, addresses in zip(model.attention, self.table.table, strict=True):
            module.register_buffer(ADDRESSES, addresses, persistent=False)
        for mixer in model.mixers:
            self._make_ready(mixer)
        # A mixer also runs alone, to make states again: so it is compiled alone, and its layer part by part.
        parts = [part for layer in model.layers for part in layer.children()] if model.mixers else model.layers
        self.layers = CompiledLayers((*parts, *_outer_norms(model)), backend)
        self._graphs: SweepGraphs[StaticOutput] = SweepGraphs(model.device)
        self.head_buckets = tuple(
            bucket for bucket in self.buckets if bucket <= max(self.buckets[0], min(HEAD_BUCKET, model.head_rows))
        )
        self._logits: torch.Tensor | None = None
        if model.span.end == model.num_layers:
            self._logits = torch.empty(self.head_buckets[-1], model.vocab_size, device=model.device)

    @torch.inference_mode()
    def record(self) -> None:
        """Record every bucket of the whole span, and the head's: the largest first, whose memory the others share.

        Raises:
            RuntimeError: one cannot be recorded, or whatever the model raises.
        """
        keys = [GraphKey(self._model.span, bucket) for bucket in self.buckets]
        if self._logits is not None:
            keys += [GraphKey(None, bucket) for bucket in self.head_buckets]
        self._graphs.kept = set(keys)
        for key in sorted(keys, key=lambda one: -one.bucket):
            self._put_nobody(key.bucket)
            self._graphs.record(key, partial(self._start, key))

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[SessionRows], sub: Span, *, at_least: int = 0, eager: bool = False
    ) -> torch.Tensor:
        """Run new nodes and keep their KV; a forward that fails leaves no node behind in any session.

        Args:
            batch: at most one entry per session; R rows in all.
            at_least: rows of the smallest bucket to use, for the proof.
            eager: start the kernels one by one, for the proof.

        Returns:
            [R, hidden_size] in the compute dtype, before the final norm: the sessions' rows, one after the other.

        Raises:
            LocalProtocolError: a session has more tokens than there is memory for.
        """
        return self.forward_parts(batch, (sub,), at_least=at_least, eager=eager)[0]

    @torch.inference_mode()
    def forward_parts(
        self, batch: Sequence[SessionRows], parts: Sequence[Span], *, at_least: int = 0, eager: bool = False
    ) -> list[torch.Tensor]:
        """As `forward`, through parts of the layers, one after the other: the rows that leave each part."""
        outputs: list[list[torch.Tensor]] = [[] for _ in parts]
        appended: list[SessionRows] = []
        waiting = deque(_pieces(batch, self.buckets[-1], self.limits.sessions))
        try:
            while waiting:
                piece = waiting.popleft()
                rows = sum(len(work.node_ids) for work in piece)
                bucket = next(size for size in self.buckets if size >= max(rows, at_least))
                keys = [GraphKey(part, bucket) for part in parts]
                for key in keys:
                    self._record_late(key)
                plan = self._plan(piece, bucket, appended)
                if not (self._memory.fits(plan) and self._plan_states(piece)):
                    if rows == 1:
                        raise LocalProtocolError(
                            "nodes", f"position {plan.positions[0]} exceeds what graphs have room for"
                        )
                    _withdraw(appended, len(piece))
                    waiting.extendleft(reversed(_pieces(piece, rows // 2, self.limits.sessions)))
                    continue
                self._put(piece, plan, keys[0])
                for place, key in enumerate(keys):
                    if place:
                        self._memory.put_rows(outputs[place - 1][-1], bucket)
                    output = self._start(key) if eager else self._graphs.run(key, partial(self._start, key))
                    outputs[place].append(output.values[:rows].clone())
        except BaseException:
            _withdraw(appended, len(appended))
            raise
        return [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in outputs]

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The head on rows [r, hidden_size] of the last layer: float32 [r, vocab_size]."""
        return self.head(rows).logits

    @torch.inference_mode()
    def head_output(self, work: SessionRows, last: int) -> HeadOutput:
        """Run new nodes through a whole model; what its head gives for the last ones."""
        return self.head(self.forward([work], self._model.span)[-last:])

    def head(self, rows: torch.Tensor, *, at_least: int = 0, eager: bool = False) -> HeadOutput:
        """The head in buckets.

        Args:
            rows: [r, hidden_size] of the last layer.
        """
        logits, entered = [], []
        for piece in torch.split(rows, self.head_buckets[-1]):
            bucket = next(size for size in self.head_buckets if size >= max(len(piece), at_least))
            key = GraphKey(None, bucket)
            self._record_late(key)
            self._memory.put_rows(piece, bucket)
            output = self._start(key) if eager else self._graphs.run(key, partial(self._start, key))
            logits.append(output.values[: len(piece)].clone())
            if output.entered is not None:
                entered.append(output.entered[: len(piece)].float())
        return HeadOutput(logits[0] if len(logits) == 1 else torch.cat(logits), torch.cat(entered) if entered else None)

    @torch.inference_mode()
    def replay(self, rows: int, *, head: bool = False) -> None:
        """Compute the last forward again: the same keys and values go to the same slots, while its sessions live.

        Args:
            rows: of that forward, no more than the largest bucket.
        """
        buckets = self.head_buckets if head else self.buckets
        key = GraphKey(None if head else self._model.span, next(bucket for bucket in buckets if bucket >= rows))
        self._graphs.run(key, partial(self._start, key))

    def close(self) -> None:
        """Give the graphs up; the model's own path needs nothing of this."""
        self._graphs.clear()
        self.prove_late = lambda _: ""  # which knows this object: nothing would free its memory at once

    def _start(self, key: GraphKey) -> StaticOutput:
        """Start a bucket's kernels one by one, on what lies in the fixed memory."""
        memory, bucket = self._memory, key.bucket
        with on_device(self._model.device), self.layers.in_place():
            if key.sub is None:
                return self._start_head(bucket)
            entering = memory.rows if key.sub.start else memory.token_ids
            step = memory.step_of(bucket)
            hidden = self._model.run_layers(step, key.sub, entering[:bucket], memory.positions[:bucket])
        return StaticOutput(hidden)

    def _start_head(self, bucket: int) -> StaticOutput:
        assert self._logits is not None, "this span has no head"
        with self._model.entering_head() as entered:
            logits = self._model.run_head(self._memory.rows[:bucket])
        values = self._logits[:bucket]
        values.copy_(logits)
        return StaticOutput(values, entered[0].flatten(0, -2) if entered else None)

    def _record_late(self, key: GraphKey) -> None:
        """Record what was not asked for before: parts of the span that sessions use (R12).

        What cannot be recorded, or fails its proof, runs the same kernels one by one.
        """
        if key in self._graphs:
            return
        self._put_nobody(key.bucket)
        try:
            self._graphs.record(key, partial(self._start, key))
            failure = self.prove_late(key)
        except Exception as error:  # noqa: BLE001 - such as no memory: the kernels are the same without a graph
            failure = first_line(error)
        if failure:
            logger.warning("layers %s: %d rows are not held as a graph: %s", key.sub, key.bucket, failure)
            self._graphs.do_without(key)

    def _put_nobody(self, bucket: int) -> None:
        empty = torch.zeros(0, dtype=torch.int64)
        self._memory.wait()
        self._memory.forget_states()
        self._memory.put(plan_batch([], bucket, self._tile), bucket, empty)
        self._memory.put_rows(self._memory.rows[:0], bucket)

    def _plan(self, piece: Sequence[SessionRows], bucket: int, appended: list[SessionRows]) -> BatchPlan:
        """Give a piece's nodes their slots, and lay it out."""
        together = [work.kv_cache for work in piece]
        planned = []
        for work in piece:
            slots = work.kv_cache.slots
            visible = slots.append(work.node_ids, work.parents, work.positions)
            appended.append(work)
            if work.kv_cache.states is not None:
                work.kv_cache.states.slots.begin()
            planned.append(PlannedSession(self.table.line(work.kv_cache, together), slots.committed, visible))
        return plan_batch(planned, bucket, self._tile)

    def _make_ready(self, mixer: RecurrentMixer) -> None:
        """Let a mixer run by kernels.

        Raises:
            UnsupportedModel: they do not know its class.
        """
        import swarm.compute.kernels.state_steps  # noqa: F401 - registers the operators
        from swarm.compute.recurrent.static_mixer import StaticMixer

        facts = mixer.facts
        assert facts is not None
        (rows,), state = facts.rows, facts.state
        parts = [(part, self.table.of_state(state.index, state.name, part.key)) for part in state.parts]
        mixer.static = StaticMixer(mixer.module, mixer.call, self.table.of_rows(rows.index, rows.name), parts)

    def _plan_states(self, piece: Sequence[SessionRows]) -> bool:
        """Lay out the states of a piece, whose nodes have their slots; False if it has to be cut."""
        if not self._memory.states.rows:
            return True
        ends = [*accumulate(len(work.node_ids) for work in piece)]
        together = [work.kv_cache for work in piece]
        parts = [
            StateRows(work.kv_cache, self.table.line(work.kv_cache, together), end - len(work.node_ids), end)
            for work, end in zip(piece, ends, strict=True)
        ]
        try:
            for part in parts:
                self._make_again(part)
            self._memory.wait()
            plan_states(parts, self._memory.states, self._memory.staged_states)
        except StateOverflow:
            if len(ends) == ends[-1] == 1:
                raise
            return False
        return True

    def _make_again(self, part: StateRows) -> None:
        """Run tokens again after which no state is kept: in the session's mixers, from what they were given."""
        memory = self._memory
        for _ in range(MAX_AGAIN + part.kv_cache.slots.used // self.buckets[-1]):
            missing = missing_states(part, self.buckets[-1])
            if missing is None:
                return
            memory.wait()
            plan_again(missing, memory.states, memory.staged_states)
            bucket = next(size for size in self.buckets if size >= len(missing.slots))
            memory.put(plan_batch([], bucket, self._tile), bucket, torch.zeros(0, dtype=torch.int64))
            slots = torch.tensor(missing.slots, device=self._model.device)
            has = {(state.index, state.name) for state in part.kv_cache.layout.states}
            with on_device(self._model.device), self.layers.in_place():
                for mixer in self._model.mixers:
                    if mixer.place in has:
                        mixer.run_again(part.kv_cache, slots, bucket, memory.step_of(bucket))
        raise StateOverflow("states are made again without end")

    def _put(self, piece: Sequence[SessionRows], plan: BatchPlan, key: GraphKey) -> None:
        """Copy what a replay reads."""
        assert key.sub is not None
        if key.sub.start == 0:
            ids = [work.token_ids for work in piece if work.token_ids is not None]
            self._memory.put(plan, key.bucket, ids[0] if len(ids) == 1 else torch.cat(ids))
            return
        rows = [work.rows for work in piece if work.rows is not None]
        self._memory.put(plan, key.bucket)
        self._memory.put_rows(rows[0] if len(rows) == 1 else torch.cat(rows), key.bucket)


def _outer_norms(model: RaggedModel) -> list[nn.Module]:
    """Norms in front of the layers and behind them, as that of the head: torch cuts their sums by the rows."""
    inside = {id(part) for layer in model.layers for part in layer.modules()}
    parts = cast("nn.Module", model.model).modules()
    return [part for part in parts if "Norm" in type(part).__name__ and id(part) not in inside]


def _pieces(batch: Sequence[SessionRows], rows: int, sessions: int) -> list[list[SessionRows]]:
    """Cut a batch, in order, into pieces of so many rows and sessions at most."""
    pieces: list[list[SessionRows]] = [[]]
    room = rows
    for work in batch:
        start = 0
        while start < len(work.node_ids):
            if room == 0 or len(pieces[-1]) == sessions:
                pieces.append([])
                room = rows
            end = min(start + room, len(work.node_ids))
            pieces[-1].append(work if end - start == len(work.node_ids) else _part(work, start, end))
            room -= end - start
            start = end
    return pieces


def _part(work: SessionRows, start: int, end: int) -> SessionRows:
    """The nodes `[start, end)` of a session's new ones."""
    return replace(
        work,
        node_ids=work.node_ids[start:end],
        parents=work.parents[start:end],
        positions=work.positions[start:end],
        token_ids=None if work.token_ids is None else work.token_ids[start:end],
        rows=None if work.rows is None else work.rows[start:end],
    )


def _withdraw(appended: list[SessionRows], count: int) -> None:
    """Remove the nodes of the last `count` entries again."""
    for _ in range(count):
        work = appended.pop()
        work.kv_cache.withdraw(len(work.node_ids))
