"""The client's part of `wide_area --own-layers`: one text over strangers' machines, and over one's own near by.

Every machine but the own ones is `LINK` away from all others. Each way sees of the own machines those that it uses,
so that the one without an own machine goes over strangers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.emulation.client_process import run_part, work
from benchmarks.emulation.network import NetworkKind, NetworkPlan, open_network
from benchmarks.emulation.swarm import DEMO, SPANS, covered, hosted_swarm
from benchmarks.sheet import Sheet
from benchmarks.simulation.acceptance import demo_prompts
from client.library.aio import AsyncSwarm
from client.tools.bench.paired_ratio import median_of, ratios
from client.tools.demo.link_shape import LinkShape
from swarm.base.ids import PeerId
from swarm.demo import DRAFT, TARGET
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.node_record import NodeRecord

LINK, NEAR = LinkShape(delay_ms=25, mbit=100), LinkShape(delay_ms=0.5, mbit=1_000)
OWN = ("0-4", "8-12", "0-12")
WAYS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "strangers alone": (None, ()),
    "--own first:4": ("first:4", ("0-4",)),
    "--own last:4": ("last:4", ("8-12",)),
    "--own first:4,last:4": ("first:4,last:4", ("0-4", "8-12")),
    "--trusted, all layers": (None, ("0-12",)),
}
"""By name: the option, and the spans of the own machines that are there."""
TREES = (0, 16)


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        own: Addresses of the own machines, in the order of `OWN`.
    """

    peer: str
    own: tuple[str, ...]
    pairs: int
    new_tokens: int
    result: str


class _Without(DhtRegistry):
    """A directory that lists some machines not."""

    hidden: frozenset[PeerId] = frozenset()

    async def records(self, *given: Any, **options: Any) -> list[NodeRecord]:  # noqa: ANN401
        """Those of the others."""
        return [one for one in await super().records(*given, **options) if one.peer not in self.hidden]


async def run_all(job: Job) -> list[dict[str, Any]]:
    """Each text by all ways in turns, beginning with another one each time."""
    runs: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        every = await stack.enter_async_context(AsyncSwarm.connect(TARGET, peers=[job.peer], calibration=None))
        await covered(every)
        found: dict[str, PeerId] = {}
        while len(found) < len(OWN):
            records = await every.opener.registry.records(every.identity.fingerprint, every.identity.num_layers)
            found = {one.address: one.peer for one in records if one.address in job.own}
        peers = dict(zip(OWN, (found[address] for address in job.own), strict=True))
        swarms = {}
        for name, (own, spans) in WAYS.items():
            registry = _Without(DhtConfig(join=(job.peer,), client_mode=True))
            registry.hidden = frozenset(peers.values()) - {peers[span] for span in spans}
            options: dict[str, Any] = {"own": own, "trusted": tuple(peers[span] for span in spans)}
            connecting = AsyncSwarm.connect(
                TARGET, registry=registry, draft=DRAFT, threads=1, calibration=None, adapt=False, **options
            )
            swarms[name] = await stack.enter_async_context(connecting)
        prompts = demo_prompts(job.pairs + 1)
        for swarm in swarms.values():
            await covered(swarm)
            await swarm.generate(prompts[0], max_new_tokens=8, nodes=max(TREES))
        for number, prompt in enumerate(prompts[1:]):
            names = list(WAYS)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                for nodes in TREES:
                    swarms[name].forget_texts()
                    made = await swarms[name].generate(prompt, max_new_tokens=job.new_tokens, nodes=nodes)
                    stats, said = made.stats, {"way": name, "nodes": nodes, "tokens": made.tokens}
                    runs.append({**said, "tokens_per_s": stats.tokens_per_s, "hops": len(stats.hops)})
    return runs


async def measure(pairs: int, kind: NetworkKind | None, folder: Path, console: Console) -> list[dict[str, Any]]:
    """Strangers' machines, the own ones, and the client near to those."""
    spans = (*SPANS, *OWN)
    async with open_network(NetworkPlan(len(spans) + 2, LINK), kind) as net:
        owned = range(len(SPANS) + 1, len(spans) + 1)
        for host in owned:
            for ends in ((host, net.plan.hosts - 1), (net.plan.hosts - 1, host)):
                await net.shape(*ends, NEAR)
        async with hosted_swarm(net, folder, replace(DEMO, spans=spans)) as hosted:
            addresses = tuple("{}:{}".format(*net.dial_address(host)) for host in owned)
            job = Job(hosted.peer, addresses, pairs, 32, str(folder / "result.json"))
            runs: list[dict[str, Any]] = await run_part(
                "benchmarks.speed.own_layers", asdict(job), net, folder, console
            )
            return runs


def sheet(runs: Sequence[dict[str, Any]], pairs: int) -> Sheet:
    """The table."""
    made = Sheet(
        "own_layers",
        f"Demo pair, links of 25 ms, own machines 0.5 ms from the client, greedy; medians of {pairs} texts",
        ("way", "hops", *(f"{head}, K = {nodes}" for nodes in TREES for head in ("tokens/s", "× strangers (95 %)"))),
        measured={"runs": list(runs)},
    )
    first = next(iter(WAYS))
    for name in WAYS:
        row = [name, ""]
        for nodes in TREES:
            own, base = ([run for run in runs if (run["way"], run["nodes"]) == (way, nodes)] for way in (name, first))
            assert [run["tokens"] for run in own] == [run["tokens"] for run in base], "the text is the model's"
            row[1] = f"{own[0]['hops']}"
            speeds, others = ([run["tokens_per_s"] for run in some] for some in (own, base))
            row += [f"{sorted(speeds)[len(speeds) // 2]:.1f}", str(median_of(ratios(speeds, others)))]
        made.rows.append(tuple(row))
    return made


if __name__ == "__main__":
    work(Job, run_all)
