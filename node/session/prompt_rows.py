"""How many hidden rows of a prompt one session's tail sends (P10). Pure.

Replies are kept until the client says that it holds them. So their rows are bounded, or a client that never says so
would fill the tail's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.ids import TreeNodeId
from swarm.protocol.limits import PROMPT_ROWS_BYTES


class PromptRowsBudget:
    """Bytes of rows by reply, of those that the client did not acknowledge."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}

    def grant(self, sequence: int, nodes: Sequence[TreeNodeId], row_bytes: int, acked: int) -> list[TreeNodeId]:
        """The newest of some forced tokens whose rows may go with a reply.

        Args:
            sequence: the reply's.
            nodes: whose rows are asked for and here, in order.
            row_bytes: of one row.
            acked: the client holds every reply up to this sequence.
        """
        self._sent = {answered: size for answered, size in self._sent.items() if answered > acked}
        count = min(len(nodes), max(0, PROMPT_ROWS_BYTES - sum(self._sent.values())) // row_bytes)
        if count:
            self._sent[sequence] = count * row_bytes
        return list(nodes[len(nodes) - count :])
