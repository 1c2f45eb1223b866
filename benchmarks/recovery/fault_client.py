"""The client of a fault benchmark, in a process of its own: generates texts on demand and reports what it does.

Times are of the machine's monotonic clock, which all its processes share. It injects no faults.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import grpc.aio
import torch
from transformers import AutoTokenizer

import client.library.jobs
from benchmarks.emulation.json_program import jobs, tell
from benchmarks.emulation.swarm import covered
from client.base.stats import Result
from client.chain.chain import Chain
from client.decode.loop import Generation
from client.decode.policy import SpeculationPlan
from client.decode.text_stream import TextStream
from client.draft.search.tree import DraftTree
from client.library.aio import AsyncSwarm
from client.library.session import SessionOpener
from swarm.alive import shown_certificate
from swarm.base.errors import SwarmError
from swarm.base.library_logging import quiet_libraries
from swarm.demo import DRAFT, PASSAGES, TARGET
from swarm.link.certificate import name_of
from swarm.link.dial import CHANNEL_OPTIONS, pin
from swarm.protocol import wire
from swarm.protocol.messages import Sweep
from swarm.protocol.session import SessionState
from swarm.routing.route import Route

GIVE_UP_S = 100.0
INFO_S = 2.0
PATHS = ("replays", "catch_ups", "restores", "replay_us")


class Reporter(logging.Handler):
    """Reports what the client library does, once `watch` is called."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.arrivals: list[tuple[float, int]] = []
        self.chains: list[Chain] = []
        self.absent: frozenset[str] = frozenset()

    def say(self, event: str, **words: Any) -> None:  # noqa: ANN401 - whatever JSON holds
        tell(event, at=time.monotonic(), **words)

    def emit(self, record: logging.LogRecord) -> None:
        """The chain logs every new route."""
        if record.msg.startswith("generation %d goes over"):
            self.say("reroute", hops=[str(hop.peer) for hop in self.chains[-1].route.hops])
        print(f"{time.monotonic():.3f} {record.getMessage()}", file=sys.stderr, flush=True)  # noqa: T201 - its log

    def watch(self) -> None:
        send, begin, draft = Chain.send, Chain.begin, Generation._grow_tree
        push, route = TextStream.push, SessionOpener.route

        def noted_send(chain: Chain, sweep: Sweep) -> None:
            send(chain, sweep)
            self.say("send", sequence=sweep.sequence, commits=sweep.commit_to is not None)

        def noted_begin(chain: Chain, state: SessionState) -> None:
            begin(chain, state)
            self.chains[:] = [chain]
            self.say("begin", hops=[str(hop.peer) for hop in chain.route.hops])

        async def noted_draft(generation: Generation, room: int) -> tuple[DraftTree, SpeculationPlan, float]:
            self.say("draft")
            return await draft(generation, room)

        def noted_push(text: TextStream, tokens: Sequence[int]) -> str:
            if tokens:
                self.arrivals.append((time.monotonic(), len(tokens)))
            return push(text, tokens)

        async def present(opener: SessionOpener, *, avoid: frozenset[str] = frozenset()) -> Route:
            return await route(opener, avoid=avoid | self.absent)  # a text begins without those who lie dead

        Chain.send, Chain.begin = noted_send, noted_begin  # type: ignore[method-assign, assignment]
        Generation._grow_tree = noted_draft  # type: ignore[method-assign, assignment]
        TextStream.push, SessionOpener.route = noted_push, present  # type: ignore[method-assign, assignment]
        logger = logging.getLogger("client.chain.chain")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)


async def counters(addresses: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """The recovery counters of the nodes that answer."""

    async def ask(name: str, address: str) -> tuple[str, dict[str, int]] | None:
        host, _, port = address.rpartition(":")
        try:
            certificate = await asyncio.to_thread(shown_certificate, host, int(port))
            credentials, pinned = pin(certificate, name_of(certificate))
            async with grpc.aio.secure_channel(address, credentials, [*CHANNEL_OPTIONS, *pinned]) as channel:
                call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(wire.INFO)
                found = wire.decode_info(await call(b"", timeout=INFO_S))
        except (OSError, grpc.aio.AioRpcError):
            return None
        return name, {"sessions": found.sessions, **{path: getattr(found.counters, path) for path in PATHS}}

    asked = await asyncio.gather(*(ask(name, address) for name, address in addresses.items()))
    return dict(one for one in asked if one is not None)


async def generate(swarm: AsyncSwarm, reporter: Reporter, ids: Sequence[int], job: dict[str, Any]) -> None:
    reporter.absent = frozenset(job["absent"])
    reporter.arrivals.clear()
    client.library.jobs.PREFILL_CHUNK = job["chunk"]
    start = job["prompt"] * 173
    before = await counters(job["nodes"])
    began = time.monotonic()
    told: dict[str, Any] = {"tokens": [], "error": None, "repairs": []}
    try:
        async with asyncio.timeout(GIVE_UP_S):
            result: Result = await swarm.generate(
                ids[start : start + job["prompt_tokens"]],
                max_new_tokens=job["new_tokens"],
                nodes=job["tree"],
                temperature=job["temperature"],
                seed=job["seed"],
            )
        told |= {"tokens": result.tokens, "repairs": [asdict(repair) for repair in result.stats.repairs]}
    except (SwarmError, TimeoutError) as error:
        told["error"] = f"{type(error).__name__}: {error}"
    after = await counters(job["nodes"])
    grown = {
        name: {path: found[path] - before.get(name, {}).get(path, 0) for path in PATHS} for name, found in after.items()
    }
    told["paths"] = {name: paths for name, paths in grown.items() if any(paths.values())}
    reporter.say("told", began=began, arrivals=reporter.arrivals, **told)


def all_passages() -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()
    return [token for line in lines for token in tokenizer(json.loads(line)["text"])["input_ids"]]


async def work(peer: str, ids: Sequence[int]) -> None:
    """Take jobs until standard input is closed."""
    reporter = Reporter()
    reporter.watch()
    connecting = AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, threads=1, calibration=None)
    async with connecting as swarm:
        await covered(swarm)
        reporter.say("up")
        async for job in jobs():
            await generate(swarm, reporter, ids, job)


if __name__ == "__main__":
    torch.set_num_threads(1)
    quiet_libraries()
    asyncio.run(work(sys.argv[1], all_passages()))
