"""Names of a sequence's beginnings, by which machines find what they hold of it (P15). Pure.

    tokens   |—— 64 ——|—— 64 ——|—— 64 ——|— rest —
    names        0   ──▶   1   ──▶   2            each over the one before and its block's token ids

A name is a keyed hash: who has no secret can neither guess it nor tell what it stands for. The secret never leaves the
client. What machines compare are names; a border is a name and how many tokens it stands for.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

from swarm.protocol.limits import BLOCK_TOKENS, MAX_BORDERS, NAME_BYTES
from swarm.protocol.messages import Border

NEWEST_BORDERS = MAX_BORDERS // 2
"""So many of the last blocks are named each; before them every 2nd, 4th, 8th … one."""


class BlockNames:
    """The names of one sequence's blocks, which grows and is cut back.

    Attributes:
        names: of its whole blocks, in order.
    """

    def __init__(self, secret: bytes, names: Sequence[bytes] = ()) -> None:
        """Begin a sequence.

        Args:
            secret: 16 to 64 bytes, of all who may use what others of them have computed.
            names: of its first blocks, where they are known.
        """
        self._secret = secret
        self.names = list(names)

    def extend(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """Name the whole blocks among the tokens that follow those with names, and return these names."""
        old = len(self.names)
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = struct.pack(f"<{BLOCK_TOKENS}I", *tokens[start : start + BLOCK_TOKENS])
            parent = self.names[-1] if self.names else b""
            self.names.append(hashlib.blake2b(parent + block, digest_size=NAME_BYTES, key=self._secret).digest())
        return tuple(self.names[old:])

    def truncate(self, tokens: int) -> None:
        """Forget the names of blocks that do not lie within the first tokens."""
        del self.names[tokens // BLOCK_TOKENS :]


def borders(names: Sequence[bytes], known: int = 0) -> tuple[Border, ...]:
    """What a new session asks machines to begin with: the longest beginning first.

    Args:
        names: of its text's blocks.
        known: so many blocks are believed to be held, so that border is one of them.
    """
    believed = {known - 1} if known else set()
    places = sorted({*list(_places(len(names)))[: MAX_BORDERS - len(believed)], *believed}, reverse=True)
    return tuple(Border((place + 1) * BLOCK_TOKENS, names[place]) for place in places)


def _places(blocks: int) -> Iterator[int]:
    place, step, taken = blocks - 1, 1, 0
    while place >= 0:
        yield place
        taken += 1
        if taken >= NEWEST_BORDERS and taken % 4 == 0:
            step *= 2
        place -= step
