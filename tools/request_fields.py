"""The tables of docs/reference/api-dialects.md, made from `client.api.request_fields`; as a module it writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from client.api.request_fields import FIELDS, BodyKind, Handling, RequestField

PAGE: Final = Path(__file__).parents[1] / "docs/reference/api-dialects.md"
MARKS: Final = ("<!-- fields: {} -->\n", "<!-- fields: end -->\n")
_PARTS: Final[dict[str, dict[BodyKind, str]]] = {
    "completions": {BodyKind.CHAT: "chat alone", BodyKind.COMPLETIONS: "completions alone"},
    "responses": {BodyKind.RESPONSES: ""},
    "messages": {BodyKind.MESSAGES: ""},
    "ollama": {BodyKind.OLLAMA_CHAT: "chat alone", BodyKind.OLLAMA_GENERATE: "generate alone"},
    "options": {BodyKind.OLLAMA_OPTIONS: ""},
}
"""Each part's bodies, and what is said of a field that only one of them has."""
_WORDS: Final = {Handling.HONOURED: "", Handling.IGNORED: "ignored: "}


def table(part: str) -> str:
    """The table of one part: what is honoured first, what is refused last."""
    rows: dict[tuple[str, str], list[str]] = {}
    for field in sorted(_fields(_PARTS[part]), key=lambda field: [*Handling].index(field.handling)):
        rows.setdefault((_becomes(field, _PARTS[part]), field.source), []).append(f"`{field.name}`")
    lines = [f"| {', '.join(names)} | {source} | {becomes} |" for (becomes, source), names in rows.items()]
    return "\n".join(["| field | of | here |", "|---|---|---|", *lines, ""])


def _fields(bodies: Iterable[BodyKind]) -> Iterator[RequestField]:
    for field in FIELDS:
        if any(body in field.bodies for body in bodies):
            yield field


def _becomes(field: RequestField, bodies: dict[BodyKind, str]) -> str:
    has = [body for body in bodies if body in field.bodies]
    alone = f" ({bodies[has[0]]})" if len(has) < len(bodies) else ""
    if field.handling is not Handling.REFUSED:
        return f"{_WORDS[field.handling]}{field.note}{alone}"
    neutral = [f"`{json.dumps(value)}`" for value in field.neutral]
    unless = f" unless {_either(neutral)}" if neutral else ""
    return f"**refused**{unless}: {field.note}{alone}"


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def with_tables(page: str) -> str:
    """The page with its tables made anew, between their marks."""
    for part in _PARTS:
        begin, end = MARKS[0].format(part), MARKS[1]
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table(part)}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
