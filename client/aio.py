"""The client library, async: connect to a swarm, generate, stream. `client.sync` is its blocking twin.

A generation runs in a task of its own and hands pieces over through a bounded queue, so a reader that stops reading
stops it too, and a reader may live in any task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch

from client.chain import Chain, open_chain
from client.decode import Job, decode
from client.draft import Drafter, ModelDrafter, NoDrafter, check_compatible
from client.options import ConnectOptions, GenerateOptions, Options, make_options
from client.stats import Result, Stats
from client.target import Target, find_in_swarm, load_target
from client.text import TextStream
from client.walk import Walk
from swarm.budget import FixedBudget
from swarm.codec import lossless_codec
from swarm.dial import Dialer
from swarm.errors import (
    ConfigError,
    ContextFull,
    GenerationInterrupted,
    HopError,
    RouteError,
    SwarmError,
    UnsupportedModel,
)
from swarm.messages import Codec, Open
from swarm.ragged import load_whole
from swarm.registry import ModelIdentity, Registry
from swarm.registry_dht import DhtConfig, DhtRegistry
from swarm.routing import Route, RouteQuery, best_route
from swarm.sampling import check as check_sampling
from swarm.session import Limits
from swarm.tasks import TaskScope

logger = logging.getLogger(__name__)

DEFAULT_NODES = 16
SWEEPS_IN_FLIGHT = 4
PREFILL_CHUNK = 512
OPEN_ATTEMPTS = 3
PIECES_AHEAD = 256
DRAFT_WINDOW = 32_768


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became certain; the last piece of a stream also carries the result."""

    text: str
    result: Result | None = None


class AsyncSwarm:
    """One model in one swarm; made by `AsyncSwarm.connect`."""

    def __init__(self, target: Target, identity: ModelIdentity, registry: Registry, drafter: Drafter) -> None:
        self.target = target
        self.identity = identity
        self._registry = registry
        self._drafter = drafter
        self._join: tuple[str, ...] = ()
        self._nodes = DEFAULT_NODES
        self._dialer = Dialer()
        self._scope = TaskScope()
        self._drafting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draft")

    @classmethod
    @asynccontextmanager
    async def connect(cls, model: str | Path, **options: Unpack[ConnectOptions]) -> AsyncIterator[AsyncSwarm]:
        """Join a swarm as a client of one model.

        Args:
            model: hub id or folder of the target; its weights are not needed.
            options: all by keyword, none of them needed but `peers`:
                peers: multiaddresses of peers, as `swarm bootstrap` and `node serve` print them.
                draft: hub id or folder of a draft model with the same tokenizer; None drafts nothing.
                revision: branch, tag or commit of a hub model.
                nodes: default tree nodes per sweep (K).
                registry: an open registry to use instead of joining the DHT.
                threads: CPU threads for the draft model.

        Raises:
            SwarmError: the model is unknown, nobody answers, the draft does not fit …
        """
        peers, registry = tuple(options.get("peers", ())), options.get("registry")
        if not peers and registry is None:
            raise ConfigError("peers: name one of the swarm's peers, as `swarm bootstrap` and `node serve` print them")
        if (threads := options.get("threads")) is not None:
            torch.set_num_threads(threads)
        target = await asyncio.to_thread(load_target, model, options.get("revision"))
        drafter = await asyncio.to_thread(_load_drafter, target, options.get("draft"))
        opened = registry or DhtRegistry.open(DhtConfig(join=peers, client_mode=True))
        async with opened:
            identity = find_in_swarm(target, await opened.models(), peers)
            swarm = cls(target, identity, opened, drafter)
            swarm._join, swarm._nodes = peers, options.get("nodes", DEFAULT_NODES)
            async with swarm._dialer, swarm._scope:
                try:
                    yield swarm
                finally:
                    swarm._drafting.shutdown(wait=False, cancel_futures=True)

    async def stream(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Piece, None]:
        """Generate and hand out text as it becomes certain; the texts of all pieces join to the result's.

        Args:
            prompt: text, or token ids.
            options: fields of `client.Options`.

        Raises:
            ConfigError: an option cannot be.
            ContextFull: prompt and new tokens exceed the model's context.
            RouteError: nobody serves some layers.
            GenerationInterrupted: the chain broke midway; carries text and tokens so far.
        """
        job = self._job(prompt, make_options(options))
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue(PIECES_AHEAD)
        task = self._scope.spawn(self._produce(job, pieces), name="generation")
        try:
            while True:
                item = await pieces.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.result is not None:
                    return
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Result:
        """Generate and return the whole result; arguments and errors as in `stream`."""
        result = None
        async for piece in self.stream(prompt, **options):
            result = piece.result
        assert result is not None, "a stream ends with a result or an error"
        return result

    async def route(self, *, avoid: frozenset[str] = frozenset()) -> Route:
        """The chain that a generation would take now.

        Raises:
            RouteError: nobody serves some layers.
        """
        records = await self._registry.records(self.identity.fingerprint, self.identity.num_layers, fresh=bool(avoid))
        query = RouteQuery(self.target.name, self.identity.num_layers, self._nodes, self._join)
        return best_route([record for record in records if record.peer not in avoid], query)

    def _job(self, prompt: str | Sequence[int], options: Options) -> Job:
        options.check()
        sampling = options.sampling()
        check_sampling(sampling, self.target.vocab_size)
        ids = tuple(self.target.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else tuple(prompt)
        if not ids:
            raise ConfigError("prompt: is empty, and this tokenizer adds no token of its own; give at least one token")
        if not all(0 <= token < self.target.vocab_size for token in ids):
            raise ConfigError(f"prompt: token ids must be below {self.target.vocab_size}")
        limit = self.target.max_positions
        if limit is not None and len(ids) + options.max_new_tokens > limit:
            raise ContextFull(
                f"prompt of {len(ids)} tokens and {options.max_new_tokens} new ones exceed the model's context of "
                f"{limit}; shorten one of them"
            )
        text = TextStream(
            self.target.tokenizer,
            ids,
            stop=options.stop,
            eos_ids=self.target.eos_ids,
            max_new_tokens=options.max_new_tokens,
        )
        nodes = self._nodes if options.nodes is None else options.nodes
        if isinstance(self._drafter, NoDrafter):
            nodes = 0
        return Job(
            prompt=ids,
            sampling=sampling,
            budget=FixedBudget(nodes),
            chunk=min(PREFILL_CHUNK, len(ids)),
            max_new_tokens=options.max_new_tokens,
            text=text,
            drafter=self._drafter,
            drafting=self._drafting,
        )

    async def _produce(self, job: Job, pieces: asyncio.Queue[Piece | Exception]) -> None:
        """Run one generation; every error goes to its reader and not to the other generations."""
        try:
            await self._generate(job, pieces)
        except Exception as error:  # noqa: BLE001 - raised again where the reader is
            await pieces.put(error)

    async def _generate(self, job: Job, pieces: asyncio.Queue[Piece | Exception]) -> None:
        started = job.clock()
        first_token = started
        async with self._open(job) as (chain, route):
            walk = Walk(self._limits(chain), job.sampling)
            try:
                async for text in decode(job, chain, walk):
                    if first_token == started and job.text.tokens:
                        first_token = job.clock()
                    if text and not job.text.stopped:
                        await pieces.put(Piece(text))
                    last = text
            except SwarmError as error:
                job.text.finish()
                raise GenerationInterrupted(str(error), job.text.text, job.text.tokens) from error
            stats = _stats(job, route, first_token - started, job.clock() - started)
        logger.info(
            "session over: %d tokens, %d sweeps, acceptance length %.2f, %.1f tokens/s",
            *(stats.tokens, len(stats.sweeps), stats.acceptance_length, stats.tokens_per_s),
        )
        result = Result(job.text.text, tuple(job.text.tokens), job.text.finish_reason or "length", stats)
        await pieces.put(Piece(last, result))

    @asynccontextmanager
    async def _open(self, job: Job) -> AsyncIterator[tuple[Chain, Route]]:
        """Open a session, on another route if a machine of the first does not answer."""
        window = len(job.prompt) + job.max_new_tokens
        avoid: frozenset[str] = frozenset()
        refusal: HopError | None = None
        for attempt in range(OPEN_ATTEMPTS):
            route = await self._route_beside(avoid, refusal)
            budget = job.budget.nodes(job.max_new_tokens) + 1
            want = Open(
                fingerprint=self.identity.fingerprint,
                window_tokens=window,
                sweeps=SWEEPS_IN_FLIGHT,
                nodes=budget + max((SWEEPS_IN_FLIGHT - 1) * job.chunk, budget),
                codec=_codec(route.numeric_class),
            )
            is_open = False
            try:
                async with open_chain(self._dialer, route, want) as chain:
                    is_open = True
                    yield chain, route
                return
            except HopError as error:
                if is_open or attempt + 1 == OPEN_ATTEMPTS:
                    raise
                avoid |= {error.peer}
                refusal = error

    async def _route_beside(self, avoid: frozenset[str], refusal: HopError | None) -> Route:
        """A route without the machines that refused; where there is none, their refusal is the answer."""
        try:
            return await self.route(avoid=avoid)
        except RouteError:
            if refusal is not None:
                raise refusal from None
            raise

    def _limits(self, chain: Chain) -> Limits:
        credits = chain.credits
        return Limits(self.target.vocab_size, credits.window_tokens, credits.sweeps, credits.nodes)


def _codec(numeric_class: str) -> Codec:
    """The lossless codec for a chain's compute type, which its numeric class ends with."""
    dtype = getattr(torch, numeric_class.rpartition("-")[2], None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedModel(f"this client knows no codec for nodes that compute in {numeric_class}; update it")
    return lossless_codec(dtype)


def _load_drafter(target: Target, draft: str | Path | None) -> Drafter:
    if draft is None:
        return NoDrafter()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = load_whole(draft, dtype, device)
    tokenizer = load_target(draft).tokenizer
    check_compatible(target.tokenizer, tokenizer, target.vocab_size, model.vocab_size)
    return ModelDrafter(model, len(target.tokenizer), model.max_positions or DRAFT_WINDOW)


def _stats(job: Job, route: Route, first_token_s: float, total_s: float) -> Stats:
    return Stats(
        tokens=len(job.text.tokens),
        prompt_tokens=len(job.prompt),
        prefill_sweeps=job.prefill_sweeps,
        seed=job.sampling.seed,
        reproducible=route.numeric_class.endswith("-float32"),
        numeric_class=route.numeric_class,
        time_to_first_token_s=first_token_s,
        total_s=total_s,
        sweeps=tuple(job.sweeps),
        hops=tuple(f"{hop.peer[-8:]} {hop.span}" for hop in route.hops),
    )
