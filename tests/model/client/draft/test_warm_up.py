"""The thread that drafts: warm before the first text, with as many CPU threads as pay, and nothing left of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.simulation.acceptance import demo_prompts
from client.base.options import DraftOptions
from client.base.target import load_target
from client.draft import loading
from client.draft.drafter import NoDrafter, TreeDrafter
from client.draft.loading import drafting_thread, keep_fewest, load_drafter, warm_up
from client.library.aio import AsyncSwarm
from swarm.base.errors import ConfigError
from swarm.compute.compute_thread import use_threads
from swarm.demo import DGF, DRAFT, REDRAFTER, TARGET
from swarm.protocol.messages import Sampling

HIDDEN = 192
USUAL = 4


@pytest.fixture(autouse=True)
def _usual_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(USUAL)
    yield
    torch.set_num_threads(before)


def made() -> TreeDrafter:
    drafter = load_drafter(TARGET, load_target(TARGET), DraftOptions((DRAFT, REDRAFTER, DGF), "cpu")).drafter
    assert isinstance(drafter, TreeDrafter)
    return drafter


@pytest.mark.parametrize(("threads", "used"), [(3, {3}), (None, {1, 2, 4})])
def test_only_the_thread_that_drafts_computes_with_other_threads(threads: int | None, used: set[int]) -> None:
    with drafting_thread() as drafting:
        warm_up(drafting, made(), HIDDEN, threads)
        assert drafting.submit(torch.get_num_threads).result() in used
    assert torch.get_num_threads() == USUAL
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == USUAL
    with drafting_thread() as drafting:
        warm_up(drafting, NoDrafter(), HIDDEN, threads)
        assert drafting.submit(torch.get_num_threads).result() == (threads or 1)


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [({1: 1.0, 2: 0.9}, 1), ({1: 1.0, 2: 0.5, 4: 0.45}, 2), ({1: 1.0, 2: 0.5, 4: 0.25}, 4)],
)
def test_further_threads_must_pay(seconds: dict[int, float], kept: int) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(use_threads, 1, USUAL).result()
        thread.submit(keep_fewest, lambda: seconds[torch.get_num_threads()], USUAL).result()
        assert thread.submit(torch.get_num_threads).result() == kept


@pytest.mark.parametrize("has_card", [False, True])
def test_nothing_is_left_of_the_warm_up_but_warmth(has_card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source was asked, heads with a row; and then grows what one grows that never warmed up."""
    sizes: set[tuple[object, object, float]] = set()
    passes: list[tuple[tuple[int, ...], int]] = []
    drafter, grow = made(), TreeDrafter.grow

    def note(self: TreeDrafter, *given: object) -> object:
        tree = grow(self, *given)  # type: ignore[arg-type]
        passes.append((tuple(given[0]), tree.rounds))  # type: ignore[arg-type]
        assert not tree.is_early
        sizes.add((given[1], given[2], given[3].temperature))  # type: ignore[attr-defined]
        return tree

    with monkeypatch.context() as patch:
        patch.setattr(TreeDrafter, "grow", note)
        patch.setattr(torch.cuda, "is_initialized", lambda: has_card)
        with drafting_thread() as drafting:
            warm_up(drafting, drafter, HIDDEN, None)
            drafting.submit(str).result()
    assert len(passes) > 2
    assert all(rounds > 0 for _, rounds in passes), "of a model, each time"
    shown = {(*size, temperature) for size in loading.CARD_TREES for temperature in (0.0, 1.0)}
    assert sizes == (shown if has_card else {(loading.NODES, loading.LEVELS, 0.0)})
    for text in (*demo_prompts(1), [0, 1], [0, 2]):
        fresh, after = (one.grow(text, 16, loading.LEVELS, Sampling()) for one in (made(), drafter))
        assert (after.tokens, after.parents) == (fresh.tokens, fresh.parents)
        assert (after.has_read, after.is_early) == (True, True), "the row of the warm-up is no text's"


async def test_less_than_one_thread_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads 0: give 1 to"):
        async with AsyncSwarm.connect(TARGET, peers=["/ip4/127.0.0.1/tcp/1/p2p/none"], threads=0):
            pass
