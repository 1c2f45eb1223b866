"""Which files a joining node takes: those of the swarm's revision, and of a folder only what belongs to its model."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from huggingface_hub import constants

from node.life.model_finder import FoundModel, ModelFinder
from node.life.serve import Node
from node.model.config import ServeConfig
from swarm.base.errors import HubError, ModelMismatch, UnknownModel
from swarm.base.ids import ModelIdentity
from swarm.base.layers import Span
from swarm.demo import TARGET
from swarm.directory.identity import Identity
from swarm.files.file_digests import known_digests
from swarm.files.fingerprint import model_identity
from swarm.files.hub import find_model
from swarm.files.manifests import WeightFiles, find_manifest
from swarm.link.endpoint import Endpoint
from swarm.protocol import wire
from swarm.protocol.manifest import Manifest, WeightFile
from tests.fake_hub import COMMIT, MODEL, FakeHub, Repo
from tests.memory_registry import MemoryNetwork, MemoryRegistry
from tests.sample_records import sample_record

OLDER = "01dc0de" + "0" * 33
IDENTITIES = [Identity.ephemeral() for _ in range(3)]
JOIN = (f"/ip4/192.0.2.1/tcp/1/p2p/{IDENTITIES[0].peer_id}",)


class StubSwarm:
    """Machines that are listed as serving a model, and say its manifest or something else."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.network = MemoryNetwork()
        self.asked = 0
        self._stack = stack

    async def serve(self, model: ModelIdentity, said: bytes) -> None:
        async def manifest(request: bytes, context: object) -> bytes:
            self.asked += 1
            return said

        async def info(request: bytes, context: object) -> bytes:
            return b""

        server = grpc.aio.server()
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Manifest": grpc.unary_unary_rpc_method_handler(manifest),
            "Info": grpc.unary_unary_rpc_method_handler(info),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        registry = MemoryRegistry(self.network, IDENTITIES[len(self.network.models())])
        about: dict[str, Any] = {"model": model, "span": Span(0, model.num_layers), "address": f"127.0.0.1:{port}"}
        await registry.announce(sample_record(registry.peer_id, **about, expires_at=time.time() + 60))

    async def find(self, model: str | Path | None, **options: Any) -> tuple[FoundModel, list[str]]:  # noqa: ANN401
        """What a node that joins finds, and what it says."""
        config = ServeConfig(model=None if model is None else str(model), join=JOIN, insecure=True)
        said: list[str] = []
        finder = ModelFinder(replace(config, **options), said.append, MemoryRegistry(self.network))
        return await finder.find(), said


@pytest.fixture
async def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StubSwarm]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    async with AsyncExitStack() as stack:
        yield StubSwarm(stack)


def identified(model: str | Path, revision: str | None = None, name: str = MODEL) -> tuple[ModelIdentity, Manifest]:
    """As the machine of another user knows a model."""
    folder, hub = find_model(model, revision)
    manifest = find_manifest(WeightFiles.of(folder, hub, str(model))).manifest
    assert manifest is not None
    return model_identity(folder, name, manifest), manifest


@pytest.fixture
def forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the test go on as another machine, which knows nothing yet."""

    def other() -> None:
        shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))

    return other


@pytest.fixture
def tiny(copied: Path) -> Path:
    """A folder that is called as the model on the hub."""
    return copied.rename(copied.with_name(MODEL.split("/")[1]))


@pytest.fixture
def reads_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any model is a large one."""
    monkeypatch.setattr("node.life.model_finder.READ_LATER_BYTES", 1)


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def read(folder: Path) -> list[str]:
    """Names of the weight files that were read."""
    return sorted(file.name for file in known_digests(folder / name for name in shards(folder)))


def change(file: Path) -> None:
    """Other weights in the same places."""
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))


def gone_on(hub: FakeHub) -> None:
    """The main branch gets other weights; what it had is its older commit."""
    repo = hub.repos[MODEL]
    repo.older[OLDER] = repo.files
    name = next(name for name in repo.files if name.endswith(".safetensors"))
    repo.files = repo.files | {name: repo.files[name][:-1] + bytes([repo.files[name][-1] ^ 1])}


@pytest.fixture
def stayed(hub: FakeHub, forget: Callable[[], None]) -> tuple[ModelIdentity, Manifest]:
    """The swarm's revision, while the hub has gone on."""
    gone_on(hub)
    found = identified(MODEL, OLDER)
    forget()
    return found


@pytest.mark.parametrize("named", [True, False], ids=["as asked", "as the swarm calls it"])
@pytest.mark.parametrize("hints", [True, False], ids=["with a hint", "without"])
async def test_a_newcomer_takes_the_revision_that_the_swarm_has(
    swarm: StubSwarm, hub: FakeHub, stayed: tuple[ModelIdentity, Manifest], named: bool, hints: bool
) -> None:
    identity, manifest = stayed
    await swarm.serve(identity, wire.encode_manifest(manifest if hints else Manifest(manifest.files)))
    found, said = await swarm.find(MODEL if named else None)
    assert found.identity == identity
    assert found.checkpoint.hub is not None
    assert found.checkpoint.hub.commit == OLDER
    assert said == [f"the swarm serves revision {OLDER[:7]} of {MODEL}, and so does this machine"]
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]
    hub.status = 503
    again, _ = await swarm.find(MODEL)
    assert again.identity == identity, "what was found once is found without the hub"


async def test_a_newcomer_whose_revision_is_the_swarms_asks_nobody(swarm: StubSwarm, hub: FakeHub) -> None:
    hub.repos[MODEL].older[OLDER] = hub.repos[MODEL].files | {"README.md": b"as it was"}
    identity, manifest = identified(MODEL, OLDER)
    await swarm.serve(identity, wire.encode_manifest(manifest))
    found, said = await swarm.find(MODEL)
    assert found.checkpoint.hub is not None
    assert (found.identity, found.checkpoint.hub.commit, said) == (identity, COMMIT, [])
    assert swarm.asked == 0


async def test_a_revision_that_differs_in_its_tokenizer_alone_is_found_too(
    swarm: StubSwarm, hub: FakeHub, forget: Callable[[], None]
) -> None:
    repo = hub.repos[MODEL]
    repo.older[OLDER] = repo.files
    repo.files = repo.files | {"tokenizer.json": repo.files["tokenizer.json"] + b"\n"}
    identity, manifest = identified(MODEL, OLDER)
    forget()
    await swarm.serve(identity, wire.encode_manifest(manifest))
    found, _ = await swarm.find(MODEL)
    assert found.identity == identity


async def test_a_revision_that_cannot_be_found_is_one_line(
    swarm: StubSwarm, hub: FakeHub, stayed: tuple[ModelIdentity, Manifest]
) -> None:
    identity, manifest = stayed
    await swarm.serve(identity, wire.encode_manifest(manifest))
    hub.repos[MODEL].pulled, hub.repos[MODEL].older = hub.repos[MODEL].older, {}
    name = manifest.files[0].name
    about = rf"{MODEL} here is \w+, in the swarm it is {identity.fingerprint[:12]}: they differ in weights \({name}\); "
    none = f"no revision of the main branch has them; its machines name {OLDER[:12]}"
    with pytest.raises(ModelMismatch, match=f"^{about}{none}$"):
        await swarm.find(None)
    found, said = await swarm.find(MODEL)
    assert found.identity.fingerprint != identity.fingerprint
    assert len(said) == 1
    assert said[0].startswith(f"note: {MODEL} here is")
    assert said[0].endswith("; a chain never mixes them")
    found, _ = await swarm.find(MODEL, revision=OLDER)
    assert found.identity == identity, "its user may ask for it"


async def test_a_revision_that_was_asked_for_stays(swarm: StubSwarm, stayed: tuple[ModelIdentity, Manifest]) -> None:
    identity, manifest = stayed
    await swarm.serve(identity, wire.encode_manifest(manifest))
    found, said = await swarm.find(MODEL, revision="main")
    assert found.identity.fingerprint != identity.fingerprint
    assert f"; you asked for revision main; its machines name {OLDER[:12]}" in said[0]


LIES = [b"", b"\xff", wire.encode_manifest(Manifest.of([WeightFile("a", 1, "ab" * 32)]))]


@pytest.mark.parametrize("lie", LIES, ids=["nothing", "garbage", "another list"])
async def test_what_its_digest_does_not_prove_is_not_believed(
    swarm: StubSwarm, stayed: tuple[ModelIdentity, Manifest], lie: bytes
) -> None:
    await swarm.serve(stayed[0], lie)
    found, said = await swarm.find(MODEL)
    assert found.identity.fingerprint != stayed[0].fingerprint
    assert "its machines do not say which files they have" in said[0]
    assert swarm.asked == 1


async def test_where_nobody_is_there_the_revision_that_was_served_last_is_served_again(
    swarm: StubSwarm, hub: FakeHub, stayed: tuple[ModelIdentity, Manifest]
) -> None:
    identity, manifest = stayed
    await swarm.serve(identity, wire.encode_manifest(manifest))
    await swarm.find(MODEL)
    swarm.network = MemoryNetwork()
    found, said = await swarm.find(MODEL, join=(), fingerprint=identity.fingerprint[:32])
    assert found.identity == identity
    assert said == [f"this machine served revision {OLDER[:7]} of {MODEL}, and serves it again"]
    with pytest.raises(ModelMismatch, match=f"this machine is to serve {'ab' * 6}"):
        await swarm.find(MODEL, join=(), fingerprint="ab" * 16)


async def test_without_the_hub_a_revision_of_one_file_is_served_again(
    swarm: StubSwarm, hub: FakeHub, forget: Callable[[], None]
) -> None:
    """Offline nothing tells which files the main branch has, but its index, and this model has none."""
    hub.repos[MODEL] = Repo.of(TARGET)
    gone_on(hub)
    identity, manifest = identified(MODEL, OLDER)
    await swarm.serve(identity, wire.encode_manifest(manifest))
    forget()
    found, _ = await swarm.find(MODEL)
    assert found.checkpoint.hub is not None
    found.checkpoint.hub.fetch(["model.safetensors"])
    hub.status = 503
    for name in (MODEL, None):
        found, said = await swarm.find(name)
        assert found.identity == identity
        assert said == [f"this machine served revision {OLDER[:7]} of {MODEL}, and serves it again"]
    with pytest.raises(HubError, match="its weights"):
        await swarm.find(MODEL, join=())


async def test_of_two_revisions_in_the_swarm_an_invite_says_which(
    swarm: StubSwarm, hub: FakeHub, stayed: tuple[ModelIdentity, Manifest], forget: Callable[[], None]
) -> None:
    for identity, manifest in (stayed, identified(MODEL)):
        await swarm.serve(identity, wire.encode_manifest(manifest))
    assert hub.repos[MODEL].older
    forget()
    found, said = await swarm.find(MODEL)
    assert (found.identity.fingerprint == stayed[0].fingerprint, said) == (False, []), "both are served"
    found, _ = await swarm.find(MODEL, fingerprint=stayed[0].fingerprint[:32])
    assert found.identity == stayed[0]


# A folder with some of the files


async def test_a_folder_with_some_files_proves_them(swarm: StubSwarm, whole: Path, copied: Path) -> None:
    identity, manifest = identified(whole)
    for name in shards(copied)[1:]:
        (copied / name).unlink()
    with pytest.raises(UnknownModel, match=rf"{shards(whole)[1]}.* is missing, so nothing tells which weights these"):
        await swarm.find(copied)
    await swarm.serve(identity, wire.encode_manifest(manifest))
    found, said = await swarm.find(copied)
    assert found.identity.fingerprint == identity.fingerprint
    here = f"weights: 1 of {len(shards(whole))} files are here, as {MODEL} has them in the swarm"
    assert said == [f"{here} ({identity.fingerprint[:12]})"]
    asked = swarm.asked
    swarm.network = MemoryNetwork()
    again, said = await swarm.find(copied)
    assert (again.identity, said, swarm.asked) == (found.identity, [], asked), "what was proven is remembered"


async def test_a_file_that_is_not_the_swarms_is_refused_by_name(swarm: StubSwarm, whole: Path, tiny: Path) -> None:
    identity, manifest = identified(whole)
    await swarm.serve(identity, wire.encode_manifest(manifest))
    wrong, *others = shards(tiny)
    change(tiny / wrong)
    (tiny / others[-1]).unlink()
    with pytest.raises(
        ModelMismatch, match=rf"{wrong} is not of {MODEL} as the swarm has it \({identity.fingerprint[:12]}"
    ):
        await swarm.find(tiny)
    shutil.copy(whole / others[-1], tiny)
    found, said = await swarm.find(tiny)
    assert found.identity.fingerprint != identity.fingerprint
    if found.identity.is_called(MODEL):
        assert f"they differ in weights ({wrong})" in said[0]


async def test_of_several_fine_tunes_the_one_is_taken_that_fits(
    swarm: StubSwarm, whole: Path, copied: Path, forget: Callable[[], None]
) -> None:
    tuned, *others = shards(copied)
    change(copied / tuned)
    for folder in (whole, copied):
        identity, manifest = identified(folder)
        await swarm.serve(identity, wire.encode_manifest(manifest))
    forget()
    for name in others:
        (copied / name).unlink()
    found, said = await swarm.find(copied)
    assert found.identity.fingerprint == identity.fingerprint
    assert len(said) == 1


@pytest.mark.usefixtures("reads_later")
async def test_of_a_large_model_only_the_files_of_the_layers_are_read(
    swarm: StubSwarm, whole: Path, tiny: Path, forget: Callable[[], None]
) -> None:
    identity, manifest = identified(whole)
    await swarm.serve(identity, wire.encode_manifest(manifest))
    forget()
    change(tiny / shards(tiny)[-1])
    found, said = await swarm.find(tiny)
    assert (found.identity.fingerprint, said) == (identity.fingerprint, [])
    assert read(tiny) == []
    checkpoint = found.checkpoint
    tensors: dict[str, list[str]] = {}
    for name, (file,) in checkpoint.weight_map.items():
        tensors.setdefault(file, []).append(name)
    first, last = shards(tiny)[0], shards(tiny)[-1]
    checkpoint.fetch(tensors[first])
    assert read(tiny) == [first]
    with pytest.raises(
        ModelMismatch, match=rf"{last} is not of tiny \({identity.fingerprint[:12]}\): fetch it again, or"
    ):
        checkpoint.fetch(tensors[last])


async def test_a_hub_that_says_no_digests_cannot_give_other_files_than_the_swarms(
    swarm: StubSwarm, hub: FakeHub, whole: Path
) -> None:
    identity, manifest = identified(whole)
    await swarm.serve(identity, wire.encode_manifest(manifest))
    repo, wrong = hub.repos[MODEL], shards(whole)[-1]
    repo.lists_digests = False
    found, _ = await swarm.find(MODEL)
    assert found.identity == identity
    tensors = [name for name, (file,) in found.checkpoint.weight_map.items() if file in shards(whole)[:2]]
    found.checkpoint.fetch(tensors)
    repo.files = repo.files | {wrong: repo.files[wrong][:-1] + bytes([repo.files[wrong][-1] ^ 1])}
    with pytest.raises(ModelMismatch, match=rf"{wrong} is not of {MODEL} .*: delete it and start again"):
        found.checkpoint.fetch(name for name, (file,) in found.checkpoint.weight_map.items() if file == wrong)


async def test_a_file_that_changes_after_it_was_proven_is_refused(swarm: StubSwarm, tiny: Path) -> None:
    found, _ = await swarm.find(tiny, join=())
    change(tiny / shards(tiny)[0])
    with pytest.raises(ModelMismatch, match=shards(tiny)[0]):
        found.checkpoint.fetch(found.checkpoint.weight_map)


@pytest.mark.usefixtures("reads_later")
async def test_all_of_a_folder_with_another_name_is_read(
    swarm: StubSwarm, whole: Path, copied: Path, forget: Callable[[], None]
) -> None:
    identity, manifest = identified(whole)
    await swarm.serve(identity, wire.encode_manifest(manifest))
    forget()
    found, _ = await swarm.find(copied)
    assert found.identity.fingerprint == identity.fingerprint
    assert read(copied) == shards(copied)


@pytest.mark.usefixtures("reads_later")
@pytest.mark.parametrize("reason", ["another size", "two that it may be"])
async def test_all_is_read_where_sizes_do_not_tell(
    swarm: StubSwarm, whole: Path, tiny: Path, forget: Callable[[], None], reason: str
) -> None:
    identity, manifest = identified(whole)
    digests = [identity.config_digest, identity.weights_digest, identity.tokenizer_digest]
    if reason == "another size":
        manifest = Manifest.of([replace(manifest.files[0], size_bytes=1), *manifest.files[1:]])
    else:
        await swarm.serve(ModelIdentity.of(MODEL, digests[0], "ab" * 32, digests[2], identity.num_layers), b"")
    model = ModelIdentity.of(MODEL, digests[0], manifest.digest, digests[2], identity.num_layers)
    await swarm.serve(model, wire.encode_manifest(manifest))
    forget()
    found, _ = await swarm.find(tiny)
    assert found.identity.fingerprint == identity.fingerprint
    assert read(tiny) == shards(tiny)


# Real nodes


async def test_beside_a_node_with_a_folder_others_serve_some_of_its_files_and_its_revision(
    tmp_path: Path, hub: FakeHub, tiny: Path, forget: Callable[[], None]
) -> None:
    async def reached(endpoint: Endpoint, nonce: bytes) -> bool:
        return True

    gone_on(hub)
    network = MemoryNetwork(dial=reached)
    config = ServeConfig(layers="0-2", model=str(tiny), host="127.0.0.1", threads=1, drain=0.0)
    async with Node(config, lambda _: None, MemoryRegistry(network)) as first:
        identity, checkpoint = first.identity, first.running.resources.checkpoint
        needed = checkpoint.files(name for name in checkpoint.weight_map if ".layers.0." in name)
        forget()
        unneeded = set(shards(tiny)) - set(needed)
        part = shutil.copytree(tiny, tmp_path / "part", ignore=lambda _, names: unneeded & set(names))
        said: list[str] = []
        joins = replace(config, layers="0-1", join=JOIN)
        async with Node(replace(joins, model=str(part)), said.append, MemoryRegistry(network)) as second:
            assert second.identity.fingerprint == identity.fingerprint
        assert any(line.startswith(f"weights: {len(needed)} of {len(shards(tiny))} files are here") for line in said)
        async with Node(replace(joins, model=MODEL), said.append, MemoryRegistry(network)) as third:
            assert third.identity.fingerprint == identity.fingerprint
        assert f"the swarm serves revision {OLDER[:7]} of {MODEL}, and so does this machine" in said
        paths = [request.path for request in hub.requests if request.path.endswith(".safetensors")]
        assert paths
        assert all(f"/resolve/{OLDER}/" in path for path in paths)
