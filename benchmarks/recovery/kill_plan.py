"""Whom the soak kills next: pure, a function of its seed."""

from __future__ import annotations

import random
from collections.abc import Mapping


class KillPlan:
    """The replicas of some spans, in the order in which they are killed."""

    def __init__(self, spans: Mapping[str, str], seed: int) -> None:
        """`spans`: what each replica has, by name. The only listed replica of a span is not killed."""
        self._spans = dict(spans)
        self._rng = random.Random(seed)
        self._killed: list[str] = []
        self.spared: tuple[str, ...] = ()

    def next(self, listed: frozenset[str]) -> str:
        """One of those that are not spared and have another replica among the listed ones."""
        able = [
            name
            for name in sorted(listed - set(self.spared))
            if any(other != name and self._spans[other] == self._spans[name] for other in listed)
        ]
        name = self._rng.choice(able)
        self._killed.append(name)
        return name

    def spare(self) -> tuple[str, ...]:
        """From now on the replica of each span that has run longest is not killed."""
        oldest = sorted(self._spans, key=lambda name: len(self._killed) - self._last(name), reverse=True)
        chosen = {self._spans[name]: name for name in reversed(oldest)}
        self.spared = tuple(chosen[span] for span in sorted(chosen))
        return self.spared

    def _last(self, name: str) -> int:
        return max((number for number, killed in enumerate(self._killed) if killed == name), default=-1)

    def span(self) -> tuple[str, ...]:
        """All replicas of a span that is drawn."""
        span = self._rng.choice(sorted(set(self._spans.values())))
        return tuple(name for name in self._spans if self._spans[name] == span)
