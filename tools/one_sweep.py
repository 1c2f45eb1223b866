"""`python -m tools.one_sweep`: record real sweeps of the demo pair over three nodes, for the pictures in docs/img.

It records which tree the drafter grew, and what the target picked after each of its nodes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from client.base.stats import Result
from client.draft.drafter import NO_PICKS, Drafter, Drafters
from client.draft.search.tree import NO_LIMIT, DraftTree, Picks, StopRule
from client.library.aio import AsyncSwarm
from client.tools.demo.swarm import demo_swarm, wait_covered
from swarm.base.cli import make_console
from swarm.base.logs import OneLineFormatter, set_up_logging
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling

PROMPT, TOKENS, NODES, SEED, TEMPERATURE, DELAY_MS = "It was a dark night, and the old captain", 24, 12, 11, 0.7, 25.0
OUT = Path("docs/img/sweep.json")


@dataclass(slots=True)
class Listener:
    """A drafter that records another drafter's trees and the target's picks.

    Attributes:
        inner: the drafter that does the work.
        grown: every sequence with the tree that was grown below it.
        picked: every tree with the target's picks by node; None is the root.
    """

    inner: Drafter
    grown: list[tuple[tuple[int, ...], DraftTree]] = field(default_factory=list)
    picked: list[tuple[DraftTree, dict[int | None, int]]] = field(default_factory=list)

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: StopRule = NO_LIMIT
    ) -> DraftTree:
        """The inner drafter's tree."""
        tree = self.inner.grow(sequence, nodes, depth, sampling, worth)
        self.grown.append((tuple(sequence), tree))
        return tree

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        """What was picked after the nodes of a tree."""
        self.picked.append((tree, {**others, **picks}))
        self.inner.learn(tree, picks, others)


async def record() -> dict[str, Any]:
    """Run the demo's swarm and one text."""
    console = make_console(stderr=True)
    async with (
        demo_swarm(DELAY_MS, console) as peer,
        AsyncSwarm.connect(
            TARGET,
            peers=[peer],
            draft=DRAFT,
            threads=1,
            calibration=None,
            lookup=False,
            siblings=False,
            nodes=NODES,
        ) as swarm,
    ):
        await wait_covered(swarm, console)
        await swarm.generate(PROMPT, max_new_tokens=16, seed=SEED, temperature=TEMPERATURE)  # warms links and caches
        listener = Listener(swarm._factory.drafters.first)
        swarm._factory = replace(swarm._factory, drafters=Drafters(listener))
        result = await swarm.generate(PROMPT, max_new_tokens=TOKENS, seed=SEED, temperature=TEMPERATURE)
        tokens = swarm.target.tokenizer
        return _told(listener, result, lambda token: str(tokens.decode([token])))


def _told(listener: Listener, result: Result, text: Any) -> dict[str, Any]:  # noqa: ANN401
    sweeps = []
    for (sequence, tree), stats in zip(listener.grown, result.stats.sweeps, strict=False):
        picks = next((picks for grown, picks in listener.picked if grown == tree), {})
        sweeps.append(
            {
                "pending": text(sequence[-1]),
                "nodes": [
                    {"token": text(token), "parent": parent, "chance": round(probability, 3)}
                    for token, parent, probability in zip(tree.tokens, tree.parents, tree.acceptance_probs, strict=True)
                ],
                "picks": {"root" if node is None else str(node): text(pick) for node, pick in picks.items()},
                "emitted": stats.emitted,
                "draft_ms": round(stats.draft_ms, 1),
                "total_ms": round(stats.total_ms, 1),
                "first_link_ms": round(stats.first_link_ms, 1),
                "hops": [
                    {"compute_ms": round(hop.compute_ms, 1), "link_ms": round(hop.link_ms, 1)} for hop in stats.hops
                ],
            }
        )
    return {
        "prompt": PROMPT, "seed": SEED, "temperature": TEMPERATURE, "delay_ms": DELAY_MS, "text": result.text,
        "acceptance_length": round(result.stats.acceptance_length, 2), "sweeps": sweeps,
    }  # fmt: skip


def main() -> None:
    set_up_logging("WARNING", OneLineFormatter("%(levelname)s %(name)s: %(message)s"))
    OUT.write_text(json.dumps(asyncio.run(record()), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
