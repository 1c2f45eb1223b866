"""Kept sessions: which one a prompt gets, and when they are let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from secrets import token_bytes
from typing import Any, cast

import pytest

from client.api.sessions import SessionLimits, SessionPool, common_prefix
from client.decode.state import GenerationState
from client.library.session import Beginning, SessionOpener
from swarm.base.errors import Busy
from swarm.base.tasks import TaskScope

LONG = tuple(range(100))


@dataclass
class FakeSession:
    """A session of so many tokens."""

    window_tokens: int
    held: Sequence[int] = ()


@dataclass
class FakeTarget:
    """A model with a context."""

    max_positions: int | None = 4_096


@dataclass
class FakeOpener:
    """Opens sessions as long as there is room for them."""

    room: int = 99
    largest: int = 99_999
    target: FakeTarget = field(default_factory=FakeTarget)
    windows: list[int] = field(default_factory=list)
    held: Sequence[int] = ()
    secret: bytes = field(default_factory=lambda: token_bytes(32))
    secrets: set[bytes] = field(default_factory=set)
    is_open: int = 0

    @asynccontextmanager
    async def open(self, window_tokens: int, nodes: int, beginning: Beginning) -> AsyncIterator[FakeSession]:
        if self.is_open >= self.room or window_tokens > self.largest:
            raise Busy("peer", "0-4", "full")
        self.windows.append(window_tokens)
        self.is_open += 1
        try:
            assert beginning.secret is not None
            self.secrets.add(beginning.secret)
            yield FakeSession(window_tokens, self.held[: common_prefix(self.held, beginning.tokens)])
        finally:
            self.is_open -= 1


@dataclass
class FakeState:
    """A generation."""

    prompt: Sequence[int]
    max_new_tokens: int = 50
    nodes: int = 16
    is_proved: bool = False

    @property
    def sequence(self) -> Sequence[int]:
        return self.prompt


class Clock:
    """Goes on by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def pool(
    opener: FakeOpener, clock: Clock, kept: int = 2, idle_s: float = 60.0, *, share: bool = False
) -> AsyncIterator[SessionPool]:
    async with TaskScope() as scope:
        yield SessionPool(cast("SessionOpener", opener), scope, SessionLimits(kept, idle_s, share), clock)


async def yielded() -> None:
    """Let every task go on as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def used(
    pool: SessionPool,
    prompt: Sequence[int],
    owner: str = "a key",
    *,
    is_good: bool = True,
    **fields: Any,  # noqa: ANN401
) -> bool:
    """Lend a session for a prompt, and say whether it was a kept one."""
    state = cast("GenerationState", FakeState(tuple(prompt), **fields))
    async with pool.lend(state, owner) as (lent, _):
        lent.sequence, lent.is_good = tuple(prompt), is_good
        cast("FakeSession", lent.session).held = prompt
        return lent.was_kept


async def test_a_prompt_that_goes_on_gets_its_session() -> None:
    opener = FakeOpener()
    async with pool(opener, Clock()) as kept:
        assert not await used(kept, LONG)
        assert await used(kept, (*LONG, 1, 2))
        assert not await used(kept, (7, *LONG)), "nothing in common"
        assert (kept.reused, kept.opened, kept.idle) == (1, 2, 2)
    assert opener.is_open == 0


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ((*LONG[:40], *range(500, 560)), {}),
        ((*LONG[:20], 1), {}),
        ((*LONG, 1), {"nodes": 32}),
        (tuple(range(2_048)), {}),
    ],
    ids=["would cost another its rest", "shares too little", "wants larger trees", "is too long for its window"],
)
async def test_a_prompt_gets_a_session_of_its_own_where_it(prompt: tuple[int, ...], fields: dict[str, Any]) -> None:
    async with pool(FakeOpener(), Clock()) as kept:
        await used(kept, LONG)
        assert not await used(kept, prompt, **fields)


async def test_where_no_more_are_kept_the_oldest_is_taken() -> None:
    clock, opener = Clock(), FakeOpener()
    async with pool(opener, clock, kept=2) as kept:
        for first in (1, 2):
            clock.now += 1
            await used(kept, (first, *LONG))
        assert await used(kept, (3, *LONG))
        assert await used(kept, (2, *LONG, 4)), "the younger one is there still"
        assert opener.is_open == 2


async def test_one_that_broke_or_was_left_is_closed() -> None:
    opener = FakeOpener()
    async with pool(opener, Clock()) as kept:
        await used(kept, LONG, is_good=False)
        assert (opener.is_open, kept.idle) == (0, 0)
        with pytest.raises(ValueError, match="broke"):
            async with kept.lend(cast("GenerationState", FakeState(LONG)), "a key"):
                raise ValueError("broke")
        assert opener.is_open == 0


async def test_idle_ones_give_way_where_nodes_are_full() -> None:
    opener = FakeOpener(room=1)
    async with pool(opener, Clock()) as kept:
        await used(kept, LONG)
        assert not await used(kept, (7, *LONG))
        assert opener.is_open == 1
        opener.room = 0
        await kept.clear()
        with pytest.raises(Busy):
            await used(kept, LONG)


async def test_old_ones_are_closed() -> None:
    clock, opener = Clock(), FakeOpener()
    async with pool(opener, clock, idle_s=0.0) as kept:
        await used(kept, LONG)
        held = kept._idle[0].held
        assert held._task is not None
        await held._task
        assert (opener.is_open, kept.idle) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "larger_than", "window"),
    [(10, 0, 2_048), (2_000, 0, 4_096), (10, 2_048, 4_096), (3_000, 0, 5_000), (3_000, 4_096, 5_000)],
)
async def test_a_window_has_room_for_the_next_turns_up_to_the_context(
    prompt: int, larger_than: int, window: int
) -> None:
    opener = FakeOpener(target=FakeTarget(5_000))
    async with pool(opener, Clock()) as kept:
        state = cast("GenerationState", FakeState(range(prompt)))
        await (await kept.open(state, "a key", larger_than, 8)).held.close()
    assert opener.windows == [window]


async def test_where_machines_have_no_room_for_next_turns_this_one_is_answered() -> None:
    opener = FakeOpener(largest=100)
    async with pool(opener, Clock()) as kept:
        assert not await used(kept, range(40), max_new_tokens=20)
        assert opener.windows == [60]
        with pytest.raises(Busy):
            await used(kept, range(90), max_new_tokens=20)


async def test_each_turn_of_a_conversation_goes_on_where_the_last_one_ended() -> None:
    opener = FakeOpener(target=FakeTarget(8_192))
    async with pool(opener, Clock()) as kept:
        sequence = list(range(543))
        assert not await used(kept, sequence, max_new_tokens=8)
        for turn in range(8):
            sequence += [9_000 + turn] * 110
            assert await used(kept, sequence, max_new_tokens=8), f"turn {turn}"
    assert opener.windows == [2_048]


async def test_a_new_session_begins_with_what_machines_hold() -> None:
    opener = FakeOpener(held=LONG[:64])
    async with pool(opener, Clock(), kept=9) as kept:
        await used(kept, range(500, 560))
        await used(kept, LONG)
        assert (kept.begun, kept.opened) == (1, 2)


@pytest.mark.parametrize(("share", "secrets"), [(False, 2), (True, 1)])
async def test_machines_find_what_another_key_wrote_only_where_keys_share(share: bool, secrets: int) -> None:
    opener, other = FakeOpener(), FakeOpener()
    async with pool(opener, Clock(), kept=0, share=share) as kept, pool(other, Clock(), kept=0, share=share) as apart:
        for key in ("one", "another", "one"):
            await used(kept, LONG, key)
        assert len(opener.secrets) == secrets
        await used(apart, LONG, "one")
        assert not opener.secrets & other.secrets, "of another user"


async def test_of_many_requests_with_one_opening_the_first_computes_it() -> None:
    opener = FakeOpener()
    first_token, all_began = asyncio.Event(), asyncio.Event()
    began: list[int] = []

    async def ask(number: int) -> None:
        prompt = (*LONG, 500 + number)
        async with kept.lend(cast("GenerationState", FakeState(prompt)), "a key") as (lent, coming):
            began.append(number)
            if len(began) == 8:
                all_began.set()
            await first_token.wait()
            cast("FakeSession", lent.session).held = prompt
            coming.is_held.set()
            await all_began.wait()

    async with pool(opener, Clock()) as kept, asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(ask(number))
        await yielded()
        assert began == [0]
        first_token.set()
    assert kept.opened == 8


async def test_who_waits_for_an_opening_goes_on_where_it_fails() -> None:
    opener = FakeOpener()
    breaks = asyncio.Event()

    async def fail() -> None:
        async with kept.lend(cast("GenerationState", FakeState(LONG)), "a key"):
            await breaks.wait()
            raise Busy("peer", "0-4", "broke")

    async with pool(opener, Clock()) as kept:
        failing = asyncio.ensure_future(fail())  # noqa: TID251 - awaited below
        await yielded()
        waiting = asyncio.ensure_future(used(kept, (*LONG, 1)))  # noqa: TID251 - awaited below
        await yielded()
        assert not waiting.done()
        breaks.set()
        with pytest.raises(Busy):
            await failing
        assert not await waiting
        assert kept.opened == 2


async def test_a_session_whose_window_is_full_goes_on_in_a_larger_one() -> None:
    opener = FakeOpener()
    async with pool(opener, Clock()) as kept:
        state = cast("GenerationState", FakeState(LONG))
        async with kept.lend(state, "a key") as (lent, _):
            cast("FakeSession", lent.session).held = LONG[:90]
            fresh = await kept.renew(lent, state, lent.session.window_tokens, 50)
            assert (opener.windows, opener.is_open) == ([2_048, 4_096], 1)
            lent.held = fresh.held


async def test_a_key_never_gets_a_session_of_another_one() -> None:
    opener = FakeOpener()
    async with pool(opener, Clock(), kept=1) as kept:
        assert not await used(kept, LONG, "one")
        assert not await used(kept, LONG, "another"), "although no more are kept"
        assert await used(kept, LONG, "another")
        assert not await used(kept, LONG, "one"), "its own gave way"
    async with pool(opener, Clock(), share=True) as kept:
        assert not await used(kept, LONG, "one")
        assert await used(kept, LONG, "another")


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2, 9, 4), (1, 2, 3, 4), 2), ((9,), (1,), 0), (LONG, LONG, 100)],
    ids=["empty", "a beginning", "a difference", "nothing", "all"],
)
def test_common_prefix(one: Sequence[int], other: Sequence[int], shared: int) -> None:
    assert common_prefix(one, other) == common_prefix(other, one) == shared


async def test_a_strangers_session_is_lent_only_where_the_whole_answer_has_room() -> None:
    opener, clock = FakeOpener(largest=70), Clock()  # machines have no room for more than an answer
    async with pool(opener, clock, kept=1) as kept:
        assert not await used(kept, range(100, 140), max_new_tokens=20)  # 60 tokens
        assert not await used(kept, range(200, 245), max_new_tokens=20)  # 65: in the place of the first
        assert await used(kept, range(300, 345), max_new_tokens=20)
        assert (opener.windows, kept.idle) == ([60, 65], 1)
