"""`python -m client.terminal.probe`: one canary generation through a swarm's model, and an audit of it; or of a machine
that is named, or two generations that compare it with others.

Prints one line of JSON and nothing else; `swarm.health.state.probe_results` reads it. Needs no file of the model:
prompt and answer stay token ids, which any swarm takes. Always exits with 0 once it has printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import tyro

from swarm.base.cli import plain_words
from swarm.base.cli_types import Count, File, Fingerprint, Found, Insecure, Peer
from swarm.base.errors import Busy, ConfigError, GenerationInterrupted, RegistryError, RouteError, SwarmError
from swarm.base.logs import OneLineFormatter, set_up_logging
from swarm.directory.dht.addresses import OPEN_SWARM, Membership
from swarm.link.network_key import KEY_BYTES, NetworkKey

if TYPE_CHECKING:
    from client.base.stats import Stats
    from client.chain.audit import Audit
    from client.decode.state import GenerationState
    from client.decode.text_stream import FinishReason, TextStream
    from swarm.base.ids import ModelIdentity
    from swarm.directory.node_record import NodeRecord
    from swarm.directory.registry import Registry
    from swarm.routing.route import Route

SMALL_IDS = 256
"""Token ids below it are in every vocabulary."""
PROMPT_TOKENS, FEWEST_TOKENS = 16, 8
"""A canary's prompt has so many tokens on average, and so many at least."""
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
SIZES = (0, 4, 8, 16)
"""Tree nodes per sweep."""
WAIT_S = 5.0
"""How long to wait for a machine where nobody serves some layers."""
AUDIT_S = 30.0
"""How long a canary's audit may take; what is asked of others ends with the process."""
ANY_TOKEN = 2**31
"""In place of the vocabulary's size, which only the model's files hold."""


@dataclass(frozen=True, slots=True)
class ProbeSwarm:
    """One canary generation through a swarm's model, as a line of JSON.

    Attributes:
        join: multiaddress of a peer of the swarm; may be repeated.
        fingerprint: fingerprint of the model.
        tokens: how many to generate.
        compare: peer whose work is compared with that of other holders of its layers (default: none).
        network_key: file of a private swarm's network key; - reads its 32 bytes from standard input (default: none).
        membership: of the swarm; not an option.
    """

    join: tyro.conf.UseAppendAction[tuple[Peer, ...]]
    fingerprint: Fingerprint
    tokens: Count = 16
    compare: Peer | None = None
    insecure: Insecure = False
    network_key: File | None = None
    membership: Found[Membership] = OPEN_SWARM

    def with_key(self) -> ProbeSwarm:
        """The same with the network key that was named.

        Raises:
            ConfigError: there is none.
        """
        if self.network_key is None:
            return self
        try:
            is_piped = str(self.network_key) == "-"
            key = NetworkKey(sys.stdin.buffer.read(KEY_BYTES)) if is_piped else NetworkKey.load(self.network_key)
        except ValueError as error:
            raise ConfigError(f"--network-key -: {error}") from None
        return replace(self, membership=Membership(key))


@dataclass(frozen=True, slots=True)
class CanaryText:
    """What a canary generates; drawn anew for each, so that no machine can answer canaries alone honestly.

    Attributes:
        prompt: token ids that repeat, so that there is something to speculate on.
        seed: of its picks.
        temperature: of its picks.
        nodes: tree nodes per sweep.
    """

    prompt: tuple[int, ...]
    seed: int
    temperature: float
    nodes: int

    @classmethod
    def draw(cls) -> CanaryText:
        """Another one."""
        rng = random.SystemRandom()
        tokens = rng.randint(FEWEST_TOKENS, 2 * PROMPT_TOKENS - FEWEST_TOKENS)
        ids = [rng.randrange(SMALL_IDS) for _ in range(rng.randint(FEWEST_TOKENS // 2, tokens))]
        prompt = tuple(ids[place % len(ids)] for place in range(tokens))
        return cls(prompt, rng.getrandbits(63), rng.choice(TEMPERATURES), rng.choice(SIZES))


@dataclass(frozen=True, slots=True)
class Canary:
    """A generation that came to its end.

    Attributes:
        text: what was asked for.
        tokens: generated ids.
        stats: of the generation.
        route: its chain.
        opened_s: what it took to find and attach the chain.
        audit: of its text; None where none was made within `AUDIT_S`.
    """

    text: CanaryText
    tokens: tuple[int, ...]
    stats: Stats
    route: Route
    opened_s: float
    audit: Audit | None = None


class FilteredRegistry:
    """A directory in which some machines are not listed; all else is that of the one behind it."""

    def __init__(self, registry: Registry, hidden: frozenset[str]) -> None:
        self._registry, self.hidden = registry, hidden

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of a directory
        return getattr(self._registry, name)

    async def records(self, fingerprint: str, num_layers: int, *, within_s: float = 1.5) -> list[NodeRecord]:
        """All records but those of hidden machines."""
        found = await self._registry.records(fingerprint, num_layers, within_s=within_s)
        return [record for record in found if record.peer not in self.hidden]


async def generate(
    registry: Registry, model: ModelIdentity, command: ProbeSwarm, text: CanaryText, audited: str | None = None
) -> Canary:
    """Generate `command.tokens` tokens, as a client would that audits each text.

    Args:
        audited: the machine whose part is audited; others are only hidden until the chain stands (default: any).

    Raises:
        SwarmError: nobody serves some layers, a machine failed …
    """
    from client.base.target import Target
    from client.chain.opening import PeerLatency
    from client.library.aio import make_auditor
    from client.library.session import SessionOpener
    from swarm.base.tasks import TaskScope
    from swarm.link.dial import Dialer
    from swarm.routing.latency import measure_delays

    target = Target(
        name=model.name,
        config_digest=model.config_digest,
        tokenizer_digest=model.tokenizer_digest,
        tokenizer=None,  # type: ignore[arg-type]  # nothing here becomes text
        eos_ids=frozenset(),
        vocab_size=ANY_TOKEN,
        num_layers=model.num_layers,
        max_positions=None,
    )
    started = time.perf_counter()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="draft") as drafting:
        state = _generation_state(text, command.tokens, drafting)
        insecure, network = command.insecure, command.membership.network
        nearby = PeerLatency(probe=partial(measure_delays, insecure=insecure, network=network))
        async with Dialer(insecure=insecure, network=network) as dialer, TaskScope() as scope:
            auditor = make_auditor(dialer, nearby, scope, 1.0 if command.compare is None or audited else 0.0)
            opener = SessionOpener(
                *(target, model, registry, dialer, command.join, text.nodes),
                wait_s=WAIT_S,
                nearby=nearby,
                auditor=auditor,
            )
            result = None
            async with opener.open(len(text.prompt) + command.tokens, state.nodes) as session:
                opened_s = time.perf_counter() - started
                route = session.chain.route
                if audited is not None and auditor is not None:
                    auditor.draw = lambda _: next(
                        (place for place, hop in enumerate(route.hops) if hop.peer == audited), 0
                    )
                if isinstance(registry, FilteredRegistry) and audited is not None:
                    registry.hidden = frozenset()
                async for piece in session.run(state):
                    result = piece.result or result
            assert result is not None, "a generation ends with a result or an error"
            audit = None
            if auditor is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(AUDIT_S):
                        audit = await auditor.newest()
            return Canary(text, result.tokens, result.stats, session.chain.route, opened_s, audit)


class IdStream:
    """Stands in for `client.decode.text_stream.TextStream` where ids do not become text."""

    stop_string = ""

    def __init__(self, limit: int) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self._limit = limit

    @property
    def stopped(self) -> bool:
        """Whether there are enough."""
        return len(self.tokens) >= self._limit

    @property
    def finish_reason(self) -> FinishReason | None:
        """Only the number of tokens ends it."""
        return "length" if self.stopped else None

    def push(self, tokens: Sequence[int]) -> str:
        """Take the next tokens, as many as count."""
        self.tokens += tokens[: self._limit - len(self.tokens)]
        return ""

    def finish(self) -> str:
        """Nothing is held back."""
        return ""

    def first(self, tokens: int) -> IdStream:
        """The same with its first tokens alone."""
        again = IdStream(self._limit)
        again.push(self.tokens[:tokens])
        return again


def _generation_state(text: CanaryText, tokens: int, drafting: ThreadPoolExecutor) -> GenerationState:
    from client.base.options import Options
    from client.decode.policy import FixedPolicy
    from client.decode.state import GenerationState
    from client.draft.drafter import LookupDrafter
    from client.draft.sources.lookup import Lookup
    from client.library.jobs import PREFILL_CHUNK

    options = Options(max_new_tokens=tokens, seed=text.seed, temperature=text.temperature, nodes=text.nodes)
    return GenerationState(
        prompt=text.prompt,
        sampling=options.sampling(),
        policy=FixedPolicy(text.nodes),
        chunk=PREFILL_CHUNK,
        max_new_tokens=tokens,
        text=cast("TextStream", IdStream(tokens)),
        drafter=LookupDrafter(Lookup()),
        drafting=drafting,
        options=asdict(options),
    )


def described(canary: Canary) -> dict[str, Any]:
    """A generation as in the line of JSON: medians over its decode sweeps, in milliseconds."""
    stats = canary.stats
    hops, links = [], [_median([sweep.first_link_ms for sweep in stats.sweeps])]
    for index, hop in enumerate(canary.route.hops):
        spent = [sweep.hops[index] for sweep in stats.sweeps if index < len(sweep.hops)]
        hops.append(
            {
                "peer": hop.peer,
                "span": [hop.span.start, hop.span.end],
                "link_ms": links[-1],
                "queue_ms": _median([one.queue_ms for one in spent]),
                "compute_ms": _median([one.compute_ms for one in spent]),
            }
        )
        links.append(_median([one.link_ms for one in spent]))
    return {
        "ok": True,
        "error": None,
        "tokens": len(canary.text.prompt) + len(canary.tokens),
        "ttft_ms": round((canary.opened_s + stats.time_to_first_token_s) * 1e3, 1),
        "tokens_per_s": round(stats.tokens_per_s, 2),
        "acceptance_length": round(stats.acceptance_length, 2),
        "sweep_ms": round(stats.ms_per_sweep, 2),
        "hops": hops,
        "return_ms": links[-1],
        "audit": None if canary.audit is None else _audited(canary.audit, canary),
    }


def _audited(audit: Audit, canary: Canary) -> dict[str, Any]:
    """An audit as in the line of JSON: a comparison that says which machine is wrong, where two others say the same."""
    from swarm.trust.bounds import Agrees, Unclear

    verdict = audit.verdict
    return {
        "peer": audit.hop.peer,
        "others": sorted(audit.asked),
        "agrees": None if isinstance(verdict, Unclear) else isinstance(verdict, Agrees),
        "named": audit.named,
        "tokens": len(canary.text.prompt) + len(canary.tokens),
        "error": verdict.reason if isinstance(verdict, Unclear) else None,
    }


async def compare(registry: Registry, model: ModelIdentity, command: ProbeSwarm) -> dict[str, Any]:
    """Have a peer's part of a text computed elsewhere, or generate over it and around it; as in the line of JSON.

    Whoever has a twin, another machine with exactly its layers in its class, is audited: that says who is wrong. Where
    the layers are only held in other parts, two whole texts are compared.
    """
    peer = command.compare
    assert peer is not None, "asked for"
    records = await registry.records(model.fingerprint, model.num_layers)
    mine = next((record for record in records if record.peer == peer), None)
    if mine is None:
        return _uncompared(peer, "it is not listed")
    other_classes = {record.peer for record in records if record.numeric_class != mine.numeric_class}
    same_layers = {record.peer for record in records if record.peer != peer and mine.span.contains(record.span)}
    twins = {record.peer for record in records if record.span == mine.span} - {*other_classes, peer}
    try:
        if twins:
            seen = cast("Registry", FilteredRegistry(registry, frozenset(other_classes | same_layers)))
            canary = await generate(seen, model, command, CanaryText.draw(), peer)
            if canary.audit is None or canary.audit.hop.peer != peer:
                return _uncompared(peer, "no chain led over it" if canary.audit else "its audit took too long")
            return _audited(canary.audit, canary)
        only, without = (
            cast("Registry", FilteredRegistry(registry, frozenset(hidden)))
            for hidden in (other_classes | same_layers, {*other_classes, peer})
        )
        text = CanaryText.draw()
        over, around = await generate(only, model, command, text), await generate(without, model, command, text)
    except SwarmError as error:
        return _uncompared(peer, str(error))
    used, stand_ins = ({hop.peer for hop in canary.route.hops} for canary in (over, around))
    if peer not in used:
        return _uncompared(peer, "no chain led over it")
    return {
        "peer": peer,
        "others": sorted(stand_ins - used),
        "agrees": over.tokens == around.tokens,
        "tokens": 2 * len(text.prompt) + len(over.tokens) + len(around.tokens),
        "error": None,
    }


def _uncompared(peer: str, why: str) -> dict[str, Any]:
    return {"peer": peer, "others": [], "agrees": None, "tokens": 0, "error": why}


async def probe(command: ProbeSwarm) -> dict[str, Any]:
    """Join the swarm and probe; the content of the line of JSON."""
    from swarm.directory.dht.registry import DhtConfig, DhtRegistry

    try:
        command = command.with_key()
        config = DhtConfig(join=command.join, client_mode=True, membership=command.membership)
        async with DhtRegistry.open(config) as registry:
            models = {model.fingerprint: model for model in await registry.models()}
            model = models.get(command.fingerprint)
            if model is None:
                raise RouteError("nobody serves it", ())
            return await probed(registry, model, command)
    except (RegistryError, ConfigError) as error:  # trouble of this machine says nothing about the swarm
        return _without(command, None, error)
    except SwarmError as error:
        return _without(command, False, error)


async def probed(registry: Registry, model: ModelIdentity, command: ProbeSwarm) -> dict[str, Any]:
    """Probe through an open directory; the content of the line of JSON."""
    if command.compare is not None:
        return await compare(registry, model, command)
    try:
        return described(await generate(registry, model, command, CanaryText.draw()))
    except (RegistryError, ConfigError, Busy) as error:
        return _without(command, None, error)
    except GenerationInterrupted as error:
        return _without(command, False, error.__cause__ or error)
    except SwarmError as error:
        return _without(command, False, error)


def _without(command: ProbeSwarm, ok: bool | None, error: BaseException) -> dict[str, Any]:
    if command.compare is not None:
        return _uncompared(command.compare, str(error))
    return {"ok": ok, "error": str(error)}


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3) if values else 0.0


def main() -> None:
    """Entry point."""
    command = tyro.cli(ProbeSwarm, prog="client.terminal.probe", registry=plain_words())
    set_up_logging(os.environ.get("CANOPY_LOG", "ERROR"), OneLineFormatter("%(levelname)s:%(name)s:%(message)s"))
    os.environ.setdefault("GRPC_VERBOSITY", "NO_PICKS")
    print(json.dumps(asyncio.run(probe(command))))  # noqa: T201 - its answer


if __name__ == "__main__":
    main()
