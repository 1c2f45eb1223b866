"""Clients of earlier releases, byte for byte, at a node of this one."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import node.session.service
from node.life.serve import Node
from node.session.admission import CallerCheck
from swarm.demo import TARGET
from swarm.directory.identity import Identity
from swarm.protocol.frames import FrameAssembler
from swarm.protocol.messages import Attach
from tests.frozen.conversation import Call, picks_of
from tests.frozen.freeze import lone_node
from tests.frozen.reading import NOW, Frozen, releases
from tests.memory_registry import MemoryNetwork, MemoryRegistry


def said(frozen: Frozen, stream: str) -> Call:
    recorded: Any = frozen.content["conversation"][stream]
    metadata = tuple((name, b64decode(value)) for name, value in recorded["metadata"])
    return [b64decode(part) for part in recorded["parts"]], metadata


def named_as_then(running: Node, frozen: Frozen) -> None:
    """Let a node call its model as the frozen release called it, which made a fingerprint in another way.

    Otherwise it would refuse the session as one for another model; that is all that keeps the two apart.
    """
    attach = FrameAssembler().feed(said(frozen, "link")[0][0])
    assert isinstance(attach, Attach)
    sessions = running.sessions
    sessions._identity = replace(sessions._identity, fingerprint=attach.open.fingerprint)


@pytest.mark.parametrize("frozen", releases(), ids=lambda release: release.name)
async def test_an_older_client_gets_the_picks_that_it_got_then(
    frozen: Frozen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.session.service, "CallerCheck", partial(CallerCheck, clock=lambda: NOW))
    (tmp_path / "identity.key").write_bytes(frozen.data("identity"))
    (tmp_path / "identity.key").chmod(0o400)
    registry = MemoryRegistry(MemoryNetwork(), Identity.load_or_create(tmp_path / "identity.key"))
    async with lone_node(TARGET, registry) as running:
        named_as_then(running, frozen)
        picks = await picks_of(running.address, said(frozen, "link"), said(frozen, "replies"))
    assert picks == frozen.content["conversation"]["picks"]
