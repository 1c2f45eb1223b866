"""A GGUF file is one model wherever it comes from, and two files of one repository are two."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from client.base.target import load_target
from node.model.checkpoint import open_checkpoint
from swarm.files.fingerprint import model_identity
from swarm.files.manifests import WeightFiles, find_manifest, remembered_commits
from tests.fake_hub import COMMIT, FakeHub, Repo
from tests.model.gguf_files import TinyGguf

REPO = "org/Tiny-GGUF"


def test_a_file_is_the_same_model_on_the_hub_here_and_for_a_client(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    kinds = {"Q8_0": Kind.Q8_0, "Q4_0": Kind.Q4_0}
    files = {name: tmp_path / f"Tiny-{name}.gguf" for name in kinds}
    for name, kind in kinds.items():
        TinyGguf.of("llama", "llama", lambda *_, kind=kind: kind).write(files[name])
    hub.repos[REPO] = Repo({file.name: file.read_bytes() for file in files.values()})
    prints = set()
    for name, file in files.items():
        there, here = open_checkpoint(f"{REPO}:{name}"), open_checkpoint(file)
        manifest = find_manifest(WeightFiles.of(there.folder, there.hub, there.name)).manifest
        identity = model_identity(there.folder, there.name, manifest)
        assert identity.name == f"{REPO}:{name}"
        assert identity.fingerprint == model_identity(here.folder, here.name).fingerprint
        assert identity.fingerprint == load_target(f"{REPO}:{name}").fingerprint
        assert remembered_commits(f"{REPO}:{name}") == [COMMIT]
        prints.add(identity.fingerprint)
    assert len(prints) == len(files)
    assert remembered_commits(REPO) == []
