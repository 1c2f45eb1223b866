"""The canary generation: through real nodes, without any file of the model, and against another holder's answers."""

from __future__ import annotations

import json

import pytest

from client.terminal.probe import FEWEST_TOKENS, PROMPT_TOKENS, CanaryText, ProbeSwarm, generate, probed
from node.session.hop_session import HopSession
from node.session.sweep_run import SweepRun
from swarm.base.ids import ModelIdentity
from swarm.demo import TARGET
from swarm.health.state.probe_results import read_comparison, read_probe
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.memory_registry import MemoryRegistry


async def select_model(here: InProcessSwarm) -> ModelIdentity:
    (model,) = await MemoryRegistry(here.network).models()
    return model


async def line(here: InProcessSwarm, compare: str | None = None, *, insecure: bool = False) -> str:
    """What a probe of this swarm prints."""
    model = await select_model(here)
    command = ProbeSwarm((), model.fingerprint, tokens=12, compare=compare, insecure=insecure)
    return json.dumps(await probed(MemoryRegistry(here.network), model, command))


async def test_a_probe_measures_every_hop_and_finds_who_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_process_swarm(TARGET, ["0-6", "6-12", "6-12"]) as here:
        first, tail, replica = (node.peer_id for node in here.nodes)
        probe = read_probe(await line(here))
        assert probe.ok, probe.error
        assert FEWEST_TOKENS <= probe.tokens - 12 <= 2 * PROMPT_TOKENS - FEWEST_TOKENS
        assert [hop.span for hop in probe.hops] == [(0, 6), (6, 12)]
        assert probe.hops[0].peer == first
        assert all(hop.compute_ms > 0 for hop in probe.hops)
        for number in (probe.ttft_ms, probe.tokens_per_s, probe.sweep_ms):
            assert number is not None
            assert number > 0
        async with here.client() as plain:
            text = CanaryText((11, 7, 23, 42, 5, 11, 7, 23), 7, 0.7, 4)
            wanted = await plain.generate(text.prompt, max_new_tokens=12, nodes=0, seed=7, temperature=0.7)
        model = await select_model(here)
        canary = await generate(MemoryRegistry(here.network), model, ProbeSwarm((), model.fingerprint, tokens=12), text)
        assert canary.tokens == wanted.tokens

        for peer, other in ((tail, replica), (replica, tail)):
            comparison = read_comparison(await line(here, compare=peer))
            assert (comparison.agrees, comparison.others) == (True, (other,)), comparison.error
        alone = read_comparison(await line(here, compare=first))
        assert (alone.agrees, alone.error is not None) == (None, True)
        assert read_comparison(await line(here, compare="QmNobody")).error == "it is not listed"

        finish = HopSession.finish

        def wrong(hop: HopSession, run: SweepRun) -> None:
            if hop._context.peer == replica:
                run.picks = [(one, token ^ 1) for one, token in run.picks]
            finish(hop, run)

        monkeypatch.setattr(HopSession, "finish", wrong)
        for _ in range(5):  # one that could not be made says nothing, and the service asks again
            differs = read_comparison(await line(here, compare=replica))
            if differs.agrees is not None:
                break
        assert (differs.agrees, differs.named) == (False, None), (differs.error, "only two hold these layers")


async def test_an_insecure_swarm_can_be_probed() -> None:
    async with in_process_swarm(TARGET, ["0-12"], insecure=True) as here:
        probe = read_probe(await line(here, insecure=True))
    assert probe.ok, probe.error


async def test_a_probe_of_a_model_with_a_gap_failed() -> None:
    async with in_process_swarm(TARGET, ["0-6"]) as here:
        probe = read_probe(await line(here))
    assert probe.ok is False
    assert probe.error is not None
    assert "nobody serves layers 6…11" in probe.error


def test_no_two_canaries_are_alike() -> None:
    """A machine that knew their prompt could answer them alone honestly."""
    drawn = [CanaryText.draw() for _ in range(64)]
    assert len({text.prompt for text in drawn}) == len({text.seed for text in drawn}) == 64
    assert len({len(text.prompt) for text in drawn}) > 4
    assert len({(text.temperature, text.nodes) for text in drawn}) > 4
