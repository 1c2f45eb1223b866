"""A line fitted online to measurements: old ones fade, outliers are kept out. Pure."""

from __future__ import annotations

import math

FADE = 0.97
"""Weight of a measurement against that of the next one."""
FIRST_MS = 1.0
FIRST_SLOPE = 1 / 256
"""The first slope where none is claimed, as a part of the level: 256 nodes cost as much as the first one."""
SLOPE_ERROR = 10.0
"""Factor by which the first slope may be wrong; with the noise it says how far x must spread to outweigh that slope."""
OUTLIER_FACTOR = 4.0
"""A residual of more than so many times the usual one is an outlier."""
OUTLIERS_IN_A_ROW = 3
"""So many outliers in a row count as measurements: the line has changed."""
FAR_FACTOR, YOUNG_WEIGHT = 5.0, 8.0
"""While the line has less weight than `YOUNG_WEIGHT`, its usual residual is not known: a measurement of more than
`FAR_FACTOR` times what was expected, as of kernels that load on first use, is an outlier until it comes again."""
MIN_SCALE = 0.03
"""The usual residual is at least this part of the value."""


class Regression:
    """`y = a + b · x`, fitted with fading weights; outliers are kept out until they come several times in a row.

    In a row means that no measurement at a similar x confirmed the line in between: the line may be right for small x
    and wrong for large ones. Until x has varied, the slope is the claimed one, or a small part of the level.

    Attributes:
        a: the level.
        b: the slope.
    """

    def __init__(
        self, slope: float | None = None, slope_error: float = SLOPE_ERROR, level: float | None = None
    ) -> None:
        """Start with a claim.

        Args:
            slope: as claimed; None without a claim.
            slope_error: factor by which that slope may be wrong.
            level: claimed together with the slope: if one is wrong by some factor, so is the other.
        """
        self.a = FIRST_MS if level is None else level
        self.b = FIRST_MS * FIRST_SLOPE if slope is None else slope
        self._slope, self._slope_error, self._level = slope, slope_error, level
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._scale = math.inf
        self._outliers, self._outlier_x = 0, 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    @property
    def _is_young(self) -> bool:
        """Whether little was measured, but something was measured or claimed to compare with."""
        return self._weight < YOUNG_WEIGHT and (self.is_known or self._level is not None)

    def at(self, x: float) -> float:
        """The line's value, never below 0."""
        return max(self.a + self.b * x, 0.0)

    def with_new_level(self) -> Regression:
        """The same line; the next measurement sets its level anew, the slope stays until x has varied."""
        line = Regression(self.b, self._slope_error)
        line.a = self.a
        return line

    def assume(self, x: float, y: float) -> None:
        """Take a measurement as the line's value until something better is measured."""
        line = Regression(self._slope, self._slope_error, self._level)
        line.learn(x, y)
        self.a, self.b = line.a, line.b

    def cap_slope(self, slope: float) -> None:
        """Limit the slope to what other measurements allow; the line still passes through the mean of its own."""
        if self.b > slope:
            self.b = slope
            if self.is_known:
                self.a = (self._y - slope * self._x) / self._weight

    def learn(self, x: float, y: float, *, is_shared: bool = False) -> None:
        """Learn from a measurement.

        Args:
            x: rows.
            y: milliseconds.
            is_shared: whether others may have paid a part of y, so that it does not show how wrong the claim is.
        """
        assert math.isfinite(x) and math.isfinite(y), "one number that is none would stay in all sums"  # noqa: PT018
        if self._is_young and self.is_known and FAR_FACTOR * y < self.at(x) and x >= self._x / self._weight / 2:
            # Much faster than all before: those were stalls.
            self.__dict__.update(Regression(self._slope, self._slope_error, self._level).__dict__)
        residual, is_far = abs(y - self.at(x)), self._is_young and y > FAR_FACTOR * self.at(x)
        if is_far or residual > OUTLIER_FACTOR * max(self._scale, MIN_SCALE * self.at(x)):
            is_same = self._outliers > 0 and abs(x - self._outlier_x) <= x / 2
            self._outliers, self._outlier_x = self._outliers + 1, x
            if self._outliers < OUTLIERS_IN_A_ROW and not (is_far and is_same):
                return
            if self.is_known:
                self.__dict__.update(self.with_new_level().__dict__)
        elif self.is_known:
            self._scale = residual if self._scale == math.inf else FADE * self._scale + (1 - FADE) * residual
        if abs(x - self._outlier_x) <= x / 2:
            self._outliers = 0
        self._weight, self._x, self._y = FADE * self._weight + 1, FADE * self._x + x, FADE * self._y + y
        self._xx, self._xy = FADE * self._xx + x * x, FADE * self._xy + x * y
        x, y = self._x / self._weight, self._y / self._weight
        usual = max(y, 0.0) * FIRST_SLOPE
        first = usual if self._slope is None else self._slope
        if self._level is not None and not is_shared:
            first *= max(y, 0.0) / max(self._level + first * x, 1e-9)
        spread, both = max(self._xx - self._weight * x * x, 0.0), self._xy - self._weight * x * y
        pull = max((self._scale / (self._slope_error * max(first, usual, 1e-9))) ** 2, 1.0)
        self.b = first if pull == math.inf else max((both + pull * first) / (spread + pull), 0.0)
        self.a = y - self.b * x
