"""How much memory the journals of a node's sessions may take together. A pure value, apart from the sessions."""

from __future__ import annotations

import logging

from swarm.protocol.journal import Journal

JOURNAL_BYTES = 2 << 30

logger = logging.getLogger(__name__)


class JournalBudget:
    """A budget in bytes.

    Attributes:
        limit_bytes: for all journals.
        used_bytes: what they take now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def settle(self, paid_bytes: int, journal: Journal) -> int:
        """Account for a journal that grew or shrank; without room for it, it is dropped (R8).

        Args:
            paid_bytes: what it took at the last call.
            journal: the journal as it is now.

        Returns:
            what it takes now.
        """
        grown = journal.size_bytes - paid_bytes
        if grown > 0 and self.used_bytes + grown > self.limit_bytes:
            logger.warning("no room for the journal of a session: another hop will replay it when this is needed")
            journal.drop()
        self.used_bytes += journal.size_bytes - paid_bytes
        return journal.size_bytes
