"""Penalties and biases are exact: a text is Hugging Face's with the same rule, token for token, for every tree.

References: Hugging Face's `generate` with its logits processors, and the oracle's few lines over Hugging Face's logits.
Strict token equality in fp32, over real nodes and gRPC on loopback.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from client import AsyncSwarm
from client.base.options import GenerateOptions, make_options
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling
from tests.in_process_swarm import in_process_swarm
from tests.net.three_nodes import prompt
from tests.oracle import oracle_pick

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW = 24
"""Tokens of most generations here."""
IDS = tuple(prompt(4, 24))
SIZES = {"greedy": (0, 64), "sampled": (16,)}
"""Nodes of a tree; what picks from the processed scores is the same for all of them."""
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 17, "top_p": 0.95}
BIAS = {12: -1.5, 15: -100.0, 261: -100.0, 520: 2.5}
RULES: dict[str, dict[str, Any]] = {
    "negative": {"frequency_penalty": -0.3, "presence_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": BIAS},
    "all": {
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": BIAS,
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def one_thread_for_files() -> None:
    """Threads that a loop starts when several files are read at once would outlive their test."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm() -> AsyncIterator[AsyncSwarm]:
    async with in_process_swarm(TARGET, ["0-5", "5-12"]) as here, here.client(draft=DRAFT) as client:
        await client.generate("It", max_new_tokens=3, nodes=1)  # starts the threads that live as long as the swarm
        yield client


@pytest.fixture(scope="module")
def hugging_face() -> PreTrainedModel:
    model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=torch.float32)
    return model


class Counted(LogitsProcessor):
    """OpenAI's law of the frequency and the presence penalty, over generated tokens."""

    def __init__(self, start: int, frequency: float, presence: float) -> None:
        self.start, self.frequency, self.presence = start, frequency, presence

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        for row, ids in zip(scores, input_ids.tolist(), strict=True):
            for token, count in Counter(ids[self.start :]).items():
                row[token] -= self.frequency * count + self.presence
        return scores


def processors(start: int, rules: dict[str, Any]) -> LogitsProcessorList:
    """The same rules in Hugging Face's terms, in the documented order."""
    found = LogitsProcessorList()
    if "repetition_penalty" in rules:
        found.append(RepetitionPenaltyLogitsProcessor(rules["repetition_penalty"]))
    found.append(Counted(start, rules.get("frequency_penalty", 0.0), rules.get("presence_penalty", 0.0)))
    if "logit_bias" in rules:
        found.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in rules["logit_bias"].items()]))
    return found


@torch.inference_mode()
def expected(
    model: PreTrainedModel, ids: tuple[int, ...], rules: dict[str, Any], sampling: Sampling, count: int = NEW
) -> tuple[int, ...]:
    """Hugging Face's own continuation: greedy by `generate`, sampled by the oracle over its processed logits."""
    law = processors(len(ids), rules)
    if sampling.temperature == 0:
        made = cast("Any", model).generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, logits_processor=law
        )
        return tuple(made[0, len(ids) :].tolist())
    text = list(ids)
    for _ in range(count):
        logits = cast("Any", model)(torch.tensor([text])).logits[:, -1].float()
        scores = law(torch.tensor([text]), logits)  # type: ignore[arg-type]
        text.append(oracle_pick(scores[0].numpy(), len(text), sampling))
    return tuple(text[len(ids) :])


@cache
def without_rules(model: PreTrainedModel, sampling: Sampling) -> tuple[int, ...]:
    return expected(model, IDS, {}, sampling)


@pytest.mark.parametrize("how", ["greedy", "sampled"])
@pytest.mark.parametrize("name", RULES)
async def test_a_text_with_penalties_and_biases_is_hugging_faces_for_every_tree(
    name: str, how: str, swarm: AsyncSwarm, hugging_face: PreTrainedModel
) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, **(SAMPLED if how == "sampled" else {}), **RULES[name]}
    sampling = Sampling(17, 0.9, top_p=0.95) if how == "sampled" else Sampling()
    wanted = expected(hugging_face, IDS, RULES[name], sampling)
    for nodes in SIZES[how]:
        result = await swarm.generate(IDS, nodes=nodes, **options)
        assert result.tokens == wanted, f"K = {nodes}"
    assert max(sweep.nodes for sweep in result.stats.sweeps) == max(SIZES[how]), "the trees were as large as asked"
    assert wanted != without_rules(hugging_face, sampling), "the rule decided something"


async def test_sessions_with_other_rules_share_batches(swarm: AsyncSwarm) -> None:
    some: list[dict[str, Any]] = [{}, *(RULES[name] for name in ("all", "negative", "repetition", "bias"))]
    alone = [await swarm.generate(IDS, max_new_tokens=16, nodes=16, **options) for options in some]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(swarm.generate(IDS, max_new_tokens=16, nodes=16, **options)) for options in some]
    assert [task.result().tokens for task in tasks] == [result.tokens for result in alone]
    assert len({result.tokens for result in alone}) > len(some) - 2, "the rules differ"


async def test_each_turn_of_a_conversation_counts_its_own_tokens(
    swarm: AsyncSwarm, hugging_face: PreTrainedModel
) -> None:
    """A session goes on from turn to turn: what an earlier turn generated is the prompt of the next one."""
    rules = RULES["all"]
    async with swarm._opener.open(200, 16) as session:
        ids = IDS
        for turn, options in enumerate((rules, rules, {})):
            state = swarm._factory.make(
                ids, make_options(cast("GenerateOptions", {"max_new_tokens": 8, "nodes": 16, **options}))
            )
            pieces = [piece async for piece in session.run(state)]
            result = pieces[-1].result
            assert result is not None
            assert result.tokens == expected(hugging_face, ids, options, Sampling(), 8), f"turn {turn}"
            assert (state.kept_tokens > 0) == (turn > 0), "the session's own tokens do not travel again"
            ids = (*ids, *result.tokens[:-2], *prompt(5, 5))  # the end of the answer is cut off


@pytest.mark.parametrize("nodes", [0, 16, 64])
@pytest.mark.parametrize("how", ["greedy", "sampled"])
async def test_log_probs_are_those_of_the_targets_own_distribution(
    how: str, nodes: int, swarm: AsyncSwarm, hugging_face: PreTrainedModel
) -> None:
    """One per token, before penalties, temperature and filters, whether the token came with a tree or without."""
    options = {"max_new_tokens": NEW, "nodes": nodes, "log_probs": 5, **RULES["all"]}
    options |= SAMPLED if how == "sampled" else {}
    pieces = [piece async for piece in swarm.stream(IDS, **options)]
    result = pieces[-1].result
    assert result is not None
    told = [one for piece in pieces for one in piece.log_probs]
    assert tuple(token for piece in pieces for token in piece.tokens) == result.tokens
    assert tuple(one.token for one in told) == result.tokens
    assert tuple(told) == result.log_probs
    with torch.inference_mode():
        logits = cast("Any", hugging_face)(torch.tensor([[*IDS, *result.tokens[:-1]]])).logits[0, len(IDS) - 1 :]
    for one, row in zip(told, logits.float().log_softmax(dim=1), strict=True):
        assert one.log_prob == pytest.approx(row[one.token].item(), abs=1e-4)
        best = row.topk(5)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_log_probs_are_told_only_where_they_are_asked_for(swarm: AsyncSwarm) -> None:
    plain = await swarm.generate(IDS, max_new_tokens=4, nodes=4)
    assert plain.log_probs == ()
    alone = await swarm.generate(IDS, max_new_tokens=4, nodes=4, log_probs=0)
    assert [one.top for one in alone.log_probs] == [()] * 4
    assert all(one.log_prob < 0 for one in alone.log_probs)
