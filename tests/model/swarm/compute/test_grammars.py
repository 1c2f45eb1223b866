"""Grammars of strangers in workers: what takes too much ends alone, and nobody waits for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise

import psutil
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

import swarm.compute.grammars
from swarm.base.errors import ConfigError
from swarm.base.ids import TreeNodeId
from swarm.base.workers import FIRST
from swarm.compute.grammars import (
    MAX_COMPILED,
    CompiledGrammar,
    ForcedTokens,
    GrammarCompiler,
    GrammarPlace,
    LeaseExceeded,
)
from swarm.compute.path_rules import NodeMasks
from swarm.demo import TARGET
from swarm.protocol.messages import Sweep
from swarm.protocol.pick_rules import Grammar, PickRules
from swarm.protocol.session import Limits, SessionState

pytestmark = pytest.mark.asyncio

END = 2
NUMBER = Grammar("json_schema", '{"type":"number"}')
REPEATS = Grammar("regex", "((((a{30}){30}){30}){30}){30}")
MEETING = " & ".join(f"/(.*{chr(97 + place % 26)}.{{{place + 5}}})*/" for place in range(40))
CONJUNCTION = Grammar("lark", f"start: A\nA: {MEETING}")
NAMES = [f"{a}{b}{c}" for a in "abcdefghij" for b in "abcdefghijklmnopqrstuvwxyz" for c in "abcdefghijklmnopqrst"]
RULES = [f"{one}:{two}" for one, two in pairwise(NAMES[:5_000])]
CHAIN = Grammar("lark", "\n".join(["start:aaa", *RULES, NAMES[4_999] + ':"a"']))
LINKS = {one: {"items": {"$ref": f"#/$defs/{two}"}} for one, two in pairwise(NAMES[:1_500])}
REFERENCES = Grammar("json_schema", json.dumps({"$defs": {**LINKS, NAMES[1_499]: {}}, "$ref": "#/$defs/aaa"}))
WIDE = Grammar("json_schema", json.dumps({"properties": {f"p{place}": {"type": "string"} for place in range(2_200)}}))


def workers_now() -> set[psutil.Process]:
    """All that there are, of other files' models too."""
    return set() if FIRST.pid is None else set(psutil.Process(FIRST.pid).children(recursive=True))


@pytest_asyncio.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    """And all of its workers end with it."""
    others = workers_now()
    found = GrammarCompiler.of_folder(TARGET)
    yield found
    mine = workers_now() - others
    found.close()
    assert psutil.wait_procs(mine, timeout=10)[1] == []


def text_of(tokens: tuple[int, ...]) -> SessionState:
    """A session whose live nodes are a text."""
    state = SessionState(Limits(4_096, window_tokens=64, sweeps=8, nodes=64))
    parents = (None, *map(TreeNodeId, range(len(tokens) - 1)))
    state.apply(Sweep(1, 0, TreeNodeId(0), tokens, parents, TreeNodeId(0)))
    return state


async def masks(compiled: CompiledGrammar, grammar: Grammar, tokens: tuple[int, ...] = (5,)) -> NodeMasks:
    state = text_of(tokens)
    place = GrammarPlace(compiled, PickRules(1, grammar=grammar, end_tokens=(END,)))
    return await place.masks(list(state.live), state)


@pytest.mark.parametrize("grammar", [REPEATS, CONJUNCTION], ids=["repeats", "conjunction"])
async def test_a_grammar_that_takes_too_much_ends_alone(grammar: Grammar, compiler: GrammarCompiler) -> None:
    """Both took seconds and hundreds of megabytes; an honest asker's grammar is done before they are."""
    honest = await compiler.compile(NUMBER, "honest")

    async def hostile() -> None:
        with pytest.raises(LeaseExceeded):
            await masks(await compiler.compile(grammar, "hostile"), grammar)

    async with asyncio.TaskGroup() as group:
        attack = group.create_task(hostile())
        await asyncio.sleep(0)
        assert len((await masks(honest, NUMBER)).bits) == 1
        assert not attack.done()
    assert len((await masks(honest, NUMBER)).bits) == 1


@pytest.mark.parametrize("grammar", [CHAIN, REFERENCES], ids=["lark", "references"])
async def test_a_long_chain_of_rules_ends_no_process(grammar: Grammar, compiler: GrammarCompiler) -> None:
    """The library follows one by recursion, down a stack that no exception guards."""
    assert len(grammar.text) < 65_536
    with pytest.raises((ConfigError, LeaseExceeded)):
        await compiler.compile(grammar)
    assert len((await masks(await compiler.compile(NUMBER), NUMBER)).bits) == 1


async def test_a_large_honest_schema_is_within_the_lease(compiler: GrammarCompiler) -> None:
    assert 60_000 < len(WIDE.text) < 65_536
    assert len((await masks(await compiler.compile(WIDE), WIDE)).bits) == 1


async def test_a_text_is_followed_on_in_another_worker(compiler: GrammarCompiler) -> None:
    """One session's end by its lease, or a lack of memory, costs others of the same grammar no text."""
    letters = Grammar("regex", "[a-d]+")
    compiled = await compiler.compile(letters)
    state = text_of((5,))
    place = GrammarPlace(compiled, PickRules(1, grammar=letters, end_tokens=(END,)))
    before = await place.masks(list(state.live), state)
    compiled.close()
    after = await place.masks(list(state.live), state)
    assert compiled.run == 2
    assert before.bits.tobytes() == after.bits.tobytes()


async def test_what_must_follow_a_text_is_told_as_it_goes_on(compiler: GrammarCompiler) -> None:
    """Also where it went on otherwise, and in another worker."""
    grammar = Grammar("regex", "(He said|It was) to me that")
    compiled, read = await compiler.compile(grammar), AutoTokenizer.from_pretrained(TARGET)

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(read.encode(text, add_special_tokens=False))

    place = ForcedTokens(compiled, PickRules(1, grammar=grammar, end_tokens=(END,)))
    forced = [await place.after((5, *tokens(text))) for text in ("", "He", "It", "It was to me", "Nobody")]
    compiled.close()
    forced.append(await place.after((5, *tokens("He"))))
    whole = [tokens(f"{start} to me")[1:] for start in ("He said", "It was")]
    assert [found[: len(one)] for found, one in zip(forced[1:3], whole, strict=True)] == whole
    assert forced[0] == forced[4] == ()
    assert forced[2][-len(forced[3]) :] == forced[3] != ()
    assert forced[5] == forced[1]
    assert compiled.run == 2


async def test_workers_that_somebody_killed_are_begun_again(compiler: GrammarCompiler) -> None:
    """Each of them, and the program's first one."""
    compiled = await compiler.compile(NUMBER)
    assert FIRST.pid is not None
    first = psutil.Process(FIRST.pid)
    workers = [*first.children(recursive=True), first]
    for worker in workers:
        worker.kill()
    psutil.wait_procs(workers)  # the last one to go might take another call
    with pytest.raises(LeaseExceeded):
        await masks(compiled, NUMBER)
    assert len((await masks(compiled, NUMBER)).bits) == 1


async def test_few_compiled_grammars_are_kept(compiler: GrammarCompiler) -> None:
    for count in range(MAX_COMPILED + 3):
        newest = await compiler.compile(Grammar("regex", "a" * (count + 1)))
    assert len(compiler._kept) == len(compiler._live) == MAX_COMPILED
    assert await compiler.compile(Grammar("regex", "a" * (MAX_COMPILED + 3))) is newest, "it is not compiled again"
    assert await compiler.compile(Grammar("regex", "a" * (MAX_COMPILED + 3)), "other") is not newest


async def test_no_more_grammars_are_followed_than_fit(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm.compute.grammars, "MAX_LIVE", 3)
    monkeypatch.setattr(swarm.compute.grammars, "MAX_COMPILED", 1)
    followed = [await compiler.compile(Grammar("regex", "a" * count)) for count in (1, 2, 3)]
    with pytest.raises(MemoryError):
        await compiler.compile(NUMBER)
    del followed[-1]
    await compiler.compile(NUMBER)


async def test_the_largest_makes_room_when_all_take_too_much(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, wide = await compiler.compile(NUMBER, "honest"), await compiler.compile(WIDE, "other")
    monkeypatch.setattr(swarm.compute.grammars, "LIVE_BYTES", 16 << 20)
    await compiler.compile(REPEATS, "third")
    assert wide.held_bytes == 0 < small.held_bytes
    assert len((await masks(wide, WIDE)).bits) == 1, "it begins again"


async def test_a_model_without_a_tokenizer_file_says_so() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        await GrammarCompiler.of_folder(TARGET / "nowhere").compile(NUMBER)
