"""Equal bytes are one model wherever they come from; other bytes are another one, sharded or not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

import swarm.files.manifests
from swarm.base.ids import ModelIdentity
from swarm.files.fingerprint import known_identity, model_identity
from swarm.files.hub import find_model
from swarm.files.manifests import WeightFiles, find_manifest, known_weights, remember, remembered_commits
from swarm.files.revisions import MAX_COMMITS, fitting_commits
from swarm.protocol.manifest import Manifest, WeightFile
from tests.fake_hub import COMMIT, MODEL, FakeHub

OLDER = "01dc0de" + "0" * 33


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    return tmp_path / "own/canopy"


def source(model: str | Path, revision: str | None = None) -> WeightFiles:
    return WeightFiles.of(*find_model(model, revision), str(model))


def identity(where: WeightFiles) -> ModelIdentity:
    manifest = find_manifest(where).manifest
    assert manifest is not None
    return model_identity(where.folder, MODEL, manifest)


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def fine_tuned(file: bytes) -> bytes:
    """Other weights, with the same tensors in the same places."""
    return file[:-1] + bytes([file[-1] ^ 1])


def test_equal_bytes_are_one_model_by_commit_folder_mirror_and_cache(hub: FakeHub, whole: Path, copied: Path) -> None:
    hub.repos[MODEL].older[OLDER] = hub.repos[MODEL].files | {"README.md": b"as it was"}
    by_commit = identity(source(MODEL))
    assert hub.fetched() & set(shards(whole)) == set(), "the listing tells what the files are"
    assert identity(source(MODEL, OLDER)) == by_commit
    assert identity(source(copied)) == identity(source(whole)) == by_commit
    (copied / "notes.txt").write_text("a stray file")
    (copied / "unused.safetensors").write_bytes(b"one that the index does not name")
    assert identity(source(copied)) == by_commit
    for number, name in enumerate(shards(whole)):  # a mirror may name them as it likes
        (copied / name).rename(copied / f"part-{9 - number}.safetensors")
    index = json.loads((copied / "model.safetensors.index.json").read_text())
    names = {name: f"part-{9 - number}.safetensors" for number, name in enumerate(shards(whole))}
    index["weight_map"] = {tensor: names[file] for tensor, file in index["weight_map"].items()}
    (copied / "model.safetensors.index.json").chmod(0o644)
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert identity(source(copied)) == by_commit
    _, of_hub = find_model(MODEL)
    assert of_hub is not None
    of_hub.fetch(shards(whole))
    assert known_identity(of_hub.folder, MODEL) == by_commit, "blobs of the cache are named by their digests"


def test_a_fine_tune_with_the_same_index_is_another_model(hub: FakeHub, whole: Path, copied: Path) -> None:
    name = shards(whole)[1]
    (copied / name).chmod(0o644)
    (copied / name).write_bytes(fine_tuned((whole / name).read_bytes()))
    assert identity(source(copied)).unlike(identity(source(whole))) == "weights"
    hub.repos[MODEL].older[OLDER] = hub.repos[MODEL].files | {name: (copied / name).read_bytes()}
    assert identity(source(MODEL, OLDER)) == identity(source(copied))


@pytest.mark.parametrize("lists_digests", [True, False], ids=["lists digests", "lists none"])
def test_a_client_knows_the_weights_by_the_listing_alone(hub: FakeHub, whole: Path, lists_digests: bool) -> None:
    hub.repos[MODEL].lists_digests = lists_digests
    folder, of_hub = find_model(MODEL)
    known = known_identity(folder, MODEL, of_hub)
    assert known == (identity(source(whole)) if lists_digests else None)
    assert hub.fetched() & set(shards(whole)) == set()


def test_a_node_asks_a_hub_that_lists_no_digests_for_each_files(hub: FakeHub, whole: Path) -> None:
    hub.repos[MODEL].lists_digests = False
    assert identity(source(MODEL)) == identity(source(whole))
    assert hub.fetched() & set(shards(whole)) == set()


def test_a_small_file_that_the_hub_knows_by_another_digest_is_read(
    hub: FakeHub, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fake_hub.LARGE", (".bin",))  # weights that git keeps itself
    assert identity(source(MODEL)) == identity(source(whole))
    assert hub.fetched() >= set(shards(whole))


def test_a_restart_without_the_hub_has_the_same_fingerprint(hub: FakeHub, whole: Path) -> None:
    before = identity(source(MODEL))
    _, of_hub = find_model(MODEL)
    assert of_hub is not None
    of_hub.fetch(shards(whole)[:1])
    hub.status = 503
    assert identity(source(MODEL)) == before
    folder, of_hub = find_model(MODEL)
    assert known_identity(folder, MODEL, of_hub) == before


def test_what_was_remembered_of_a_folder_holds_while_its_files_fit(whole: Path, copied: Path) -> None:
    before = find_manifest(source(copied)).manifest
    for name in shards(copied)[1:]:
        (copied / name).unlink()
    assert find_manifest(source(copied)).manifest == before
    name = shards(copied)[0]
    (copied / name).chmod(0o644)
    (copied / name).write_bytes(fine_tuned((whole / name).read_bytes()))
    known = find_manifest(source(copied))
    assert known.manifest is None
    assert known.missing == tuple(shards(whole)[1:])
    assert before is not None
    assert known.misfits(before) == [name]


def test_what_was_remembered_says_nothing_of_files_that_were_not_read(whole: Path, copied: Path) -> None:
    before = identity(source(copied))
    assert known_identity(copied, MODEL) == before
    name = shards(copied)[0]
    (copied / name).chmod(0o644)
    (copied / name).write_bytes(fine_tuned((whole / name).read_bytes()))
    assert known_identity(copied, MODEL) is None
    (copied / name).unlink()
    assert known_identity(copied, MODEL) == before


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"version": 1, "of": "x", "commit": "", "files": [["a"]]}', b"[" * 9_000]
)
def test_a_remembered_manifest_that_cannot_be_read_is_none(copied: Path, cache: Path, content: bytes) -> None:
    find_manifest(source(copied))
    (kept,) = (cache / "manifests").glob("*.json")
    kept.write_bytes(content)
    (copied / shards(copied)[0]).unlink()
    assert find_manifest(source(copied)).manifest is None


def test_the_manifests_that_are_kept_are_bounded(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.files.manifests, "MANIFESTS_KEPT", 2)
    where = source(MODEL)
    commits = [f"{number:040x}" for number in range(4)]
    for age, commit in enumerate(reversed(commits)):
        hub.repos[MODEL].older[commit] = hub.repos[MODEL].files
        find_manifest(source(MODEL, commit))
        for file in (cache / "manifests").glob("*.json"):
            os.utime(file, (file.stat().st_atime - 10, file.stat().st_mtime - 10 * (age + 1)))
    assert remembered_commits(MODEL) == commits[:2]
    assert remembered_commits("org/other") == []
    assert where.key == f"{MODEL}@{COMMIT}"


def test_only_commits_of_the_main_branch_or_of_the_cache_are_found(hub: FakeHub, whole: Path) -> None:
    repo, name = hub.repos[MODEL], shards(whole)[1]
    theirs = repo.files | {name: fine_tuned(repo.files[name])}
    pulled = "ab" * 20
    repo.pulled[pulled] = theirs
    manifest = find_manifest(source(MODEL, pulled)).manifest
    assert manifest is not None
    shutil.rmtree(constants.HF_HUB_CACHE)
    assert list(fitting_commits(MODEL, manifest, [pulled])) == [], "anybody can open a pull request"
    repo.older |= {OLDER: theirs, "cd" * 20: repo.files, "ef" * 20: theirs}
    assert list(fitting_commits(MODEL, manifest, [pulled])) == [OLDER, "ef" * 20]
    assert list(fitting_commits(MODEL, manifest, ["ef" * 20])) == ["ef" * 20, OLDER]
    find_model(MODEL, pulled)
    assert next(fitting_commits(MODEL, manifest, [pulled])) == pulled, "this machine has fetched it before"
    repo.older = {f"{number:040x}": repo.files for number in range(100)} | {OLDER: theirs}
    hub.requests.clear()
    assert list(fitting_commits(MODEL, manifest, [])) == []
    assert len(hub.requests) == MAX_COMMITS + 1


def test_a_manifest_knows_files_by_contents_and_size() -> None:
    one, other = WeightFile("a", 3, "ab" * 32), WeightFile("b", 3, "cd" * 32)
    manifest = Manifest.of([other, one], COMMIT)
    assert manifest == Manifest.of([one, other])
    assert manifest.digest == Manifest.of([WeightFile("z", 3, "ab" * 32), other]).digest
    assert manifest.digest != Manifest.of([WeightFile("a", 4, "ab" * 32), other]).digest
    assert manifest.digest != Manifest.of([one, other, one]).digest
    assert manifest.strangers([WeightFile("x", 3, "ab" * 32), WeightFile("y", 9, "cd" * 32)]) == ["y"]


def test_a_folder_that_lacks_files_says_which(copied: Path) -> None:
    name = shards(copied)[0]
    (copied / name).unlink()
    known = known_weights(source(copied))
    assert known.missing == (name,)
    remember(source(copied), Manifest.of([*known.files, WeightFile(name, 1, "ab" * 32)]))
    assert find_manifest(source(copied)).manifest is not None
