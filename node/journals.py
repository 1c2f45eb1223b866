"""How much memory the journals of a node's sessions may take together."""

from __future__ import annotations

JOURNAL_BYTES = 2 << 30


class JournalRoom:
    """A budget in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def change(self, before: int, after: int) -> bool:
        """One journal grows or shrinks; False, and nothing changed, where the budget does not allow it."""
        used = self.used_bytes - before + after
        if after > before and used > self.limit_bytes:
            return False
        self.used_bytes = used
        return True
