"""A tool call's arguments for dialects that take them as an object."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json


def arguments_object(arguments: str) -> dict[str, Any]:
    """Arguments as an object; of a text that was cut, as much as it says."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
