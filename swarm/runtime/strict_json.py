"""JSON as the standard has it, from files that may be damaged and peers that may lie. Pure."""

from __future__ import annotations

import json
import math
from typing import Any


def strict_json(text: str | bytes) -> Any:  # noqa: ANN401  (JSON values)
    """The value; every number in it is finite.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or has a number that is too large or none at all.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is too large")
    return value
