"""What a client believes machines hold: the names of its texts' blocks, and the chain over which each was computed.

A belief that is wrong costs nothing: hops say what they hold when a session opens.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from swarm.base.files import create_file, state_folder, why_unusable
from swarm.protocol.messages import RouteHop

logger = logging.getLogger(__name__)

SECRET_BYTES: Final = 32

MAX_NAMES = 16_384
"""Names that are remembered: of a million tokens, 3 MB."""


def fresh_secret() -> bytes:
    """One that nobody else has, and nobody afterwards."""
    return secrets.token_bytes(SECRET_BYTES)


def user_secret() -> bytes:
    """The secret of this user's programs, which outlives them: a server that starts again finds what machines hold.

    It lies in `canopy/prefix-secret` in the state folder. Where that cannot be used, it is one of this program's own.
    """
    path = state_folder() / "prefix-secret"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            create_file(path, fresh_secret())
        if len(secret := path.read_bytes()) == SECRET_BYTES:
            return secret
        logger.warning("%s does not have %d bytes; what machines hold is not found after a restart", path, SECRET_BYTES)
    except OSError as error:
        logger.warning("%s; what machines hold is not found after a restart", why_unusable(error, path))
    return fresh_secret()


class KnownPrefixes:
    """The newest `MAX_NAMES` names."""

    def __init__(self) -> None:
        self._hops: OrderedDict[bytes, tuple[RouteHop, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hops)

    def note(self, names: Sequence[bytes], hops: tuple[RouteHop, ...]) -> None:
        """A chain holds the blocks with these names, from a text's first on."""
        for name in reversed(names):  # the first ones are forgotten last
            self._hops[name] = hops
            self._hops.move_to_end(name)
        while len(self._hops) > MAX_NAMES:
            self._hops.popitem(last=False)

    def longest(self, names: Sequence[bytes]) -> tuple[int, tuple[RouteHop, ...]]:
        """How many of a text's first blocks some chain holds, and its hops; 0 and none where none does."""
        for place in reversed(range(len(names))):
            if (hops := self._hops.get(names[place])) is not None:
                return place + 1, hops
        return 0, ()
