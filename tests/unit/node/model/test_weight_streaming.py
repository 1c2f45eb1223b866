"""The streamer: layers come in order into two buffers, reading runs beside computing, and a rate is kept."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
import torch

from node.model.offload import (
    BUFFERS,
    MAX_TRACE_EVENTS,
    PIECE_BYTES,
    HostCopyStream,
    RateLimiter,
    TraceEvent,
    WeightStreamer,
    overlaps,
)

CPU = torch.device("cpu")


def store(layers: int, size: int = 100, first: int = 0) -> dict[int, torch.Tensor]:
    """Layer i is full of the number i; later layers are larger."""
    return {index: torch.full((size + index,), index, dtype=torch.uint8) for index in range(first, first + layers)}


@contextmanager
def streamer_of(data: dict[int, torch.Tensor], bytes_per_s: float | None = None) -> Iterator[WeightStreamer]:
    with closing(WeightStreamer(data, CPU, bytes_per_s)) as streamer:
        yield streamer


class Watched(deque[TraceEvent]):
    """Moments that say when reading of a layer begins."""

    def __init__(self, layers: int) -> None:
        super().__init__(maxlen=MAX_TRACE_EVENTS)
        self.begun = [threading.Event() for _ in range(layers)]

    def append(self, event: TraceEvent) -> None:
        super().append(event)
        if event[0] == "read":
            self.begun[event[1]].set()


def sweep(streamer: WeightStreamer, layers: range) -> list[tuple[int, int]]:
    """What each layer found on entering: its bytes' value and their number."""
    found = []
    for index in layers:
        data = streamer.acquire(index)
        assert len(set(data.tolist())) == 1, "bytes of two layers at once"
        found.append((int(data[0]), len(data)))
        streamer.release(index)
    return found


@pytest.mark.parametrize("layers", [1, 2, 3, 7])
def test_every_layer_has_its_own_bytes_sweep_after_sweep(layers: int) -> None:
    data = store(layers, first=4)
    with streamer_of(data) as streamer:
        for _ in range(3):
            assert sweep(streamer, range(4, 4 + layers)) == [(index, 100 + index) for index in data]
        assert streamer.resident_bytes == min(BUFFERS, layers) * (100 + 3 + layers)


def test_what_fits_the_buffers_is_read_once() -> None:
    with streamer_of(store(2)) as streamer:
        for _ in range(5):
            sweep(streamer, range(2))
        assert streamer.reads == 2


def test_the_next_sweeps_first_layers_are_read_behind_the_last_one() -> None:
    with streamer_of(store(5)) as streamer:
        streamer.trace = watched = Watched(5)
        streamer.acquire(0)
        watched.begun[1].wait(10)
        streamer.release(0)
        for begun in watched.begun[:2]:
            begun.clear()
        sweep(streamer, range(1, 5))
        assert all(begun.wait(10) for begun in watched.begun)
        streamer.acquire(0)
        assert [index for kind, index in watched if kind == "read"][:7] == [0, 1, 2, 3, 4, 0, 1]


def test_a_part_of_the_layers_goes_round_by_itself() -> None:
    with streamer_of(store(8)) as streamer:
        streamer.set_layers(2, 6)
        for _ in range(2):
            assert [index for index, _ in sweep(streamer, range(2, 6))] == [2, 3, 4, 5]
        streamer.set_layers(0, 8)
        assert [index for index, _ in sweep(streamer, range(8))] == list(range(8))


def test_reading_the_next_layer_begins_before_computing_this_one_ends() -> None:
    """Computing a layer waits here until the reader was seen at the next one: without overlap it would wait in vain."""
    with streamer_of(store(6)) as streamer:
        streamer.trace = watched = Watched(6)
        for index in range(6):
            following = watched.begun[(index + 1) % 6]
            following.clear()
            streamer.acquire(index)
            assert following.wait(10)
            streamer.release(index)
        assert overlaps(watched) == 6


def test_overlap_is_not_seen_where_there_is_none() -> None:
    one_by_one: list[TraceEvent] = []
    for index in range(3):
        one_by_one += [("read", index), ("ready", index), ("run", index), ("done", index)]
    assert overlaps(one_by_one) == 0
    assert overlaps([("read", 0), ("ready", 0), ("run", 0), ("read", 1), ("done", 0), ("run", 1), ("done", 1)]) == 1


def test_a_layer_that_could_not_be_read_is_read_again_when_it_is_asked_for_again() -> None:
    with streamer_of(store(3)) as streamer:
        copy_stream, broken = streamer._copy_stream, [True]

        class Failing(HostCopyStream):
            def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
                if broken[0]:
                    raise OSError("the disk is gone")
                copy_stream.copy(target, source)

        streamer._copy_stream = Failing()
        with pytest.raises(OSError, match="the disk is gone"):
            streamer.acquire(0)
        streamer.release(0)
        broken[0] = False
        assert [index for index, _ in sweep(streamer, range(3))] == [0, 1, 2]


def test_closing_ends_a_slow_read_and_whoever_waits_for_it() -> None:
    data = store(2, size=4 * PIECE_BYTES)
    streamer = WeightStreamer(data, CPU, bytes_per_s=1.0)
    with ThreadPoolExecutor(1) as computing:
        waiting = computing.submit(streamer.acquire, 0)
        streamer.close()
        with pytest.raises((RuntimeError, CancelledError, AssertionError)):
            waiting.result(10)


def test_a_rate_is_kept_and_idle_time_is_not_saved_up() -> None:
    now = [100.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    limiter = RateLimiter(1_000.0, lambda: now[0], wait)
    for _ in range(5):
        limiter.wait_for(100)
    assert now[0] == pytest.approx(100.5)
    now[0] += 60
    limiter.wait_for(200)
    assert now[0] == pytest.approx(160.7)
    now[0] += 0.05  # reading itself took time
    limiter.wait_for(100)
    assert now[0] == pytest.approx(160.85)
    RateLimiter(None, lambda: now[0], wait).wait_for(1 << 40)
    assert now[0] == pytest.approx(160.85)
