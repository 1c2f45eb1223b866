"""Forwards recorded once and replayed: CUDA graphs by layers and bucket. Owns no inputs.

Where there are no graphs (a CPU, in tests) each call starts its kernels one by one: the same ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from swarm.layers import Span

WARM_UPS = 2
"""Calls before a recording: kernels are compiled and libraries set up, neither of which can be recorded."""
MAX_EXTRA = 24
"""Recordings of parts of the span (R12) that are kept; the one used least recently goes."""

OutputT = TypeVar("OutputT")


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph was recorded of.

    Attributes:
        sub: the layers; None is the head.
        bucket: rows.
    """

    sub: Span | None
    bucket: int


@dataclass(frozen=True, slots=True)
class Recording(Generic[OutputT]):
    """A recorded call.

    Attributes:
        graph: None where it could not be recorded: its kernels are started one by one.
        output: what a replay overwrites.
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
