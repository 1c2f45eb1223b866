"""Which swarm an identity is of: one small file beside its key, so that a swarm that began here stays the same one."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from swarm.ids import SWARM_ID_BYTES, SwarmId, as_swarm_id
from swarm.runtime.files import replace_file

_MAX_FILE_BYTES: Final = 64


def fresh_swarm_id() -> SwarmId:
    """The id of a swarm that begins although its first peer was of another one."""
    return SwarmId(secrets.token_bytes(SWARM_ID_BYTES))


def swarm_file(identity: Path) -> Path:
    """Where the swarm of an identity is kept."""
    return identity.with_suffix(".swarm")


def kept_swarm(identity: Path | None) -> SwarmId | None:
    """The swarm that an identity was of last; None where it is not known."""
    if identity is None:
        return None
    try:
        with swarm_file(identity).open("rb") as file:
            return as_swarm_id(bytes.fromhex(file.read(_MAX_FILE_BYTES).decode("ascii").strip()))
    except (OSError, ValueError):
        return None


def keep_swarm(identity: Path | None, swarm: SwarmId) -> None:
    """Keep it; where it cannot be written, the next swarm that begins here is the identity's own."""
    if identity is not None and kept_swarm(identity) != swarm:
        with suppress(OSError):
            replace_file(swarm_file(identity), f"{swarm.hex()}\n".encode())


def forget_swarm(identity: Path, swarm: SwarmId) -> None:
    """Keep it no more."""
    if kept_swarm(identity) == swarm:
        with suppress(OSError):
            swarm_file(identity).unlink()
