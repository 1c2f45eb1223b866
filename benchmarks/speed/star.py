"""Serves layers for the baseline: Petals' topology and its linear speculation.

Greedy, and built from our parts so that anyone can repeat it. The client itself goes from server to server, there and
back, so a step over S servers costs 2·S one-way trips:

    client ─ids─▶ first ─rows─▶ client ─rows─▶ next ─rows─▶ client ─rows─▶ last ─picks─▶ client

One long-lived stream per server and session; KV stays on the servers; commits ride on the next step. Speculation is a
chain of k tokens that the draft finds likeliest; one pass checks its k + 1 positions and the longest agreeing beginning
is accepted.

Where it differs from Petals, it does so in the star's favour: the target's own token after the accepted ones is kept,
which Petals' class loses; embedding and head are on the first and the last server and not in the client, so ids and
picks travel instead of rows; what one server answers goes on to the next as it came, without being encoded again; the
draft reads the prompt while the first server does.

    python -m benchmarks star --layers 0-4 --host 10.88.0.2
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import grpc.aio
import torch
import tyro

from benchmarks.speed.star_server import SESSION, WINDOW_TOKENS, StarService, serve_star
from client.decode.walk import Walk
from client.draft.search.tree import DraftTree
from client.draft.sources.model import LocalSession
from node.model.checkpoint import open_checkpoint
from node.model.loading import count_tokens
from node.model.span import load_span
from swarm.base.errors import SwarmError
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.base.library_logging import quiet_libraries
from swarm.compute.ragged_batch import RaggedModel
from swarm.demo import TARGET
from swarm.link.dial import CHANNEL_OPTIONS
from swarm.link.link import Stream
from swarm.protocol.frames import FrameAssembler, split
from swarm.protocol.messages import Frame, Reply, Sampling, Sweep, SweepFrame
from swarm.protocol.session import Limits

CONNECT_S = 10.0
ANY_VOCABULARY = 1 << 31
"""The client does not know the target's; the servers check."""


class LinearDraft:
    """Proposes a chain of the tokens that a draft model finds likeliest; keeps its KV from step to step.

    All of the sequence and of the last chain that ran is committed; what turned out otherwise is cut off.
    """

    def __init__(self, model: RaggedModel, tokens: int) -> None:
        """`model` has the target's vocabulary; a chain has up to `tokens` tokens."""
        self.tokens = tokens
        self._window = min(model.max_positions or WINDOW_TOKENS, WINDOW_TOKENS)
        self._session = LocalSession(model, Limits(model.vocab_size, self._window, sweeps=1, nodes=self._window))

    def propose(self, sequence: Sequence[int], most: int) -> tuple[int, ...]:
        """What follows a sequence: at most `most` tokens, none where the sequence outgrew the draft's window."""
        count = min(self.tokens, most, self._window - len(sequence) + 1)
        if count <= 0:
            return ()
        chain = [self._likeliest(self._read(sequence))]
        while len(chain) < count:
            chain.append(self._likeliest(self._run(chain[-1:])))
        return tuple(chain)

    def _read(self, sequence: Sequence[int]) -> torch.Tensor:
        """Run what has no KV yet, in one forward, and the last token in any case; its logits [1, vocab_size]."""
        held = self._session.state.committed
        pairs = enumerate(zip(held, sequence[:-1], strict=False))
        differing = (place for place, (ours, token) in pairs if ours.token != token)
        known = next(differing, min(len(held), len(sequence) - 1))
        self._session.run(self._session.next((), (), truncate_to=known))
        return self._run(sequence[known:])

    def _run(self, tokens: Sequence[int]) -> torch.Tensor:
        first = self._session.state.next_id
        ids = [TreeNodeId(first + offset) for offset in range(len(tokens))]
        logits = self._session.score(self._session.next(tokens, [None, *ids[:-1]]), last=1).logits
        self._session.run(self._session.next((), (), commit_to=ids[-1]))
        return logits

    @staticmethod
    def _likeliest(logits: torch.Tensor) -> int:
        return int(logits[0].argmax())


@dataclass(frozen=True, slots=True)
class StarRun:
    """One text.

    Attributes:
        first_s: Until the prompt's pass brought its one token.
        steps: Milliseconds of each step after the prompt's.
    """

    tokens: tuple[int, ...]
    first_s: float
    total_s: float
    steps: list[float]


class Star:
    """A client of several servers, which it asks in order; made by `open_star`."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel]) -> None:
        self._channels = channels

    async def generate(
        self,
        prompt_ids: Sequence[int],
        new_tokens: int,
        drafter: LinearDraft | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> StarRun:
        """The target's greedy continuation, in a session of its own; draft time counts as part of its step.

        Raises:
            SwarmError: a server refused, or its stream broke.
        """
        started = clock()
        window = len(prompt_ids) + new_tokens
        walk = Walk(Limits(ANY_VOCABULARY, window, sweeps=1, nodes=2 * window), Sampling())
        async with self._session() as session:
            await session.send(walk.prefill(prompt_ids, last=True))
            if drafter is not None:
                drafter.propose(prompt_ids, 1)  # reads the prompt
            tokens = walk.accept(await session.reply())
            first_s = clock() - started
            steps: list[float] = []
            while len(tokens) < new_tokens:
                step_started = clock()
                most = new_tokens - len(tokens) - 1
                chain = drafter.propose((*prompt_ids, *tokens), most) if drafter is not None else ()
                await session.send(walk.extend(_tree(chain)))
                tokens += walk.accept(await session.reply())
                steps.append((clock() - step_started) * 1e3)
            total_s = clock() - started
        return StarRun(tuple(tokens), first_s, total_s, steps)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[_Session]:
        """Open a stream per server; leaving waits until every server has ended its own."""
        streams = [_Stream(address, channel.stream_stream(SESSION)()) for address, channel in self._channels.items()]
        try:
            yield _Session(streams)
            for stream in streams:
                await stream.end()
            for stream in streams:
                await stream.call.code()
        finally:
            for stream in streams:
                stream.call.cancel()


@asynccontextmanager
async def open_star(addresses: Sequence[str]) -> AsyncIterator[Star]:
    """Connect to the servers, which are given in the order of their layers.

    Raises:
        SwarmError: one does not answer.
    """
    async with AsyncExitStack() as stack:
        channels = {}
        for address in addresses:  # in plain text: what it is compared with is not
            channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            channels[address] = await stack.enter_async_context(channel)
            try:
                async with asyncio.timeout(CONNECT_S):
                    await channel.channel_ready()
            except TimeoutError:
                raise SwarmError(f"star server {address}: does not answer; is it started?") from None
        yield Star(channels)


@dataclass(frozen=True, slots=True)
class _Stream:
    address: str
    call: Stream

    async def send(self, parts: Iterable[bytes]) -> None:
        """Send a message; if the stream is broken, `read` says why."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for part in parts:
                await self.call.write(part)

    async def read(self) -> tuple[list[bytes], Frame]:
        """The next message, in parts as it came and put together."""
        joiner, parts = FrameAssembler(), list[bytes]()
        try:
            while isinstance(part := await self.call.read(), bytes):
                parts.append(part)
                if (message := joiner.feed(part)) is not None:
                    return parts, message
        except grpc.aio.AioRpcError as error:
            raise SwarmError(f"star server {self.address}: {error.details() or error.code().name.lower()}") from error
        raise SwarmError(f"star server {self.address}: ended the session")

    async def end(self) -> None:
        """Say that nothing more comes."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.done_writing()


class _Session:
    """A sweep's way through one session's streams."""

    def __init__(self, streams: Sequence[_Stream]) -> None:
        self._streams = streams

    async def send(self, sweep: Sweep) -> None:
        """Send a sweep to the first server."""
        await self._streams[0].send(split(SweepFrame(sweep)))

    async def reply(self) -> Reply:
        """Hand on what each server answers to the next one; the last one's answer."""
        parts, answer = await self._streams[0].read()
        for stream in self._streams[1:]:
            await stream.send(parts)
            parts, answer = await stream.read()
        if not isinstance(answer, Reply):
            raise SwarmError(f"star server {self._streams[-1].address}: is not the last one; give all, in order")
        return answer


def _tree(chain: Sequence[int]) -> DraftTree:
    return DraftTree(tuple(chain), (None, *range(len(chain) - 1)) if chain else (), (1.0,) * len(chain))


@dataclass(frozen=True, slots=True)
class Options:
    """Serve some of the target's layers for a star."""

    layers: str
    """Half-open, such as 0-4 for layers 0…3."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 4_300
    """Port to listen on."""
    model: str = str(TARGET)
    """The folder of the model."""


async def _serve(options: Options) -> None:
    checkpoint = open_checkpoint(options.model)
    model = load_span(checkpoint, Span.parse(options.layers), torch.float32)
    service = StarService(model, count_tokens(checkpoint.folder, model.vocab_size))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serve_star(service, options.host, options.port) as address:
        print(f"star at {address}, {model.span.describe(model.num_layers)}", flush=True)  # noqa: T201
        await stop.wait()


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    quiet_libraries()
    try:
        asyncio.run(_serve(options))
    except SwarmError as error:
        sys.exit(f"star: {error}")


if __name__ == "__main__":
    main()
