"""Fields of a request that mean the same in every dialect, as options of a generation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, cast

from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import BeforeValidator

from client.api.errors import invalid
from client.options import GenerateOptions, Grammar
from swarm.protocol.pick_rules import MAX_GRAMMAR_BYTES

SEEDS: Final = 2**63
"""There are so many; what is asked for beyond them wraps."""
BEST_ONLY: Final = 1e-9
"""A `top_p` that leaves the best token alone, as 0 means it."""
MAX_RULES: Final = 256
"""Rules of a GBNF grammar; the time to convert one grows with their square, and is 0.1 s here."""
_LARK: Final = re.compile(r"^(?:%llguidance\b|[ \t]*start[ \t]*:(?!:=))", re.MULTILINE)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which JSON may write as 6.0."""


def asked_options(**values: Any) -> GenerateOptions:  # noqa: ANN401 - each option has its own type
    """The options that a request sets; None means that it does not."""
    if values.get("top_p") == 0:
        values["top_p"] = BEST_ONLY
    if values.get("top_k") is not None:
        values["top_k"] = max(values["top_k"], 0)
    return cast("GenerateOptions", {name: value for name, value in values.items() if value is not None})


def token_limit(*limits: int | None) -> int | None:
    """The first limit that is given; None for none, which is what -1 means too."""
    given = next((limit for limit in limits if limit is not None), None)
    return None if given is None or given < 0 else given


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Stop strings given as one, as a list, or not at all."""
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


def penalties(last_n: int | None, repetition: float | None, **others: float | None) -> dict[str, float | None]:
    """Penalties of a request whose service counts the last tokens alone, where it says how many.

    Raises:
        ApiError: it wants another number than all, and a penalty.
    """
    asked = {"repetition_penalty": repetition, **others}
    if last_n == 0:
        return {"repetition_penalty": 1.0, **dict.fromkeys(others, None)}
    if last_n not in (None, -1) and (repetition not in (None, 1) or any(others.values())):
        raise invalid("'repeat_last_n' is -1 or 0 here: penalties count all tokens.", "repeat_last_n")
    return asked


def schema_grammar(schema: Mapping[str, Any] | bool) -> Grammar:
    """What a text must match so that it is JSON of this schema."""
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """What a text must match so that it is one of these."""
    return Grammar("regex", f"({'|'.join(map(re.escape, choices))})")


def written_grammar(text: str, param: str) -> Grammar:
    """A grammar in GBNF, as llama.cpp has it, or in Lark.

    Raises:
        ApiError: it is neither, or too large.
    """
    if len(text) > MAX_GRAMMAR_BYTES:
        raise invalid(f"'{param}' has at most {MAX_GRAMMAR_BYTES} bytes.", param)
    if _LARK.search(text):
        return Grammar("lark", text)
    if text.count("::=") > MAX_RULES:
        raise invalid(f"'{param}' has at most {MAX_RULES} rules in GBNF; Lark may have more.", param)
    try:
        return Grammar("lark", gbnf_to_lark(text))
    except Exception as error:  # noqa: BLE001 - the converter raises that, and what the text makes it stumble over
        raise invalid(f"Invalid value for '{param}': neither GBNF nor Lark ({str(error)[:200]}).", param) from None


def one_grammar(given: Mapping[str, Grammar | None]) -> Grammar | None:
    """The only grammar among fields that may each bring one.

    Raises:
        ApiError: two of them do.
    """
    asked = [name for name, grammar in given.items() if grammar is not None]
    if len(asked) > 1:
        raise invalid(f"'{asked[1]}' cannot stand beside '{asked[0]}': the text must match one of them.", asked[1])
    return given[asked[0]] if asked else None


def wrapped_seed(seed: int | None) -> int | None:
    """A seed that the library takes, for any whole number."""
    return None if seed is None else seed % SEEDS
