"""The client library, async: connect to a swarm, generate, stream. `client.library.sync` is the same, blocking.

A generation runs in a task of its own and hands pieces over through a bounded queue, so a reader that stops reading
stops it too, and a reader may live in any task.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from client.base.options import (
    AUTO_HEAD,
    UNCHANGED,
    ConnectionOptions,
    ConnectOptions,
    GenerateOptions,
    check_codec,
    described,
    make_connection,
    make_options,
    sampling_of,
)
from client.base.stats import Result
from client.base.target import ModelSearch, Target, check_fingerprint, find_in_swarm, load_target
from client.chain.audit import Auditor, AuditOwner
from client.chain.opening import PeerLatency
from client.chain.sent_rows import SettledRows
from client.decode.pick_watch import HeadChecker, HeadFiles
from client.decode.state import GenerationState
from client.draft.drafter import Drafters, aux_layers_of
from client.draft.loading import drafting_thread, load_drafter, warm_up
from client.library.chat import AsyncChat, Conversation
from client.library.jobs import GenerationFactory
from client.library.known_prefixes import fresh_secret, user_secret
from client.library.session import Beginning, Piece, SessionOpener
from swarm.base.errors import ConfigError, GenerationInterrupted
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.library_logging import bars_hidden
from swarm.base.process_limits import check_threads
from swarm.base.tasks import TaskScope, relay
from swarm.directory.coverage import Coverage, cover
from swarm.directory.dht.addresses import Membership
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.identity import Identity, default_identity_path
from swarm.directory.joining.resolve import expand
from swarm.directory.node_record import NodeRecord
from swarm.directory.registry import Registry
from swarm.link.dial import Dialer
from swarm.reach.paths.local_dialler import open_ways
from swarm.routing.latency import measure_delays
from swarm.routing.own_layers import OwnLayers
from swarm.routing.route import Route

__all__ = ["AsyncSwarm", "Piece"]

logger = logging.getLogger(__name__)

LINGER_S = 5.0
"""How long a program that ends waits for the audit of its last text."""
EXPECTED_NODES = 16
"""Tree nodes per sweep that routes are chosen for, where K is chosen before each sweep."""


class AsyncSwarm:
    """One model in one swarm; made by `AsyncSwarm.connect`."""

    def __init__(
        self, opener: SessionOpener, factory: GenerationFactory, scope: TaskScope, draft_notes: tuple[str, ...]
    ) -> None:
        self._opener = opener
        self._factory = factory
        self._scope = scope
        self._draft_notes = draft_notes

    @property
    def draft_notes(self) -> tuple[str, ...]:
        """Of each draft model, how much of the target's vocabulary it knows, for people."""
        return self._draft_notes

    @property
    def target(self) -> Target:
        """The model as its client knows it."""
        return self._opener.target

    @property
    def defaults(self) -> GenerateOptions:
        """What options are where a generation does not say: as the model's generation_config.json has them."""
        return self._factory.defaults

    @property
    def opener(self) -> SessionOpener:
        """Opens sessions, for programs that hold them longer than one text."""
        return self._opener

    @property
    def factory(self) -> GenerationFactory:
        """Makes generations for those sessions."""
        return self._factory

    @property
    def identity(self) -> ModelIdentity:
        """The model as the swarm knows it."""
        return self._opener.identity

    @classmethod
    @asynccontextmanager
    async def connect(cls, model: str | Path, **options: Unpack[ConnectOptions]) -> AsyncIterator[AsyncSwarm]:
        """Join a swarm as a client of one model.

        Args:
            model: hub id or folder of the target; its weights are not needed.
            options: fields of `client.base.options.ConnectionOptions`; none is needed but `peers`, and `draft` may also
                be one name.

        Raises:
            SwarmError: the model is unknown, nobody answers, the draft does not fit …
        """
        wanted = make_connection(options)
        peers, membership, fingerprint = _check(wanted)
        own = OwnLayers.read(wanted.own, wanted.trusted)
        owner = None if wanted.owner is None else await asyncio.to_thread(_owner, Path(wanted.owner))
        target = await asyncio.to_thread(load_target, model, wanted.revision)
        with drafting_thread() as drafting:
            with bars_hidden():  # on the thread that drafts, so that no other one has a team of OpenMP's
                loading = partial(load_drafter, model, target, wanted, wanted.revision)
                loaded = await asyncio.get_running_loop().run_in_executor(drafting, loading)
            opened = wanted.registry or DhtRegistry.open(DhtConfig(join=peers, client_mode=True, membership=membership))
            async with (
                _checker(model, target, wanted) as checker,
                opened,
                _links(membership, opened, own, insecure=wanted.insecure) as (dialer, nearby, scope),
            ):
                identity = await find_in_swarm(target, opened, ModelSearch(peers, fingerprint, nearby.probe))
                if membership.note_model is not None:
                    membership.note_model(identity.fingerprint)
                if checker is not None:
                    checker.expect(identity.fingerprint)
                expected = EXPECTED_NODES if wanted.nodes is None else wanted.nodes
                opener = SessionOpener(
                    *(target, identity, opened, dialer, peers, expected),
                    *(wanted.codec, wanted.wait, wanted.hedge, nearby),
                    reproducible=wanted.reproducible,
                    own=own,
                    aux_layers=aux_layers_of(loaded.drafter),
                    auditor=make_auditor(dialer, nearby, scope, wanted.audit),
                    secret=await asyncio.to_thread(user_secret if wanted.calibration is not None else fresh_secret),
                    checker=checker,
                    owner=owner,
                    signs=wanted.receipts,
                )
                warm_up(drafting, loaded.drafter, target.hidden_size, wanted.threads)
                drafters, defaults = Drafters(loaded.drafter, loaded.make_another), _defaults(target, wanted)
                try:
                    factory = GenerationFactory(
                        target, drafters, drafting, wanted.nodes, wanted.reproducible, defaults=defaults
                    )
                    with closing(factory):
                        yield cls(opener, factory, scope, loaded.notes)
                    if opener.auditor is not None:  # texts of short programs are audited like others
                        with suppress(TimeoutError):
                            async with asyncio.timeout(LINGER_S):
                                await opener.auditor.newest()
                finally:
                    await asyncio.to_thread(loaded.save_calibrations)

    async def stream(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Piece, None]:
        """Generate and hand out text as it becomes certain; the texts of all pieces join to the result's.

        Args:
            prompt: text, or token ids.
            options: fields of `client.Options`.

        Raises:
            ConfigError: an option is not valid.
            ContextFull: prompt and new tokens exceed the model's context.
            RouteError: nobody serves some layers.
            GenerationInterrupted: the chain broke midway; carries text and tokens so far.
        """
        async for piece in self._pieces(self._factory.make(prompt, make_options(options))):
            yield piece

    async def resume(self, interrupted: GenerationInterrupted) -> AsyncGenerator[Piece, None]:
        """Go on where a generation was interrupted; errors as in `stream`.

        Yields the text that comes after `interrupted.text`. The result is that of the whole generation, its stats are
        those of the rest.
        """
        left = interrupted.unfinished
        if left is None:
            raise ConfigError("resume: this error does not come from a generation")
        options = make_options(GenerateOptions(**left.options)).with_defaults(UNCHANGED)  # type: ignore[typeddict-item]
        state = self._factory.make(left.prompt, options, left.tokens)
        shown = len(interrupted.text) - len(state.text.text)
        async for piece in self._pieces(state):
            text, shown = piece.text[max(shown, 0) :], shown - len(piece.text)
            yield replace(piece, text=text)

    async def _pieces(self, state: GenerationState) -> AsyncGenerator[Piece, None]:
        await self._factory.check_grammar(state)
        async with aclosing(relay(self._scope, self._once(state))) as pieces:
            async for piece in pieces:
                yield piece

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Result:
        """Generate and return the whole result; arguments and errors as in `stream`."""
        state, result = self._factory.make(prompt, make_options(options)), None
        state.is_held = True
        async for piece in self._pieces(state):
            result = piece.result
        assert result is not None, "a stream ends with a result or an error"
        return result

    def forget_texts(self) -> None:
        """Draft the next text as if it were the first one; calibrations stay.

        For measurements that generate a text more than once: the second time would be faster.
        """
        self._factory.forget()

    async def coverage(self) -> Coverage:
        """The model's nodes as the directory lists them now, and the layers that nobody serves.

        Raises:
            RegistryError: the directory did not answer.
        """
        identity, registry = self.identity, self._opener.registry
        return cover(identity, await registry.records(identity.fingerprint, identity.num_layers))

    async def route(self, *, avoid: frozenset[str] = frozenset()) -> Route:
        """The chain that a generation would take now.

        Raises:
            RouteError: nobody serves some layers.
        """
        return await self._opener.route(avoid=avoid)

    def chat(self, system: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncChat:
        """A conversation that keeps its session between turns; `async with swarm.chat() as chat:`.

        Args:
            system: what the model is told before the first turn.
            options: defaults of its turns, fields of `client.Options`.

        Raises:
            ConfigError: an option is not valid.
        """
        return AsyncChat(self._opener, self._factory, self._scope, Conversation(self.target.tokenizer, system), options)

    async def _once(self, state: GenerationState) -> AsyncGenerator[Piece, None]:
        """Run one generation in a session of its own."""
        beginning = Beginning(state.prompt, state.max_new_tokens, is_proved=state.is_proved)
        window = len(state.prompt) + state.max_new_tokens
        async with self._opener.open(window, state.nodes, beginning) as session:
            async for piece in session.run(state):
                yield piece


def _owner(path: Path) -> Identity:
    """The identity in a file, which must be there.

    Raises:
        ConfigError: it is not.
    """
    identity = Identity.load(path.expanduser())
    if identity is None:
        raise ConfigError(f"owner: there is no identity file {path}; a node keeps its own at {default_identity_path()}")
    return identity


@asynccontextmanager
async def _checker(model: str | Path, target: Target, options: ConnectionOptions) -> AsyncIterator[HeadChecker | None]:
    """What checks picks; whether it can is found out with the first text."""
    if not options.check_picks:
        yield None
        return
    is_asked = options.head != AUTO_HEAD
    files = HeadFiles(options.head if is_asked else model, None if is_asked else options.revision, "", is_asked)
    checker = HeadChecker(files, options.check_picks, target.valid_tokens)
    try:
        yield checker
    finally:
        await asyncio.to_thread(checker.close)


def _check(options: ConnectionOptions) -> tuple[tuple[str, ...], Membership, str | None]:
    """Refuse options that cannot be right before anything slow starts; the value is the swarm and its model.

    Raises:
        ConfigError: which one, and what to give.
    """
    if not options.wait >= 0:
        raise ConfigError(f"wait: {options.wait}; give seconds, 0 to wait for nobody")
    if not 0 <= options.check_picks <= 1:
        raise ConfigError(f"check_picks: {options.check_picks}; give a share, 0 … 1")
    check_threads(options.threads, "threads")
    if not 0 <= options.audit <= 1:
        raise ConfigError(f"audit: {options.audit}; give a share of texts, 0 to 1")
    if options.reproducible and options.codec == "int8":
        raise ConfigError("codec int8 rounds rows where spans meet, and a reproducible text was asked for")
    if not all(map(str, options.draft)):
        raise ConfigError("draft is empty: name a folder or a hub id, or leave it out")
    if not options.peers and options.registry is None:
        raise ConfigError("peers: name one of the swarm's peers, as `swarm bootstrap` and `node serve` print them")
    peers, membership = _swarm(options)
    check_codec(options.codec)
    return peers, membership, check_fingerprint(options.fingerprint)


def _swarm(options: ConnectionOptions) -> tuple[tuple[str, ...], Membership]:
    """The peers to join through, and what else joining takes.

    Raises:
        ConfigError: an invite or an address cannot be used.
    """
    given, membership = expand(options.peers, time.time()), options.membership
    if given.network is not None:
        membership = replace(membership, network=given.network)
    if given.invite is not None and given.invite.swarm is not None:
        membership = replace(membership, swarm=given.invite.swarm, is_certain=True)
    return given.join, membership


@asynccontextmanager
async def _links(
    membership: Membership, registry: Registry, own: OwnLayers | None, *, insecure: bool
) -> AsyncIterator[tuple[Dialer, PeerLatency, TaskScope]]:
    """What dials machines, what knows how far they are, and who owns the tasks; all end in order."""
    network = membership.network
    async with (
        open_ways(egress=registry.egress) as ways,
        Dialer(insecure=insecure, ways=ways, network=network) as dialer,
        TaskScope() as scope,
    ):
        measure = partial(measure_delays, insecure=insecure, ways=ways, network=network)

        async def measure_own(records: Sequence[NodeRecord]) -> dict[PeerId, float]:
            return await measure(records if own is None else own.keep_to(records))

        yield dialer, PeerLatency(probe=measure_own), scope


def make_auditor(dialer: Dialer, nearby: PeerLatency, scope: TaskScope, share: float) -> Auditor | None:
    """What audits this client's texts; None where it wants none."""
    owner = AuditOwner(
        dialer,
        SettledRows(),
        partial(asyncio.to_thread, Identity.ephemeral),
        named=lambda error: nearby.lied(error.peer),
        suspected=partial(nearby.failed, is_hearsay=True),
        agreed=nearby.agreed,
        doubt=nearby.doubts.of,
        refuted=nearby.refuted,
    )
    return Auditor(owner, scope, share) if share else None


def _defaults(target: Target, options: ConnectionOptions) -> GenerateOptions:
    """What the checkpoint says of sampling, unless it is not asked; told once."""
    taken = sampling_of(target.generation) if options.generation_config else GenerateOptions()
    if taken:
        logger.info("%s: %s, as its generation_config.json says", target.name, described(taken))
    return taken
