"""Which model a node serves: where its files are, which weights they are, and which revision of it the swarm has.

    name ──▶ small files ──▶ digests of all weight files ──▶ the swarm's? ──▶ serve
                                   │ some are not here            │ it has another revision on the hub
                                   └─▶ the swarm's manifest       └─▶ find that commit, and begin with it again

Fetches small files alone. What a stranger says is believed where a digest proves it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Final

import grpc.aio

from node.model.checkpoint import Checkpoint, open_checkpoint, open_named
from node.model.config import ServeConfig
from node.model.loading import Say, reading_lines
from node.session.spans import MODEL
from swarm.base.errors import (
    HubError,
    ModelMismatch,
    RegistryError,
    RemoteProtocolError,
    SwarmError,
    UnknownModel,
    UnsupportedModel,
)
from swarm.base.ids import ModelIdentity
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import Registry
from swarm.files.fingerprint import client_identity, model_identity
from swarm.files.hub import Hub
from swarm.files.hub_errors import explain, hub_name
from swarm.files.manifests import FileProof, KnownWeights, WeightFiles, find_manifest, remember, remembered_commits
from swarm.files.revisions import fitting_commits
from swarm.link.dial import Dialer
from swarm.protocol import wire
from swarm.protocol.manifest import Manifest
from swarm.routing.latency import measure_delays
from swarm.routing.served import ServedModels

# Asks the machines of a swarm which files their model's weights are. Believes what its digest proves.

AT_ONCE: Final = 4
"""Machines that are asked at the same time."""
MAX_ASKED: Final = 8
ANSWER_S: Final = 5.0
"""For connecting, and for a list that has some kilobytes."""


async def swarm_manifest(model: ModelIdentity, records: Sequence[NodeRecord], dialer: Dialer) -> Manifest | None:
    """The manifest of a model's weights, as machines that serve it say and its digest proves.

    Returns:
        None where nobody says it in time.
    """
    serving = [one for one in records if one.state is NodeState.SERVING and one.model.fingerprint == model.fingerprint]
    asked = random.SystemRandom().sample(serving, min(len(serving), MAX_ASKED))
    for start in range(0, len(asked), AT_ONCE):
        answers = await asyncio.gather(*(_ask(record, dialer) for record in asked[start : start + AT_ONCE]))
        for manifest in answers:
            if manifest is not None and manifest.digest == model.weights_digest:
                return manifest
    return None


async def _ask(record: NodeRecord, dialer: Dialer) -> Manifest | None:
    try:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        call = dialer.channel(record.endpoint).unary_unary(wire.MANIFEST)
        async with asyncio.timeout(ANSWER_S):
            named = ((MODEL, record.model.fingerprint),)  # one machine may serve several
            return wire.decode_manifest(await call(b"", metadata=named))
    except (TimeoutError, grpc.aio.AioRpcError, RemoteProtocolError, SwarmError):
        return None


# Which model a node serves that was told none, and models of one name that are not the same.

FILES_NAMED: Final = 3
"""Files that a line names."""


async def swarms_model(served: ServedModels, known: Sequence[ModelIdentity]) -> str:
    """The name of the swarm's only model: of several that are listed, the only one that is served.

    Raises:
        UnknownModel: none is listed, or none or several of those that are listed are served.
    """
    names = {model.name for model in known}
    if len(names) > 1:
        names = {model.name for model in await served.served(known)}
    if len(names) == 1:
        return names.pop()
    listed = ", ".join(sorted(f"{model.name} ({model.fingerprint[:8]})" for model in known)) or "none"
    raise UnknownModel(f"say which MODEL to serve; models in this swarm: {listed}")


def describe_mismatch(own: ModelIdentity, theirs: ModelIdentity, files: Sequence[str] = (), why: str = "") -> str:
    """A line about two models of one name.

    Args:
        own: what lies here.
        theirs: what the swarm has.
        files: weight files of the swarm's model that are not here, or not with these contents.
        why: why this machine does not take the swarm's, where that can be said.
    """
    differ = own.unlike(theirs) or "number of layers"
    named = f" ({name_files(files)})" if files else ""
    reason = f"; {why}" if why else ""
    prints = f"{own.name} here is {own.fingerprint[:12]}, in the swarm it is {theirs.fingerprint[:12]}"
    return f"{prints}: they differ in {differ}{named}{reason}"


def name_files(names: Sequence[str]) -> str:
    """The first files by name, and how many more there are."""
    more = f" and {len(names) - FILES_NAMED} more" if len(names) > FILES_NAMED else ""
    return ", ".join(names[:FILES_NAMED]) + more


def check_invited_model(identity: ModelIdentity, fingerprint: str | None) -> None:
    """Refuse other weights than whoever invites has, or the swarm had that was joined last.

    Args:
        identity: what lies here.
        fingerprint: how the other one's begins; None where it is not known.

    Raises:
        ModelMismatch: they differ.
    """
    if fingerprint is not None and not identity.fingerprint.startswith(fingerprint):
        raise ModelMismatch(
            f"{identity.name} here is {identity.fingerprint[:12]}, and this machine is to serve {fingerprint[:12]}: "
            "other weights, config or tokenizer; update your copy, or name MODEL to serve yours"
        )


MODELS_ASKED: Final = 4
"""Listed models whose weights may be those of a folder that lacks some files, at most."""
READ_LATER_BYTES: Final = 1 << 30
"""From so many bytes of a folder's weights on, a file is read only when its layers are loaded, where that is enough."""
COMMITS_TRIED: Final = 8
"""Commits with the right weights whose small files are fetched, at most."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that can be loaded.

    Attributes:
        checkpoint: its files.
        identity: which model it is.
        manifest: of its weights.
    """

    checkpoint: Checkpoint
    identity: ModelIdentity
    manifest: Manifest


class ModelFinder:
    """Finds the model that a node is to serve; `find` is called once."""

    def __init__(self, config: ServeConfig, say: Say, registry: Registry) -> None:
        self._config = config
        self._say = say
        self._registry = registry
        self._known: Sequence[ModelIdentity] = ()
        network = config.membership.network
        self._served = ServedModels(registry, partial(measure_delays, insecure=config.insecure, network=network))

    async def find(self) -> FoundModel:
        """The model asked for, or the joined swarm's only one; of a hub model the revision that the swarm has.

        Raises:
            UnknownModel: it is not here and not to be had, or files are missing that would tell which weights it has.
            ModelMismatch: its files are not those of the model that is to be served.
            SwarmError: what else stood in the way.
        """
        config = self._config
        if config.model is None and not config.join:
            raise UnknownModel(
                "no swarm was named or found: say which MODEL one is to begin with here, or join one with --join (an "
                "address that its machines print)"
            )
        self._known = await self._registry.models() if config.join else []
        name = config.model or await swarms_model(self._served, self._known)
        try:
            checkpoint = await asyncio.to_thread(open_named, name, config)
        except SwarmError:
            found = await asyncio.to_thread(self._served_before, name)
            if found is None:
                raise
        else:
            found = await self._identify(checkpoint)
        own, wanted = found.identity.fingerprint, config.fingerprint or ""
        if own not in {model.fingerprint for model in self._known} or not own.startswith(wanted):
            found = await self._as_in_the_swarm(found)
        check_invited_model(found.identity, config.fingerprint)
        if config.membership.note_model is not None:
            config.membership.note_model(found.identity.fingerprint)
        return self._proving(found)

    async def _identify(self, checkpoint: Checkpoint) -> FoundModel:
        """Which model the files are; where some are missing, the swarm's list of them says it."""
        source = WeightFiles.of(checkpoint.folder, checkpoint.hub, checkpoint.name)
        weights = await asyncio.to_thread(find_manifest, source, reads=False)
        manifest = weights.manifest
        if manifest is None and self._known and sum(weights.unread().values()) >= READ_LATER_BYTES:
            manifest = await self._manifest_by_sizes(checkpoint, weights)
        if manifest is None:
            weights = await asyncio.to_thread(find_manifest, source, reading_lines(self._say))
            manifest = weights.manifest or await self._manifest_that_fits(checkpoint, weights)
        identity = await asyncio.to_thread(model_identity, checkpoint.folder, checkpoint.name, manifest)
        return FoundModel(checkpoint, identity, manifest)

    async def _manifest_by_sizes(self, checkpoint: Checkpoint, weights: KnownWeights) -> Manifest | None:
        """The list of the only model that the folder can be by its name, config, tokenizer and sizes of files.

        Reading all of a large model takes long, so each file is proven when its layers are loaded.
        """
        like = await self._like(checkpoint)
        if len(like) != 1 or not like[0].is_called(checkpoint.name):
            return None
        manifest = await self._ask(like[0])
        if manifest is None or not weights.may_be(manifest):
            return None
        sizes = {file.name: file.size_bytes for file in manifest.files}
        return manifest if weights.unread().items() <= sizes.items() else None

    def _proving(self, found: FoundModel) -> FoundModel:
        """The same model, whose files are compared with the manifest before each use.

        They may come later than this, from a hub that says no digests, or change meanwhile.
        """
        checkpoint, model = found.checkpoint, found.identity
        source = WeightFiles.of(checkpoint.folder, checkpoint.hub, checkpoint.name)
        whose = f"{model.name} ({model.fingerprint[:12]})"
        proof = FileProof(source, found.manifest, whose, reading_lines(self._say))
        return replace(found, checkpoint=replace(checkpoint, prove=proof))

    async def _like(self, checkpoint: Checkpoint) -> list[ModelIdentity]:
        """The swarm's models with this config and tokenizer, those first that are meant most."""
        _, *digests = await asyncio.to_thread(client_identity, checkpoint.folder, checkpoint.name)
        like = [one for one in self._known if [one.config_digest, one.tokenizer_digest] == digests]
        return self._wanted_first(like, checkpoint.name)

    async def _manifest_that_fits(self, checkpoint: Checkpoint, weights: KnownWeights) -> Manifest:
        """The list of files of a model of the swarm, of which those here are some.

        Raises:
            ModelMismatch: they are of no such model.
            SwarmError: nothing tells which model's they are.
        """
        wrong: list[str] = []
        for model in (await self._like(checkpoint))[:MODELS_ASKED]:
            manifest = await self._ask(model)
            if manifest is None:
                continue
            if weights.may_be(manifest):
                await asyncio.to_thread(remember, weights.source, manifest)
                here = f"{len(weights.files)} of {len(manifest.files)} files are here"
                self._say(f"weights: {here}, as {model.name} has them in the swarm ({model.fingerprint[:12]})")
                return manifest
            files = name_files(weights.misfits(manifest)) or f"its list of {len(weights.source.names)} files"
            wrong.append(f"{files} is not of {model.name} as the swarm has it ({model.fingerprint[:12]})")
        if wrong:
            raise ModelMismatch(f"{checkpoint.folder}: {wrong[0]}: fetch it again, or give a folder with all files")
        raise _unknown_weights(checkpoint, weights)

    async def _as_in_the_swarm(self, found: FoundModel) -> FoundModel:
        """The revision that the swarm has, where it is on the hub; else a line says in what the two differ."""
        config, own = self._config, found.identity
        same = self._wanted_first((one for one in self._known if one.is_called(own.name)), own.name)
        if not same:
            return await asyncio.to_thread(self._as_before, found)
        theirs = await self._served.best(same)
        manifest = found.manifest if theirs.weights_digest == own.weights_digest else await self._ask(theirs)
        why = "update your copy to serve the swarm's"
        hub = found.checkpoint.hub
        if hub is not None:
            try:
                revision = await asyncio.to_thread(self._revision_of, theirs, manifest, hub)
            except SwarmError as error:
                why = str(error)
            else:
                commit = revision.manifest.commit
                self._say(f"the swarm serves revision {commit[:7]} of {hub.repo}, and so does this machine")
                return revision
        others = [] if manifest is None else found.manifest.strangers(manifest.files)
        line = describe_mismatch(own, theirs, others, why)
        if config.model is None:
            raise ModelMismatch(line)
        self._say(f"note: {line}; a chain never mixes them")
        return found

    def _revision_of(self, theirs: ModelIdentity, manifest: Manifest | None, hub: Hub) -> FoundModel:
        """The commit of the hub model that is the swarm's.

        Raises:
            SwarmError: why it cannot be found.
        """
        if manifest is None:
            raise UnknownModel("its machines do not say which files they have")
        named = f"; its machines name {manifest.commit[:12]}" if manifest.commit else ""
        if self._config.revision is not None:
            raise UnknownModel(f"you asked for revision {self._config.revision}{named}")
        hints = [*filter(None, [manifest.commit]), *remembered_commits(hub.name)]
        for commit in islice(fitting_commits(hub.repo, manifest, hints), COMMITS_TRIED):
            one = _at_commit(hub.name, commit, manifest)
            if one is not None and one.identity.fingerprint == theirs.fingerprint:
                return one
        raise UnknownModel(f"no revision of the main branch has them{named}")

    def _as_before(self, found: FoundModel) -> FoundModel:
        """Where nobody of the swarm is there, and its fingerprint is known: the revision that this machine served."""
        wanted, hub = self._config.fingerprint, found.checkpoint.hub
        if wanted is None or hub is None or found.identity.fingerprint.startswith(wanted):
            return found
        return self._served_before(hub.name) or found

    def _served_before(self, repo: str) -> FoundModel | None:
        """A revision in the cache that is the swarm's, or has the fingerprint that is wanted."""
        config, known = self._config, {model.fingerprint for model in self._known}
        for commit in remembered_commits(repo)[:COMMITS_TRIED] if config.revision is None else ():
            try:
                one = _at_commit(repo, commit, None)
            except SwarmError:
                continue
            if one is None or not one.identity.fingerprint.startswith(config.fingerprint or ""):
                continue
            if config.fingerprint is not None or one.identity.fingerprint in known:
                self._say(f"this machine served revision {commit[:7]} of {repo}, and serves it again")
                return one
        return None

    async def _ask(self, model: ModelIdentity) -> Manifest | None:
        config = self._config
        try:
            records = await self._registry.records(model.fingerprint, model.num_layers, within_s=0.0)
        except RegistryError:  # of this one alone
            return None
        async with Dialer(insecure=config.insecure, network=config.membership.network) as dialer:
            return await swarm_manifest(model, records, dialer)

    def _wanted_first(self, models: Iterable[ModelIdentity], name: str) -> list[ModelIdentity]:
        """Models by how much they are meant: with the fingerprint that was given, if one was; then by name."""
        wanted = self._config.fingerprint
        given = [one for one in models if wanted is None or one.fingerprint.startswith(wanted)]
        return sorted(given, key=lambda one: not one.is_called(name))


def _unknown_weights(checkpoint: Checkpoint, weights: KnownWeights) -> SwarmError:
    """Nothing tells which weights these are: what is missing, and what to do."""
    files, hub = name_files(weights.missing), checkpoint.hub
    if hub is None:
        return UnknownModel(
            f"{checkpoint.folder}: {files} is missing, so nothing tells which weights these are: join a swarm that "
            "serves them, give a folder with all files, or the hub's name for the model"
        )
    absent = [name for name in weights.missing if name not in hub.files]
    if hub.failure is not None:
        return explain(hub.failure, hub.repo, files)
    if absent:
        return UnknownModel(f"{hub.repo}: {absent[0]}: the hub has no such file; the model there is incomplete")
    return HubError(f"{hub.repo}: {hub_name()} does not say the SHA-256 of {files}; give a folder with all files")


def _at_commit(repo: str, commit: str, manifest: Manifest | None) -> FoundModel | None:
    """A hub model at a commit; None where its files are not those of the manifest, or cannot be read."""
    try:
        checkpoint = open_checkpoint(repo, commit)
    except (UnknownModel, UnsupportedModel):
        return None
    weights = find_manifest(WeightFiles.of(checkpoint.folder, checkpoint.hub, repo))
    found = weights.manifest
    if found is None and manifest is not None and weights.may_be(manifest):
        found = Manifest.of(manifest.files, commit)
        remember(weights.source, found)
    if found is None:
        return None
    return FoundModel(checkpoint, model_identity(checkpoint.folder, checkpoint.name, found), found)
