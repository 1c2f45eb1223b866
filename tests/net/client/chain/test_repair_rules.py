"""Rules of picks survive what happens to a chain: a new tail follows them, and one that knows none is gone around.

Over gRPC: grammars are followed in processes of their own, which no virtual clock waits for.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from client.base.options import Grammar
from node.life.announcer import Announcer
from node.session.hop_session import HopSession
from node.session.service import NodeService
from node.session.upstreams import UpstreamStream
from swarm.base.errors import GenerationInterrupted, RemoteProtocolError
from swarm.base.version import unknown_here
from swarm.protocol.messages import Frame, Snapshot, SweepFrame
from tests.net.client.chain.overheard import SEED, WORDS, Overheard, overheard
from tests.net.killable_nodes import CHAIN, KillableNodes
from tests.net.three_nodes import prompt

__all__ = ["overheard"]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90), pytest.mark.over_grpc]

IDS = prompt(4, 24)
SCHEMA = {
    "type": "object",
    "properties": {"who": {"type": "string", "maxLength": 12}, "years": {"type": "integer", "maximum": 99}},
    "required": ["who", "years"],
    "additionalProperties": False,
}
PENALTIES: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2}
SCHEMED: dict[str, Any] = {"grammar": Grammar("json_schema", json.dumps(SCHEMA)), "temperature": 0.8, "seed": 5}
RULES = {"penalties": {**PENALTIES, "max_new_tokens": 20}, "both": {**SCHEMED, **PENALTIES}}


@pytest.mark.parametrize(("name", "victim"), [("penalties", "a2"), ("both", "a2"), ("both", "a0")])
async def test_a_death_in_mid_text_leaves_the_rules(name: str, victim: str, nodes: KillableNodes) -> None:
    """A tail that is replaced gets them with the snapshot, and counts and matches the text so far."""
    options: dict[str, Any] = {"max_new_tokens": 60, "nodes": 8, "log_probs": 2, **RULES[name]}
    plain = await nodes.client.generate(IDS, **options)
    arrived = nodes.stall(victim, 4)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, **options))
        await arrived.wait()
        await nodes.announce("b0", "b1", "b2")
        await nodes.kill(victim)
    result = telling.result()
    assert result.tokens == plain.tokens
    assert len(result.stats.repairs) == 1
    assert [one.token for one in result.log_probs] == list(result.tokens)
    expected = [one.log_prob for one in plain.log_probs]
    assert [one.log_prob for one in result.log_probs] == pytest.approx(expected, abs=1e-4)
    if "grammar" in options:
        assert set(json.loads(result.text)) == {"who", "years"}


@pytest_asyncio.fixture(loop_scope="module")
async def old(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of nodes of an older release: they do not know the kinds of frames that bring rules.

    No machine of their swarm hears of rules from the client itself (P17).
    """
    names: set[str] = set()
    dispatch, record = NodeService._dispatch, Announcer.record
    monkeypatch.setattr(Announcer, "record", lambda *asked: replace(record(*asked), ends_only=False))
    await nodes.announce(*CHAIN)

    def older(service: NodeService, message: Frame, hop: HopSession, upstream: UpstreamStream) -> None:
        is_old = service._context.peer in {nodes[name].peer_id for name in names}
        if is_old and isinstance(message, SweepFrame | Snapshot):
            sampling = message.sweep.sampling if isinstance(message, SweepFrame) else message.sampling
            if sampling is not None and sampling.rules is not None:
                raise RemoteProtocolError("kind", unknown_here("Frame of kind 9"))
        dispatch(service, message, hop, upstream)

    monkeypatch.setattr(NodeService, "_dispatch", older)
    return names


@pytest.mark.parametrize("name", ["a1", "a2"])
async def test_a_machine_that_knows_no_rules_is_gone_around(name: str, nodes: KillableNodes, old: set[str]) -> None:
    """Wherever it stands: a middle hop would drop them on the way to the tail."""
    options: dict[str, Any] = {"max_new_tokens": 12, "nodes": 8, **PENALTIES}
    plain = await nodes.undisturbed(IDS, **options)
    old.add(name)
    await nodes.announce(name.replace("a", "b"))
    result = await nodes.client.generate(IDS, **options)
    assert result.tokens == plain
    assert nodes.route()[int(name[1])] == name.replace("a", "b")


async def test_where_nobody_else_has_its_layers_it_is_named(nodes: KillableNodes, old: set[str]) -> None:
    old.add("a2")
    says = f"{nodes['a2'].peer_id}: Frame of kind 9 is unknown to release .* update"
    with pytest.raises(GenerationInterrupted, match=says) as caught:
        await nodes.client.generate(IDS, max_new_tokens=12, nodes=8, **PENALTIES)
    assert caught.value.tokens == ()
    assert len((await nodes.client.generate(IDS, max_new_tokens=4, nodes=8)).tokens) == 4, "it serves others"


@pytest.mark.parametrize("victim", [None, *CHAIN])
async def test_no_grammar_passes_between_the_ends(
    victim: str | None, nodes: KillableNodes, overheard: Overheard
) -> None:
    """As in `test_ends_only.py`."""
    grammar = Grammar("regex", WORDS)
    options: dict[str, Any] = {"max_new_tokens": 24, "nodes": 8, "grammar": grammar, "temperature": 0.9, "seed": SEED}
    plain = await nodes.client.generate(IDS, **options)
    if victim is not None:
        arrived = nodes.stall(victim, 4)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            telling = group.create_task(nodes.client.generate(IDS, **options))
            await arrived.wait()
            await nodes.announce("b0", "b1", "b2")
            await nodes.kill(victim)
        assert telling.result().tokens == plain.tokens
    assert any(tell.sampling is not None and tell.sampling.rules is not None for tell in overheard.tells)
    overheard.check((*IDS, *plain.tokens))
