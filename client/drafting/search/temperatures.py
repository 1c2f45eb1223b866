"""The ranges of temperature that calibrations learn apart. Pure values.

A file of their own, so that the controller and the look-up need no calibration.
"""

from __future__ import annotations

TEMPERATURES = (0.0, 0.45, 0.8, 1.25)
"""Upper ends of the ranges that are learned apart; the last range has none."""
