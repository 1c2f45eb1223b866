"""Recorded shapes of JSON: what a body must have, where more is allowed."""

from __future__ import annotations

import re
from typing import Any


def mismatch(value: Any, shape: Any, path: str = "body") -> str:  # noqa: ANN401 - JSON
    """The first place where a value has not its shape; empty where it has.

    Args:
        value: as JSON values.
        shape: an object asks for these fields, a list for these elements, a type for any value of it, a pattern for a
            text that it matches as a whole, anything else for itself.
        path: of the value, for the message.
    """
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{path}: {value!r} is no object"
        missing = [name for name in shape if name not in value]
        found = [mismatch(value[name], part, f"{path}.{name}") for name, part in shape.items() if name in value]
        return f"{path}: no {missing[0]}" if missing else next(filter(None, found), "")
    if isinstance(shape, list):
        if not isinstance(value, list) or len(value) != len(shape):
            return f"{path}: {value!r} is no list of {len(shape)}"
        found = [
            mismatch(item, part, f"{path}[{place}]")
            for place, (item, part) in enumerate(zip(value, shape, strict=True))
        ]
        return next(filter(None, found), "")
    if isinstance(shape, type):
        kinds = (int, float) if shape is float else (shape,)  # JSON has one kind of number
        return "" if isinstance(value, kinds) else f"{path}: {value!r} is no {shape.__name__}"
    if isinstance(shape, re.Pattern):
        return "" if isinstance(value, str) and shape.fullmatch(value) else f"{path}: {value!r} is not {shape.pattern}"
    return "" if value == shape and isinstance(value, type(shape)) else f"{path}: {value!r} is not {shape!r}"
