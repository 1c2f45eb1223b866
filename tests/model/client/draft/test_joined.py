"""Passes of several texts in one forward of the draft: the same trees, fewer forwards, and nobody pays for another."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import closing
from threading import Event

import pytest
import torch

from client.draft.drafter import ModelDrafter
from client.draft.joined import JOINED_ROWS, JoinedDrafting, Searching
from client.draft.search.tree import DraftTree
from swarm.compute.ragged_batch import RaggedModel, SessionRows, load_whole
from swarm.demo import DRAFT
from swarm.protocol.messages import Sampling

GREEDY = Sampling(seed=1, temperature=0.0)
TEXTS = [tuple(range(5 + 7 * text, 35 + 7 * text)) for text in range(8)]
LONG = tuple(range(5, 5 + 3 * JOINED_ROWS))


@pytest.fixture(scope="module")
def model() -> RaggedModel:
    return load_whole(str(DRAFT), torch.float32)


def drafter_of(model: RaggedModel) -> ModelDrafter:
    return ModelDrafter(model, model.vocab_size, 2_048)


class Together:
    """Trees of several texts that are asked for while the thread is held up."""

    def __init__(self) -> None:
        self.drafting = JoinedDrafting()

    def close(self) -> None:
        self.drafting.shutdown()

    def trees(self, drafters: list[ModelDrafter], texts: list[tuple[int, ...]]) -> list[Future[DraftTree]]:
        go_on = Event()
        self.drafting.submit(go_on.wait)
        futures = [
            self.drafting.submit(Searching(one, lambda one=one, text=text: one.growing(text, 24, 6, GREEDY)))  # type: ignore[misc]
            for one, text in zip(drafters, texts, strict=True)
        ]
        go_on.set()
        for future in futures:
            future.exception(20)
        return futures


def shape(tree: DraftTree) -> tuple[object, ...]:
    return tree.tokens, tree.parents


def test_trees_are_those_of_each_text_alone_in_fewer_forwards(model: RaggedModel) -> None:
    before = model.forwards
    alone = [drafter_of(model).grow(text, 24, 6, GREEDY) for text in (*TEXTS, LONG)]
    each = model.forwards - before
    with closing(Together()) as together:
        before = model.forwards
        drafters = [drafter_of(model) for _ in (*TEXTS, LONG)]
        joined = [one.result() for one in together.trees(drafters, [*TEXTS, LONG])]
        assert [shape(tree) for tree in joined] == [shape(tree) for tree in alone]
        assert model.forwards - before <= each // 4
        longer = [(*text, tree.tokens[0]) for text, tree in zip((*TEXTS, LONG), joined, strict=True)]
        again = [one.result() for one in together.trees(drafters, longer)]
    assert [shape(tree) for tree in again] == [shape(drafter_of(model).grow(text, 24, 6, GREEDY)) for text in longer], (
        "what the first trees left in the caches is each text's own"
    )


def test_a_drafters_next_text_waits_for_the_search_of_the_last(model: RaggedModel) -> None:
    """A text that was given up leaves its search behind; the next one began in the midst of it."""
    expected = [drafter_of(model).grow(text, 24, 6, GREEDY) for text in TEXTS]
    with closing(Together()) as together:
        shared = drafter_of(model)
        futures = together.trees([shared] * len(TEXTS), TEXTS)
        assert [shape(one.result()) for one in futures] == [shape(tree) for tree in expected]
        together.trees([shared, drafter_of(model)], TEXTS[:2])
        order = []
        go_on = Event()
        together.drafting.submit(go_on.wait)
        grown = together.drafting.submit(Searching(shared, lambda: shared.growing(LONG, 24, 6, GREEDY)))
        grown.add_done_callback(lambda _: order.append("grown"))
        together.drafting.submit(shared.forget).add_done_callback(lambda _: order.append("forgotten"))
        go_on.set()
        last = together.drafting.submit(shared.forget)
        assert last.result(20) is None
        assert order == ["grown", "forgotten"]
        assert shape(grown.result()) == shape(drafter_of(model).grow(LONG, 24, 6, GREEDY))


def test_a_pass_that_fails_fails_its_own_search(model: RaggedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    drafters = [drafter_of(model) for _ in TEXTS]
    bad = drafters[3].session
    output, forward = model.head_output, model.forward

    def failing(work: SessionRows, last: int) -> object:
        if work.kv_cache is bad.kv_cache:
            raise RuntimeError("no memory")
        return output(work, last)

    def joined(batch: list[SessionRows]) -> torch.Tensor:
        if any(work.kv_cache is bad.kv_cache for work in batch):
            raise RuntimeError("no memory")
        return forward(batch)

    monkeypatch.setattr(model, "head_output", failing)
    monkeypatch.setattr(model, "forward", joined)
    with closing(Together()) as together:
        ended = together.trees(drafters, TEXTS)
    assert [one.exception() is None for one in ended] == [number != 3 for number in range(8)]
    monkeypatch.undo()
    for number, one in enumerate(ended):
        if number != 3:
            assert shape(one.result()) == shape(drafter_of(model).grow(TEXTS[number], 24, 6, GREEDY))


async def test_calls_keep_their_order_and_what_waits_at_the_end_is_cancelled() -> None:
    drafting = JoinedDrafting()
    said: list[int] = []
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.run_in_executor(drafting, said.append, number) for number in range(5)))
    assert said == list(range(5))
    with pytest.raises(ZeroDivisionError):
        await loop.run_in_executor(drafting, lambda: 1 // 0)
    held, go_on = Event(), Event()

    def hold() -> None:
        held.set()
        go_on.wait()

    first = drafting.submit(hold)
    held.wait(5)
    late = drafting.submit(said.append, 9)
    drafting.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    drafting.shutdown()
    assert first.done()
    assert late.cancelled()
    assert 9 not in said
