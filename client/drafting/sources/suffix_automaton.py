"""A suffix automaton over tokens: what followed the longest endings of a text where they stood before. Pure.

    state     all substrings that end at the same places; `length` is that of the longest of them
    link      the state of the longest ending that stands in more places
    count     at how many places the state's strings end

Appending a token takes constant time on average, so that a text is indexed while it is written. Counts are kept up to
date along the links, at most `COUNTED` of them per token: in "a a a a …" a token has as many endings as the text has
tokens. Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985).
"""

from __future__ import annotations

from collections.abc import Iterable

COUNTED = 64
"""Links along which one token updates counts, at most."""


class SuffixAutomaton:
    """All substrings of a growing text of token ids.

    Attributes:
        next: per state, the state that each token leads to.
        link: per state, see the module; −1 for the root.
        length: per state, in tokens.
        count: per state, places.
    """

    ROOT = 0

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self._last = self.ROOT

    def append(self, token: int) -> None:
        """Add the text's next token."""
        last, added = self._last, self._state({}, self.length[self._last] + 1)
        while last >= 0 and token not in self.next[last]:
            self.next[last][token] = added
            last = self.link[last]
        if last < 0:
            self.link[added] = self.ROOT
        else:
            after = self.next[last][token]
            self.link[added] = after if self.length[after] == self.length[last] + 1 else self._split(last, token)
        self._last = added
        self._count(added)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add the text's next tokens."""
        for token in tokens:
            self.append(token)

    @property
    def ending(self) -> int:
        """The state of the longest ending that stood somewhere before; the root where the last token is new."""
        return max(self.link[self._last], self.ROOT)

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Where an ending of `length` tokens in `state` leads when `token` follows: a state and the new length."""
        while state != self.ROOT and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        following = self.next[state].get(token)
        return (self.ROOT, 0) if following is None else (following, length + 1)

    def _state(self, following: dict[int, int], length: int) -> int:
        self.next.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.count.append(0)
        return len(self.length) - 1

    def _split(self, last: int, token: int) -> int:
        """Split the state that `token` leads to: its shorter strings now end in one place more than the longer ones."""
        after = self.next[last][token]
        part = self._state(dict(self.next[after]), self.length[last] + 1)
        self.link[part], self.count[part] = self.link[after], self.count[after]
        self.link[after] = part
        while last >= 0 and self.next[last].get(token) == after:
            self.next[last][token] = part
            last = self.link[last]
        return part

    def _count(self, state: int) -> None:
        for _ in range(COUNTED):
            if state <= self.ROOT:
                return
            self.count[state] += 1
            state = self.link[state]
