"""How many tree nodes the next sweep carries. Pure: the seam where a controller chooses K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Budget(Protocol):
    """Chooses K before each sweep."""

    def nodes(self, tokens_left: int) -> int:
        """Tree nodes below the pending token; 0 is plain decoding. `tokens_left` may still be emitted, at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """The same K for every sweep; none when the next pick is the last token anyway."""

    size: int

    def nodes(self, tokens_left: int) -> int:
        """`size`, unless the tree could not be used."""
        return self.size if tokens_left > 1 else 0
