"""A line through measurements that fade, from which outliers are kept out. Pure."""

from __future__ import annotations

import math

FADE = 0.97
"""What an older measurement weighs beside the next one."""
FIRST_MS = 1.0
FIRST_SLOPE = 1 / 256
"""Where nobody says what a node costs: 256 of them as much as the first one."""
UNSURE = 10.0
"""The first slope may be wrong by so many times itself: noise beside that says how far x must spread to outweigh it."""
OUTLIER = 4.0
"""A residual of so many times the usual one is no news, unless it comes again and again."""
STUBBORN = 3
FAR, YOUNG = 5.0, 8.0
"""Before so many measurements nobody knows what is usual: so many times what was expected is no news at once, such as
of kernels that are loaded when they are used first, but may well be when it comes again for as much."""
MIN_SCALE = 0.03


class Regression:
    """`y = a + b · x`, fitted with fading weights; outliers are kept out until they come several times in a row.

    In a row: with nothing between them that bore the line out near by. What it says of small x may be right where its
    slope is wrong.

    Until x has varied, the slope is `slope`, or a little of the level where nobody knows one.
    """

    def __init__(self, slope: float | None = None, unsure: float = UNSURE, level: float | None = None) -> None:
        """unsure: by so many times itself the slope may be wrong. level: a that was claimed with it: if one is wrong by
        some factor, so is the other."""
        self.a = FIRST_MS if level is None else level
        self.b = FIRST_MS * FIRST_SLOPE if slope is None else slope
        self._slope, self._unsure, self._level = slope, unsure, level
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._scale = math.inf
        self._odd, self._odd_x = 0, 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    @property
    def _is_young(self) -> bool:
        """Whether little was measured, but enough, or claimed, to tell what is far from it."""
        return self._weight < YOUNG and (self.is_known or self._level is not None)

    def at(self, x: float) -> float:
        """The line's value, never below 0."""
        return max(self.a + self.b * x, 0.0)

    def again(self) -> Regression:
        """The same line, where the next measurement sets the level anew; the slope stays until x has varied."""
        line = Regression(self.b, self._unsure)
        line.a = self.a
        return line

    def suppose(self, x: float, y: float) -> None:
        """What to take it for until something is measured."""
        line = Regression(self._slope, self._unsure, self._level)
        line.learn(x, y)
        self.a, self.b = line.a, line.b

    def bound(self, slope: float) -> None:
        """The slope is at most so much, as other measurements say; the level of what was learned stays."""
        if self.b > slope:
            self.b = slope
            if self.is_known:
                self.a = (self._y - slope * self._x) / self._weight

    def learn(self, x: float, y: float, *, is_shared: bool = False) -> None:
        """A measurement. is_shared: others bear a part of such, so they tell nothing of how wrong a claim is."""
        if self._is_young and self.is_known and FAR * y < self.at(x) and x >= self._x / self._weight / 2:
            self.__dict__.update(Regression(self._slope, self._unsure, self._level).__dict__)  # those were stalls
        residual, is_far = abs(y - self.at(x)), self._is_young and y > FAR * self.at(x)
        if is_far or residual > OUTLIER * max(self._scale, MIN_SCALE * self.at(x)):
            is_same = self._odd > 0 and abs(x - self._odd_x) <= x / 2
            self._odd, self._odd_x = self._odd + 1, x
            if self._odd < STUBBORN and not (is_far and is_same):
                return
            if self.is_known:
                self.__dict__.update(self.again().__dict__)
        elif self.is_known:
            self._scale = residual if self._scale == math.inf else FADE * self._scale + (1 - FADE) * residual
        if abs(x - self._odd_x) <= x / 2:
            self._odd = 0
        self._weight, self._x, self._y = FADE * self._weight + 1, FADE * self._x + x, FADE * self._y + y
        self._xx, self._xy = FADE * self._xx + x * x, FADE * self._xy + x * y
        x, y = self._x / self._weight, self._y / self._weight
        usual = max(y, 0.0) * FIRST_SLOPE
        first = usual if self._slope is None else self._slope
        if self._level is not None and not is_shared:
            first *= max(y, 0.0) / max(self._level + first * x, 1e-9)
        spread, both = max(self._xx - self._weight * x * x, 0.0), self._xy - self._weight * x * y
        pull = max((self._scale / (self._unsure * max(first, usual, 1e-9))) ** 2, 1.0)
        self.b = first if pull == math.inf else max((both + pull * first) / (spread + pull), 0.0)
        self.a = y - self.b * x
