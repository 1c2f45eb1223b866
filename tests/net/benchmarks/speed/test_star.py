"""The baseline star: the target's own greedy text, by 2·S messages per step, and fewer steps with a linear draft."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.speed.star import LinearDraft, Star, StarRun, open_star
from benchmarks.speed.star_server import StarService, serve_star
from node.model.checkpoint import open_checkpoint
from node.model.loading import count_tokens
from node.model.span import SpanModel, load_span
from node.session.service import RpcContext
from swarm.base.errors import SwarmError
from swarm.base.layers import Span
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.demo import DRAFT, PASSAGES, TARGET

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPANS = (Span(0, 4), Span(4, 8), Span(8, 12))
WAYS = (None, 1, 4, 10)
"""Lengths of a draft's chain; None: no draft."""
NEW = 14
PROMPT = 16
ROUND = [f"{way} {layers}" for layers in SPANS for way in ("to", "from")]
"""One step's messages in order: to each server and back."""


class Watched(StarService):
    """A server that notes every message and every session."""

    def __init__(self, model: SpanModel, valid_tokens: int, heard: list[str]) -> None:
        super().__init__(model, valid_tokens)
        self.layers = model.span
        self.heard = heard
        self.sessions = 0

    async def session(self, requests: AsyncIterator[bytes], context: RpcContext) -> None:
        self.sessions += 1

        async def noted() -> AsyncIterator[bytes]:
            async for part in requests:
                self.heard.append(f"to {self.layers}")
                yield part

        await super().session(noted(), cast("RpcContext", WatchedContext(self, context)))


@dataclass(frozen=True, slots=True)
class WatchedContext:
    """A call's context that notes what is written."""

    server: Watched
    context: RpcContext

    async def write(self, part: bytes) -> None:
        self.server.heard.append(f"from {self.server.layers}")
        await self.context.write(part)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        await self.context.abort(code, details)


@dataclass(frozen=True, slots=True)
class Running:
    """A star that runs, its servers, what they hear, and their addresses."""

    star: Star
    servers: list[Watched]
    heard: list[str]
    addresses: list[str]


@dataclass(frozen=True, slots=True)
class Told:
    """A generation and what the servers heard of it: messages in order, and sessions of each."""

    run: StarRun
    heard: list[str]
    sessions: list[int]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    checkpoint, heard = open_checkpoint(TARGET), list[str]()
    models = [load_span(checkpoint, span, torch.float32) for span in SPANS]
    servers = [Watched(model, count_tokens(checkpoint.folder, model.vocab_size), heard) for model in models]
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serve_star(server, "127.0.0.1", 0)) for server in servers]
        star = await stack.enter_async_context(open_star(addresses))
        yield Running(star, servers, heard, addresses)


@pytest.fixture(scope="module")
def draft() -> RaggedModel:
    return load_whole(DRAFT, torch.float32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(running: Running, draft: RaggedModel) -> dict[int | None, Told]:
    """The same generation in every way."""
    found: dict[int | None, Told] = {}
    for count in WAYS:
        running.heard.clear()
        before = [server.sessions for server in running.servers]
        drafter = None if count is None else LinearDraft(draft, count)
        run = await running.star.generate(prompt(), NEW, drafter)
        sessions = [server.sessions - old for server, old in zip(running.servers, before, strict=True)]
        found[count] = Told(run, running.heard.copy(), sessions)
    return found


def prompt() -> tuple[int, ...]:
    text = json.loads(PASSAGES.read_text(encoding="utf-8").splitlines()[0])["text"]
    return tuple(Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode(text).ids[:PROMPT])


def whole(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)
    return model


def greedy(model: PreTrainedModel, ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What Hugging Face says next."""
    given = torch.tensor([ids])
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made = cast("Any", model).generate(given, attention_mask=torch.ones_like(given), **options)
    return tuple(made[0, len(ids) :].tolist())


async def test_every_text_is_hugging_faces(told: dict[int | None, Told]) -> None:
    text = greedy(whole(TARGET), prompt(), NEW)
    assert {way: one.run.tokens for way, one in told.items()} == dict.fromkeys(WAYS, text)


@pytest.mark.parametrize("way", WAYS)
async def test_a_step_goes_to_every_server_and_back(way: int | None, told: dict[int | None, Told]) -> None:
    assert told[way].heard == ROUND * (1 + len(told[way].run.steps)), "the prompt's pass, then the steps"
    assert told[way].sessions == [1, 1, 1]


async def test_a_draft_saves_steps(told: dict[int | None, Told]) -> None:
    steps = [len(told[way].run.steps) for way in WAYS]
    assert steps[0] == NEW - 1, "the prompt's pass brings the first token"
    assert steps[0] > steps[1] > steps[2] >= steps[3]


async def test_what_is_accepted_and_the_targets_own_come_in_one_step(running: Running) -> None:
    """A draft that is the target itself is always right."""
    sure = LinearDraft(load_whole(TARGET, torch.float32), 4)
    run = await running.star.generate(prompt(), 1 + 2 * 5, sure)
    assert (len(run.tokens), len(run.steps)) == (11, 2)


async def test_times_are_of_the_callers_clock(running: Running) -> None:
    ticks = iter(float(second) for second in range(100))
    run = await running.star.generate(prompt(), 3, clock=lambda: next(ticks))
    assert (run.first_s, run.steps, run.total_s) == (1, [1_000, 1_000], 6)


@pytest.mark.parametrize(
    ("right", "rows"),
    [(4, 2 + 3), (2, 1 + 3), (0, 1 + 3)],  # the last of a chain has not run yet
)
async def test_a_draft_is_greedy_and_keeps_its_kv(right: int, rows: int, draft: RaggedModel) -> None:
    drafter, model = LinearDraft(draft, 4), whole(DRAFT)
    chain = drafter.propose(prompt(), 9)
    assert chain == greedy(model, prompt(), 4)
    sequence = (*prompt(), *chain[:right], 7)
    forwards, before = draft.forwards, draft.rows_in
    assert drafter.propose(sequence, 9) == greedy(model, sequence, 4)
    assert (draft.forwards - forwards, draft.rows_in - before) == (4, rows)


async def test_a_chain_is_no_longer_than_wanted(draft: RaggedModel) -> None:
    drafter = LinearDraft(draft, 4)
    assert [len(drafter.propose(prompt(), most)) for most in (-1, 0, 2, 9)] == [0, 0, 2, 4]
    beyond = [7] * ((draft.max_positions or 0) + 2)
    assert [len(drafter.propose(beyond[:length], 9)) for length in (len(beyond) - 2, len(beyond) - 1)] == [1, 0]


async def test_servers_out_of_order_are_named(running: Running) -> None:
    first, middle, last = running.addresses
    for addresses, culprit, why in (
        ([middle, first, last], middle, "rows"),
        ([first, last, middle], middle, "Reply is not a sweep"),
        ([first, middle], middle, "is not the last one"),
    ):
        async with open_star(addresses) as star:
            with pytest.raises(SwarmError, match=f"star server {culprit}: .*{why}"):
                await star.generate(prompt(), 3)
