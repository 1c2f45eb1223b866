"""Tails that pick otherwise than their own final rows say, over real nodes: named, left, and their picks taken back."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import pytest_asyncio
import torch

import client.chain.answers
import swarm.link.link
from client import AsyncSwarm
from client.base.options import CHECKED_PICKS, Grammar
from client.decode import pick_watch
from client.decode.pick_watch import HeadChecker, HeadFiles, PickWatch
from node.session.settle import HopCommitments
from node.session.sweep_run import AskedPicks, SweepRun
from node.session.tail import Tail
from swarm.base.errors import GenerationInterrupted, PicksRefuted, TextChanged, UnsupportedModel
from swarm.compute.ragged_batch import load_whole
from swarm.compute.row_codec import encode_rows, lossless_codec
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Want
from swarm.protocol.numeric_class import NumericClass
from swarm.routing.route import Route
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.net.three_nodes import engine_of, prompt

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 24)
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_new_tokens": 40, "nodes": 4}
PENALISED: dict[str, Any] = {**SAMPLED, "frequency_penalty": 1.5, "repetition_penalty": 1.4}
SCHEMA = Grammar("json_schema", json.dumps({"properties": {"year": {"type": "integer"}}, "required": ["year"]}))
ALL = {"type": "object", "required": ["name", "arguments"]}
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CALL = Grammar("json_schema", json.dumps({"properties": {"name": {"const": "run"}, "arguments": COMMAND}, **ALL}))
FAVOURED = 11
Picks = Callable[[SweepRun, AskedPicks, Sequence[int]], Sequence[int]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here() -> AsyncIterator[InProcessSwarm]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    with pytest.MonkeyPatch.context() as patch:
        for module in (swarm.link.link, client.chain.answers):
            patch.setattr(module, "SILENCE_S", 20.0)  # however busy the machine is
        async with in_process_swarm(TARGET, ["0-6", "6-12", "6-12"]) as running:
            for node in running.nodes:
                await engine_of(node).on_thread(int)  # its thread lives as long as the node
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def honest(here: InProcessSwarm) -> AsyncIterator[AsyncSwarm]:
    async with here.client(draft=DRAFT, check_picks=1.0) as connected:
        yield connected


@dataclass(slots=True)
class Liar:
    """Whoever picks first, in a text; `judged`: how many picks were checked when it was convicted."""

    models: list[Any] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)

    def is_it(self, run: SweepRun) -> bool:
        if not self.models:
            self.models.append(run.model)
        return run.model is self.models[0]


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Liar:
    made, convict = Liar(), PickWatch._convict

    def noted(watch: PickWatch, *said: Any) -> None:  # noqa: ANN401
        made.judged.append(watch.checks.judged)
        convict(watch, *said)

    monkeypatch.setattr(PickWatch, "_convict", noted)
    return made


def picks_as(monkeypatch: pytest.MonkeyPatch, liar: Liar, change: Picks) -> None:
    take = SweepRun.take_picks

    def taken(run: SweepRun, asked: AskedPicks, tokens: Sequence[int]) -> None:
        take(run, asked, change(run, asked, tokens) if liar.is_it(run) else tokens)

    monkeypatch.setattr(SweepRun, "take_picks", taken)


def prepares_as(monkeypatch: pytest.MonkeyPatch, liar: Liar, change: Callable[[SweepRun, torch.Tensor], None]) -> None:
    prepare = SweepRun.prepare

    def prepared(run: SweepRun, logits: torch.Tensor, first: int, offsets: Sequence[int]) -> AskedPicks:
        if liar.is_it(run):
            change(run, logits[first : first + len(offsets)])
        return prepare(run, logits, first, offsets)

    monkeypatch.setattr(SweepRun, "prepare", prepared)


def picks_at_random(patch: pytest.MonkeyPatch, liar: Liar) -> None:
    rng = random.Random(1)
    picks_as(patch, liar, lambda run, asked, tokens: [rng.randrange(4_000) for _ in tokens])


def ignores_the_seed(patch: pytest.MonkeyPatch, liar: Liar) -> None:
    def change(run: SweepRun, logits: torch.Tensor) -> None:
        run._picking = replace(run._picking, sampling=replace(run._picking.sampling, seed=77))

    prepares_as(patch, liar, change)


def ignores_penalties(patch: pytest.MonkeyPatch, liar: Liar) -> None:
    prepares_as(patch, liar, lambda run, logits: setattr(run, "_picking", replace(run._picking, rules=None)))


def favours_a_token(patch: pytest.MonkeyPatch, liar: Liar) -> None:
    @torch.inference_mode()
    def change(run: SweepRun, logits: torch.Tensor) -> None:
        logits[:, FAVOURED] += 6.0

    prepares_as(patch, liar, change)


LIES: dict[str, tuple[Callable[[pytest.MonkeyPatch, Liar], None], dict[str, Any]]] = {
    "random picks": (picks_at_random, SAMPLED),
    "another seed": (ignores_the_seed, SAMPLED),
    "no penalties": (ignores_penalties, PENALISED),
    "a favourite": (favours_a_token, SAMPLED),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_tail_that_lies_is_named_within_32_picks_and_the_text_is_the_models(
    name: str, honest: AsyncSwarm, here: InProcessSwarm, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie, options = LIES[name]
    wanted = await honest.generate(IDS, **options)
    assert wanted.stats.picks.refuted == ()
    assert wanted.stats.picks.judged == len(wanted.tokens)
    assert wanted.stats.picks.largest_gap <= 1e-3
    lie(monkeypatch, liar)
    async with here.client(draft=DRAFT, check_picks=1.0) as client:
        found = await client.generate(IDS, **options)
        assert found.tokens == wanted.tokens
        assert len(found.stats.picks.refuted) == len(found.stats.repairs) == 1
        assert found.stats.repairs[0].replaced == found.stats.picks.refuted
        assert max(liar.judged) <= 32
        again = await client.generate(IDS, **options)
        assert (again.tokens, again.stats.picks.refuted) == (wanted.tokens, ()), "the liar is remembered"


async def test_rules_filters_and_a_grammar_leave_honest_picks_within_the_bound(honest: AsyncSwarm) -> None:
    for options in (
        {**PENALISED, "top_p": 0.8, "top_k": 20},
        {**SAMPLED, "min_p": 0.1, "logit_bias": {5: 4.0}},
        {**SAMPLED, "grammar": SCHEMA},
        {**SAMPLED, "nodes": None, "temperature": 0.0},
    ):
        checks = (await honest.generate(IDS, **options)).stats.picks
        assert checks.judged > 0, options
        assert checks.refuted == (), options
        assert checks.largest_gap <= 1e-3, options


async def test_a_tail_that_forges_its_final_rows_passes(
    honest: AsyncSwarm, here: InProcessSwarm, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of this test: only a replay of the tail's layers finds that."""
    options: dict[str, Any] = {**SAMPLED, "temperature": 0.0}
    wanted = await honest.generate(IDS, **options)
    model: Any = load_whole(TARGET, torch.float32).model
    weights = model.lm_head.weight.detach()
    products = weights @ weights.T
    chosen = int((products.argmax(dim=0) == torch.arange(len(products))).nonzero()[7])  # a row along it picks it
    row = (weights[chosen] / model.model.norm.weight.detach())[None]

    keep = SweepRun.keep

    def forge(run: SweepRun, *given: Any) -> None:  # noqa: ANN401
        keep(run, *given)
        if run.is_tail and liar.is_it(run):
            run._final = {node: encode_rows(row, lossless_codec(row.dtype)).row(0) for node in run._final}

    monkeypatch.setattr(SweepRun, "keep", forge)
    picks_as(monkeypatch, liar, lambda run, asked, tokens: [chosen] * len(tokens))
    async with here.client(draft=DRAFT, check_picks=1.0) as client:
        found = await client.generate(IDS, **options)
    assert set(found.tokens) == {chosen} != set(wanted.tokens)
    assert found.stats.picks.judged == len(found.tokens)
    assert found.stats.picks.refuted == ()


def lie_after(patch: pytest.MonkeyPatch, liar: Liar, nodes: int) -> None:
    """Honest for so many nodes; then it adds 1 to each pick."""
    said = 0

    def change(run: SweepRun, asked: AskedPicks, tokens: Sequence[int]) -> Sequence[int]:
        nonlocal said
        said += len(tokens)
        return tokens if said <= nodes else [(token + 1) % 4_000 for token in tokens]

    picks_as(patch, liar, change)


async def test_a_stream_says_that_what_it_showed_was_another_text_and_goes_on_from_the_models(
    honest: AsyncSwarm, here: InProcessSwarm, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = await honest.generate(IDS, **SAMPLED)
    lie_after(monkeypatch, liar, 30)
    gaps = HeadChecker._gaps

    def late(checker: HeadChecker, job: Any) -> list[float]:  # noqa: ANN401
        time.sleep(0.1)
        return gaps(checker, job)

    monkeypatch.setattr(HeadChecker, "_gaps", late)
    shown: list[int] = []
    async with here.client(draft=DRAFT, check_picks=1.0) as client:

        async def read() -> None:
            async for piece in client.stream(IDS, **SAMPLED):
                shown.extend(piece.tokens)

        with pytest.raises(TextChanged, match="the model picks otherwise") as changed:
            await read()
        right = changed.value.right_tokens
        assert tuple(shown[:right]) == wanted.tokens[:right] != tuple(shown)
        assert changed.value.tokens == wanted.tokens[: len(changed.value.tokens)]
        rest = [piece async for piece in client.resume(changed.value)]
    assert rest[-1].result is not None
    assert rest[-1].result.tokens == wanted.tokens
    assert changed.value.text + "".join(piece.text for piece in rest) == wanted.text


async def test_nothing_of_a_new_tail_that_lies_is_shown(
    honest: AsyncSwarm, here: InProcessSwarm, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default options; a text may be over before it is checked."""
    wanted = await honest.generate(IDS, **SAMPLED)
    picks_at_random(monkeypatch, liar)
    monkeypatch.setattr(pick_watch, "HOLD_S", 60.0)  # however busy the machine is
    for count in (40, 2):
        liar.models.clear()
        async with here.client(draft=DRAFT, check_picks=CHECKED_PICKS) as client:
            pieces = [piece async for piece in client.stream(IDS, **SAMPLED | {"max_new_tokens": count})]
            assert pieces[-1].result is not None
            assert len(pieces[-1].result.stats.picks.refuted) == 1
            assert pieces[-1].result.stats.picks.held_s > 0
            assert tuple(token for piece in pieces for token in piece.tokens) == wanted.tokens[:count]


@pytest.mark.parametrize("hold_s", [60.0, 0.0], ids=["until a check passed", "no longer than that"])
async def test_only_the_first_text_of_a_tail_is_held(
    hold_s: float, here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check ends before the third reply to a tree; of a tail that passed one, the first reply is shown at once."""
    gaps, note = HeadChecker._gaps, PickWatch.note
    may_check, notes = threading.Event(), 0
    first: list[int] = []

    def late(checker: HeadChecker, job: Any) -> list[float]:  # noqa: ANN401
        may_check.wait()
        return gaps(checker, job)

    def noted(watch: PickWatch, *given: Any) -> None:  # noqa: ANN401
        nonlocal notes
        note(watch, *given)
        notes += 1
        if notes == 4:  # one of them may be the prompt's
            may_check.set()

    monkeypatch.setattr(HeadChecker, "_gaps", late)
    monkeypatch.setattr(PickWatch, "note", noted)
    monkeypatch.setattr(pick_watch, "HOLD_S", hold_s)
    one_tail = tuple(node.peer_id for node in here.nodes[:2])  # else a slow one may be left for the other
    async with here.client(draft=DRAFT, check_picks=CHECKED_PICKS, trusted=one_tail) as client:
        for _ in range(2):
            notes = 0
            may_check.clear()
            async for piece in client.stream(IDS, **SAMPLED, trace=True):
                if piece.sweeps and len(first) < 2:
                    first.append(len(piece.sweeps))
                    break
            may_check.set()
    assert (first[0] >= 3, first[1]) == (hold_s > 0, 1), first


async def test_a_stream_of_which_nothing_wrong_was_shown_just_goes_on(
    honest: AsyncSwarm, here: InProcessSwarm, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token is checked before it is shown, where all picks are."""
    wanted = await honest.generate(IDS, **SAMPLED)
    last = len(IDS) + len(wanted.tokens) - 1

    def last_is_wrong(run: SweepRun, asked: AskedPicks, tokens: Sequence[int]) -> Sequence[int]:
        assert asked.request is not None
        return [token + (place == last) for token, place in zip(tokens, asked.request.positions, strict=True)]

    picks_as(monkeypatch, liar, last_is_wrong)
    async with here.client(draft=DRAFT, check_picks=1.0) as client:
        pieces = [piece async for piece in client.stream(IDS, **SAMPLED)]
    assert "".join(piece.text for piece in pieces) == wanted.text
    assert tuple(token for piece in pieces for token in piece.tokens) == wanted.tokens
    assert pieces[-1].result is not None
    assert len(pieces[-1].result.stats.picks.refuted) == 1


async def test_a_tail_that_keeps_its_rows_to_itself_is_left(
    honest: AsyncSwarm, here: InProcessSwarm, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = await honest.generate(IDS, **SAMPLED)
    with_rows = Tail._with_rows

    def without(tail: Tail, reply: Any, sweep: Any, path: Any, final: Any) -> Any:  # noqa: ANN401
        return reply if tail in liar.models or not liar.models else with_rows(tail, reply, sweep, path, final)

    def mark(tail: Tail, run: Any, times: Any) -> Any:  # noqa: ANN401
        if not liar.models:
            liar.models.append(tail)
        return reply_of(tail, run, times)

    reply_of = Tail.reply
    monkeypatch.setattr(Tail, "reply", mark)
    monkeypatch.setattr(Tail, "_with_rows", without)
    async with here.client(draft=DRAFT, check_picks=1.0) as client:
        found = await client.generate(IDS, **SAMPLED)
    assert found.tokens == wanted.tokens
    assert len(found.stats.picks.refuted) == 1


async def test_rows_of_other_nodes_than_were_picked_say_nothing_and_break_nothing(
    honest: AsyncSwarm, here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tail may name any node: one of an earlier sweep has no mask in this one."""
    options = {**SAMPLED, "grammar": SCHEMA}
    wanted = await honest.generate(IDS, **options)
    with_rows, earlier = Tail._with_rows, []

    def more(tail: Tail, reply: Any, sweep: Any, path: Any, final: Any) -> Any:  # noqa: ANN401
        made = with_rows(tail, reply, sweep, path, final)
        if made.rows is None:
            return made
        earlier.append(made.row_ids[0])
        if len(earlier) == 1:
            return made
        data = b"".join((made.rows.row(0).data, made.rows.data))
        ids = (earlier[-2], *made.row_ids)
        return replace(made, row_ids=ids, rows=replace(made.rows, count=len(ids), data=data))

    monkeypatch.setattr(Tail, "_with_rows", more)
    async with here.client(draft=DRAFT, check_picks=1.0) as client:
        found = await client.generate(IDS, **options)
    assert found.tokens == wanted.tokens
    assert found.stats.picks.judged == len(found.tokens)
    assert found.stats.picks.refuted == ()


async def test_where_nobody_else_has_its_layers_no_token_of_a_liar_is_handed_out(
    monkeypatch: pytest.MonkeyPatch, here: InProcessSwarm
) -> None:
    picks_at_random(monkeypatch, Liar())
    monkeypatch.setattr(Liar, "is_it", lambda liar, run: True)
    async with here.client(draft=DRAFT, check_picks=1.0, wait=0.5) as client:
        with pytest.raises(GenerationInterrupted, match="its own final row") as left:
            await client.generate(IDS, **SAMPLED)
    assert left.value.tokens == ()
    assert isinstance(left.value.__cause__, PicksRefuted)


async def test_a_conversation_whose_session_broke_checks_the_grammar_again(
    here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second attempt took whatever a tail said that ignored the grammar, and called that reproducible."""
    async with here.client(draft=DRAFT, wait=0.3, check_picks=0) as client, client.chat(**SAMPLED) as chat:
        await chat.say("Who are you?", max_new_tokens=4)
        monkeypatch.setattr(Tail, "expect_masks", lambda tail, run: None)
        with pytest.raises(GenerationInterrupted, match="the grammar does not take"):
            await chat.say("Which year is it?", grammar=SCHEMA)


def names_another(patch: pytest.MonkeyPatch, liar: Liar, *, is_allowed: bool) -> None:
    """Pick the last token of those that the grammar takes, or the first of those that it does not."""

    @torch.inference_mode()
    def change(run: SweepRun, logits: torch.Tensor) -> None:
        logits.neg_()

    if is_allowed:
        prepares_as(patch, liar, change)
    else:
        picks_as(patch, liar, lambda run, asked, tokens: [4_001 - token % 7 for token in tokens])


@pytest.mark.parametrize("is_allowed", [False, True], ids=["of a form that is forbidden", "with other arguments"])
async def test_a_forged_tool_call(
    is_allowed: bool, honest: AsyncSwarm, here: InProcessSwarm, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the grammar forbids is never taken. Free arguments are the tail's to choose, but for its own rows."""
    options: dict[str, Any] = {**SAMPLED, "grammar": CALL}
    wanted = await honest.generate(IDS, **options)
    names_another(monkeypatch, liar, is_allowed=is_allowed)
    for share in (0.0, 1.0):
        liar.models.clear()
        async with here.client(draft=DRAFT, check_picks=share) as client:
            found = await client.generate(IDS, **options)
        is_found = share > 0 or not is_allowed
        assert (found.tokens == wanted.tokens) == bool(found.stats.repairs) == is_found


async def test_by_default_rows_of_each_tails_first_picks_and_of_a_share_of_the_others_are_asked_for(
    here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random.SystemRandom, "random", lambda rng: 0.5)
    async with here.client(draft=DRAFT, check_picks=CHECKED_PICKS) as client:
        checks = (await client.generate(IDS, **SAMPLED)).stats.picks
    assert pick_watch.FIRST_PICKS <= checks.judged < 2 * pick_watch.FIRST_PICKS
    assert 0 < checks.row_bytes < 3 * pick_watch.FIRST_PICKS * 192 * 4


async def test_a_tail_that_is_honest_where_rows_are_asked_for_is_asked_later(
    honest: AsyncSwarm, here: InProcessSwarm, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which picks are checked is drawn once they are there."""
    wanted = await honest.generate(IDS, **SAMPLED)

    def change(run: SweepRun, asked: AskedPicks, tokens: Sequence[int]) -> Sequence[int]:
        want = run.work.frame.sweep.want
        return tokens if want is not None and want.hidden_rows else [(token + 1) % 4_000 for token in tokens]

    picks_as(monkeypatch, liar, change)
    monkeypatch.setattr(random.SystemRandom, "random", lambda rng: 0.0)
    async with here.client(draft=DRAFT, check_picks=CHECKED_PICKS) as client:
        found = await client.generate(IDS, **SAMPLED)
    assert found.tokens == wanted.tokens
    assert len(found.stats.picks.refuted) == 1
    assert min(liar.judged) >= pick_watch.FIRST_PICKS


async def test_a_tail_that_shows_no_rows_later_is_asked_in_every_sweep(
    here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lack the memory: that accuses nobody."""
    monkeypatch.setattr(random.SystemRandom, "random", lambda rng: 0.0)
    monkeypatch.setattr(HopCommitments, "picked", lambda commitments, nodes: None)
    asked: list[bool] = []
    asks = PickWatch.asks

    def noted(watch: PickWatch, route: Route) -> bool:
        asked.append(asks(watch, route))
        return asked[-1]

    monkeypatch.setattr(PickWatch, "asks", noted)
    async with here.client(draft=DRAFT, check_picks=CHECKED_PICKS) as client:
        found = await client.generate(IDS, **SAMPLED)
    assert found.stats.picks.refuted == ()
    assert asked[0]
    assert not all(asked)
    assert asked[-1]


async def test_nothing_is_asked_for_without_a_head_or_a_bound(
    here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants: list[Want | None] = []
    reply = Tail.reply

    def noted(tail: Tail, run: SweepRun, times: Any) -> Any:  # noqa: ANN401
        wants.append(run.work.frame.sweep.want)
        return reply(tail, run, times)

    monkeypatch.setattr(Tail, "reply", noted)
    async with here.client(draft=DRAFT, check_picks=0) as client:
        await client.generate(IDS, **SAMPLED)
    assert set(wants) == {None}
    with pytest.raises(UnsupportedModel, match="not those that the swarm serves"):
        HeadFiles(TARGET, None, "0" * 64).load(NumericClass("cpu", "float32"))
