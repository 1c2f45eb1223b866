"""How much does one forward for the sweeps of several sessions save?

The time is what a hop computes per sweep (commit, forward, head and picks or encoded rows), without messages and
without a network. Beside it: the same sweeps one after the other.

    python -m benchmarks together --record
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import tyro

from benchmarks.sheet import Recording, Sheet
from node.engine.scheduler import Batch, BatchMember
from node.engine.sweep_run import HopRole, Picking, SweepRun
from node.model.checkpoint import open_checkpoint
from node.model.span import SpanModel, load_span
from swarm.demo import TARGET
from swarm.ids import TreeNodeId
from swarm.inference.gumbel import gumbel_row
from swarm.inference.kv_cache import KvCache
from swarm.inference.row_codec import encode_rows, lossless_codec
from swarm.layers import Span
from swarm.protocol.hop_log import HopLog
from swarm.protocol.messages import Rows, Sampling, Sweep, SweepFrame
from swarm.protocol.session import Limits
from swarm.runtime.console import make_console
from swarm.runtime.library_logging import quiet_libraries

CONTEXT = 120
"""Committed tokens of every session when its first sweep comes."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure what sharing forwards saves."""

    model: str = str(TARGET)
    """The folder of the model."""
    layers: str = "8-12"
    """Of the demo target's 12: the tail's four."""
    nodes: tuple[int, ...] = (0, 4, 16, 64)
    """Tree nodes of every sweep (K)."""
    sessions: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of sessions, each in turn."""
    repeats: int = 15
    """How often each is measured."""
    device: str = "cpu"
    """Where it runs."""
    dtype: str = "float32"
    """Of the model's weights."""
    threads: int = 1
    """Threads of torch."""


@dataclass(slots=True)
class BinaryTreeSession:
    """One session of a hop, whose client grows a binary tree and always goes on with its first node.

    Attributes:
        seed: Of its tokens.
    """

    model: SpanModel
    seed: int
    _log: HopLog = field(init=False)
    _kv_cache: KvCache = field(init=False)
    _role: HopRole = field(init=False)
    _tip: TreeNodeId | None = None

    def __post_init__(self) -> None:
        model = self.model
        limits = Limits(model.vocab_size, window_tokens=512, sweeps=2, nodes=512)
        self._log, self._kv_cache = HopLog(limits), KvCache(model.layout, 1_024)
        self._role = HopRole(model.span, lossless_codec(model.dtype), model.vocab_size, gumbel_row)
        run = self.next([None, *range(CONTEXT - 1)], commit=CONTEXT - 1)
        Batch([BatchMember(self, run, run.remaining)]).run()

    def next(self, parents: Sequence[int | None], commit: int = 0) -> SweepRun:
        """The next sweep, ready to run. Parents are places in it; `commit` is the place of the node that comes true."""
        state, commit_to = self._log.executed, self._tip
        first, path = state.next_id, 0 if commit_to is None else len(state.path_to(commit_to))
        self._tip = TreeNodeId(first + commit)
        sampling = Sampling(self.seed, temperature=1.0)
        sweep = Sweep(
            sequence=state.sequence + 1,
            committed=len(state.committed) + path,
            first_id=first,
            tokens=tuple(range(len(parents))),
            parents=tuple(None if parent is None else TreeNodeId(first + parent) for parent in parents),
            picks_from=first,
            acked=state.sequence,
            commit_to=commit_to,
            sampling=sampling,
        )
        self._log.receive(SweepFrame(sweep, None, self._rows(len(parents))))
        work = self._log.next_work()
        assert work is not None, "just received"
        return SweepRun(self.model, self._kv_cache, self._role, work, Picking(sampling))

    def _rows(self, count: int) -> Rows | None:
        if self.model.span.start == 0:
            return None
        noise = torch.randn(count, self.model.hidden_size, generator=torch.Generator().manual_seed(self.seed))
        return encode_rows(noise.to(self.model.dtype), self._role.codec)


def measure(model: SpanModel, nodes: int, sessions: int, repeats: int) -> tuple[float, float]:
    """Median milliseconds of all sessions' sweeps together, and one after the other; taken in turns."""
    parents = [None, *((place - 1) // 2 for place in range(1, nodes + 1))]
    crowd = [BinaryTreeSession(model, seed) for seed in range(sessions)]
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * repeats):
        together = turn % 2 == 0
        members = [BatchMember(session, session.next(parents), nodes + 1) for session in crowd]
        started = time.perf_counter()
        if together:
            failed = Batch(members).run()
        else:
            failed = {run: error for one in members for run, error in Batch([one]).run().items()}
        times[together].append((time.perf_counter() - started) * 1e3)
        assert not failed, failed
    return median(times[True]), median(times[False])


def main() -> None:
    options = tyro.cli(Options)
    quiet_libraries()
    torch.set_num_threads(options.threads)
    dtype: torch.dtype = getattr(torch, options.dtype)
    model = load_span(open_checkpoint(options.model), Span.parse(options.layers), dtype, options.device)
    sheet = Sheet(
        "together",
        f"Layers {options.layers} on {model.numeric_class}, {options.threads} thread(s): milliseconds per sweep where "
        f"sweeps of so many sessions share a forward (× as fast as one after the other); medians of {options.repeats}",
        ("tree nodes", *(f"{count} session" + "s" * (count > 1) for count in options.sessions)),
    )
    for nodes in options.nodes:
        cells = []
        for count in options.sessions:
            shared_ms, alone_ms = measure(model, nodes, count, options.repeats)
            sheet.measured.setdefault("runs", []).append(
                {"nodes": nodes, "sessions": count, "together_ms": shared_ms, "alone_ms": alone_ms}
            )
            cells.append(f"{shared_ms / count:.2f} ({alone_ms / shared_ms:.2f})")
        sheet.rows.append((str(nodes), *cells))
    sheet.finish(make_console(), options)
