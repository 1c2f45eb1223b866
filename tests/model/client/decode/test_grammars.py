"""Grammars are exact: a text is that of plain decoding with the same masks, token for token, for every tree.

The reference is a loop of its own over Hugging Face's logits: a fresh matcher that takes one token after another.
Strict token equality in fp32, over real nodes and gRPC on loopback.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
import torch
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

import client.decode.state as client_forced_text
import node.session.admission
from client import AsyncSwarm
from client.base.options import Grammar
from node.session.admission import Admission
from node.session.sweep_run import SweepRun
from node.session.tail import Tail
from swarm.base.errors import ConfigError, GenerationInterrupted, RemoteProtocolError
from swarm.compute.grammars import CompiledGrammar, GrammarCompiler
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.net.three_nodes import prompt
from tests.oracle import oracle_pick

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW = 20
IDS = tuple(prompt(4, 24))
SIZES = {"greedy": (0, 64), "sampled": (16,)}
"""Nodes of a tree; what picks under the masks is the same for all of them."""
SCHEMA = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "maxLength": 8},
        "mood": {"enum": ["glad", "sad"]},
        "years": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["who", "mood", "years"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "regex": Grammar("regex", r"(the|a) [a-z]{2,9}( [a-z]{2,9}){2,5}\."),
    "lark": Grammar("lark", 'start: "He" word+ "."\nword: " " /[a-z]{2,8}/'),
}
CLOSED = {"type": "object", "additionalProperties": False}
WITHOUT_BLANKS: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
REPEATS = "((((a{30}){30}){30}){30}){30}"
SAMPLED = Sampling(23, 0.9, top_p=0.9)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def one_thread_for_files() -> None:
    """Threads that a loop starts when several files are read at once would outlive their test."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here() -> AsyncIterator[InProcessSwarm]:
    async with in_process_swarm(TARGET, ["0-5", "5-12"]) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(here: InProcessSwarm) -> AsyncIterator[AsyncSwarm]:
    async with here.client(draft=DRAFT) as connected:
        await connected.generate("It", max_new_tokens=3, nodes=1)  # starts the threads that live as long as the swarm
        yield connected


@pytest.fixture(scope="module")
def hugging_face() -> PreTrainedModel:
    model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=torch.float32)
    return model


def source(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, WITHOUT_BLANKS)
    return {"regex": LLMatcher.grammar_from_regex, "lark": LLMatcher.grammar_from_lark}[grammar.kind](grammar.text)


@torch.inference_mode()
def expected(model: PreTrainedModel, grammar: Grammar, sampling: Sampling, ends: frozenset[int]) -> tuple[int, ...]:
    """One token after another, each from the whole text so far."""
    matcher = LLMatcher(LLTokenizer((TARGET / "tokenizer.json").read_text()), source(grammar), log_level=0)
    text = list(IDS)
    while len(text) < len(IDS) + NEW and text[-1] not in ends:
        logits = cast("Any", model)(torch.tensor([text])).logits[0, -1].float().numpy()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[: len(logits)]
        scores = np.where(bits.astype(bool), logits, -np.inf)
        token = int(scores.argmax()) if sampling.temperature == 0 else oracle_pick(scores, len(text), sampling)
        assert token in ends or matcher.consume_token(token)
        text.append(token)
    return tuple(text[len(IDS) :])


@pytest.mark.parametrize("how", ["greedy", "sampled"])
@pytest.mark.parametrize("name", GRAMMARS)
async def test_a_text_under_a_grammar_is_plain_decodings_for_every_tree(
    name: str, how: str, client: AsyncSwarm, hugging_face: PreTrainedModel
) -> None:
    sampling = SAMPLED if how == "sampled" else Sampling()
    options: dict[str, Any] = {} if how == "greedy" else {"temperature": 0.9, "seed": 23, "top_p": 0.9}
    wanted = expected(hugging_face, GRAMMARS[name], sampling, client.target.eos_ids)
    for nodes in SIZES[how]:
        result = await client.generate(IDS, max_new_tokens=NEW, nodes=nodes, grammar=GRAMMARS[name], **options)
        assert result.tokens == wanted, f"K = {nodes}"
    if result.finish_reason == "eos":
        check(name, result.text)


def check(name: str, text: str) -> None:
    match name:
        case "regex":
            assert re.fullmatch(GRAMMARS[name].text, text)
        case "lark":
            assert re.fullmatch(r"He( [a-z]{2,8})+\.", text)
        case _:
            found = json.loads(text)
            assert list(found) == ["who", "mood", "years"]
            assert found["mood"] in ("glad", "sad")


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (1.5, 2)])
async def test_json_always_parses(seed: int, temperature: float, client: AsyncSwarm) -> None:
    """And the end of the text is picked where nothing more fits: the model itself never ends one here."""
    result = await client.generate(
        IDS, max_new_tokens=200, nodes=16, temperature=temperature, seed=seed, grammar=GRAMMARS["schema"]
    )
    assert result.finish_reason == "eos"
    check("schema", result.text)


LONG_KEYS = {"first_name_of_the_person": {"type": "string", "maxLength": 8}, "mood": {"enum": ["glad to be", "sad"]}}
LONG = Grammar("json_schema", json.dumps({"properties": LONG_KEYS, "required": [*LONG_KEYS]} | CLOSED))


@pytest.mark.usefixtures("client")
async def test_what_a_grammar_forces_costs_no_sweeps_of_its_own(
    here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a draft model; the text is the same."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    monkeypatch.setattr(client_forced_text, "PATIENCE_S", 60.0)
    async with here.client() as client:
        sweeps: list[dict[str, Any]] = []
        async for piece in client.stream(IDS, max_new_tokens=60, nodes=16, grammar=LONG, trace=True, **options):
            sweeps, found = [*sweeps, *piece.sweeps], piece.result
        monkeypatch.setattr(client_forced_text.ForcedText, "ask", lambda forced, sequence: None)
        without = await client.generate(IDS, max_new_tokens=60, nodes=16, grammar=LONG, **options)
        plain = await client.generate(IDS, max_new_tokens=60, nodes=0, grammar=LONG, **options)
    assert found is not None
    assert found.tokens == without.tokens == plain.tokens
    assert list(json.loads(found.text)) == list(LONG_KEYS)
    assert len(found.stats.sweeps) * 2 < len(without.stats.sweeps)
    certain = [node for sweep in sweeps for node in sweep["nodes"] if node["probability"] == 1]
    assert "first_name_of_the_person" in "".join(node["text"] for node in certain if node["is_accepted"])


async def test_rules_work_together_and_sessions_apart(client: AsyncSwarm) -> None:
    some: list[dict[str, Any]] = [
        {},
        {"grammar": GRAMMARS["regex"]},
        {"grammar": GRAMMARS["regex"], "frequency_penalty": 2.0, "logit_bias": {69: -50.0}},
        {"grammar": GRAMMARS["schema"], "repetition_penalty": 1.3},
        {"grammar": GRAMMARS["schema"], "multistep": True, "temperature": 1.0, "seed": 3},
    ]
    plain = [await client.generate(IDS, max_new_tokens=12, nodes=0, **options) for options in some]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.generate(IDS, max_new_tokens=12, nodes=16, **options)) for options in some]
    found = [task.result() for task in tasks]
    assert [result.tokens for result in found[:-1]] == [result.tokens for result in plain[:-1]]
    assert found[-1].text.startswith("{"), "multi-step picks follow another law, within the grammar"
    assert len({result.tokens for result in found}) == len(some)


async def test_turns_of_a_conversation_each_have_their_own_grammar(client: AsyncSwarm) -> None:
    async with client.chat(max_new_tokens=200, nodes=16) as chat:
        first = await chat.say("Once", grammar=GRAMMARS["schema"])
        second = await chat.say("And", grammar=GRAMMARS["regex"])
        third = await chat.say("And", grammar=GRAMMARS["schema"])
        last = await chat.say("So", max_new_tokens=8)
    check("schema", first.text)
    check("regex", second.text)
    check("schema", third.text)
    assert second.stats.reused_tokens > 0
    assert not last.text.startswith("{")


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("json_schema", "{"), "no JSON schema"),
        (Grammar("json_schema", '{"type": "number of cats"}'), "Invalid type"),
        (Grammar("regex", "a("), "regex"),
        (Grammar("lark", "start: nothing"), "nothing"),
        (Grammar("lark", "start: " + "(" * 9_000 + '"a"' + ")" * 9_000), "nested"),
        (Grammar("json_schema", '{"items":' * 2_000 + "{}" + "}" * 2_000), "recursion"),
        (Grammar("json_schema", '{"$ref": "file:///etc/passwd"}'), "not present"),
    ],
)
async def test_what_is_no_grammar_is_said_before_anything_travels(
    grammar: Grammar, says: str, client: AsyncSwarm, here: InProcessSwarm
) -> None:
    frames = [node.sessions.info().counters.frames_in for node in here.nodes]
    with pytest.raises(ConfigError, match=says):
        await client.generate(IDS, max_new_tokens=4, grammar=grammar)
    assert [node.sessions.info().counters.frames_in for node in here.nodes] == frames


async def test_a_tail_that_does_not_compile_it_says_so(client: AsyncSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client took it for a grammar; both nodes go on serving."""
    compiled = GrammarCompiler.compile

    async def picky(compiler: GrammarCompiler, grammar: Grammar, owner: str = "") -> Any:  # noqa: ANN401
        if compiler not in client._factory._grammars:
            raise ConfigError("grammar: is not to my taste")
        return await compiled(compiler, grammar, owner)

    monkeypatch.setattr(GrammarCompiler, "compile", picky)
    with pytest.raises(
        (ConfigError, RemoteProtocolError, Exception), match=r"grammar: refused by node .*: was refused"
    ):
        await client.generate(IDS, max_new_tokens=4, grammar=Grammar("regex", "[a-z]+ never seen"))
    assert (await client.generate(IDS, max_new_tokens=2)).tokens


async def test_others_compute_while_a_mask_is_awaited(client: AsyncSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    made, may_go_on = CompiledGrammar.masks, asyncio.Event()

    async def late(grammar: CompiledGrammar, asked: Callable[[], dict[str, Any]]) -> tuple[list[int], bytes]:
        await may_go_on.wait()
        return await made(grammar, asked)

    monkeypatch.setattr(CompiledGrammar, "masks", late)
    async with asyncio.TaskGroup() as group:
        waits = group.create_task(client.generate(IDS, max_new_tokens=4, grammar=GRAMMARS["regex"]))
        assert (await client.generate(IDS, max_new_tokens=4)).tokens
        assert not waits.done()
        may_go_on.set()
    assert waits.result().text


async def test_a_tail_that_ignores_the_grammar_is_left_and_the_text_goes_on(
    client: AsyncSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is the tail at first ignores it."""
    wanted = await client.generate(IDS, max_new_tokens=NEW, nodes=16, grammar=GRAMMARS["schema"])
    ignoring: list[Any] = []
    expect_masks = Tail.expect_masks

    def ignore(tail: Tail, run: SweepRun) -> None:
        if run.is_tail and run.asked_nodes and not ignoring:
            ignoring.append(run.model)
        if run.model not in ignoring:
            expect_masks(tail, run)

    monkeypatch.setattr(Tail, "expect_masks", ignore)
    async with in_process_swarm(TARGET, ["0-5", "5-12", "5-12"]) as other, other.client(draft=DRAFT) as connected:
        found = await connected.generate(IDS, max_new_tokens=NEW, nodes=16, grammar=GRAMMARS["schema"])
    assert ignoring
    assert found.tokens == wanted.tokens
    assert len(found.stats.repairs) == 1


async def test_a_text_of_a_tail_that_ignores_the_grammar_is_not_taken(
    here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tail, "expect_masks", lambda tail, run: None)
    async with here.client(draft=DRAFT, wait=0) as client:
        with pytest.raises(GenerationInterrupted, match="the grammar does not take") as left:
            await client.generate(IDS, max_new_tokens=NEW, nodes=16, grammar=GRAMMARS["schema"])
    assert left.value.tokens == ()


async def test_a_grammar_that_takes_too_much_ends_its_session_alone(client: AsyncSwarm) -> None:
    """Five nested repeats took seconds of the tail's engine, and 245 MB of it."""
    with pytest.raises(Exception, match="more time or memory"):
        await client.generate(IDS, max_new_tokens=4, grammar=Grammar("regex", REPEATS))
    assert (await client.generate(IDS, max_new_tokens=2, grammar=GRAMMARS["regex"])).tokens


async def test_whoever_asked_for_a_third_such_grammar_is_refused_any(
    client: AsyncSwarm, here: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tail, whom the client tells its grammars itself; hops before it see none of them."""
    struck: list[tuple[Admission, str]] = []
    strike = Admission.grammar_exceeded

    def counted(admission: Admission, owner: str) -> None:
        struck.append((admission, owner))
        strike(admission, owner)

    now = time.monotonic()
    for one in here.nodes:
        monkeypatch.setattr(one.sessions.admission._grammars, "_clock", lambda: now)
    monkeypatch.setattr(node.session.admission, "is_near", lambda key: False)
    monkeypatch.setattr(Admission, "grammar_exceeded", counted)
    tail = here.nodes[-1].sessions.admission
    for _ in range(3):  # each is asked for again over another route, and none is compiled after the third
        with pytest.raises(Exception, match=r"more time or memory|try again in|nobody serves"):
            await client.generate(IDS, max_new_tokens=4, grammar=Grammar("regex", REPEATS))
    assert struck.count((tail, "127.0.0.1")) == 3
    assert {owner for _, owner in struck} == {"127.0.0.1"}
    with pytest.raises(GenerationInterrupted) as refused:  # by the tail, which nobody can replace
        await client.generate(IDS, max_new_tokens=4, grammar=GRAMMARS["regex"])
    assert refused.value.tokens == ()
    assert struck.count((tail, "127.0.0.1")) == 3, "a grammar of theirs was compiled after the third"
    assert (await client.generate(IDS, max_new_tokens=2)).tokens
