"""Fields of a request that mean the same in every dialect, as options of a generation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from client.options import GenerateOptions, Grammar

SEEDS: Final = 2**63
"""There are so many; what is asked for beyond them wraps."""


def asked_options(**values: Any) -> GenerateOptions:  # noqa: ANN401 - each option has its own type
    """The options that a request sets; None means that it does not."""
    return cast("GenerateOptions", {name: value for name, value in values.items() if value is not None})


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Stop strings given as one, as a list, or not at all."""
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


def schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """What a text must match so that it is JSON of this schema."""
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def wrapped_seed(seed: int | None) -> int | None:
    """A seed that the library takes, for any whole number."""
    return None if seed is None else seed % SEEDS
