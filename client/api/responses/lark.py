"""A grammar of a custom tool, in Lark's syntax, as one regular expression: what a JSON schema can ask of a text.

Rules are put into each other. A grammar whose rules lead back to themselves has no such expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

MAX_EXPRESSION: Final = 16_384
"""Characters of an expression; rules that name each other twice double it with each step."""
_TOKEN: Final = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|->[ ]*\w+)
    |(?P<string>"(?:[^"\\\n]|\\.)*")(?P<flag>i?)
    |/(?P<regex>(?:[^/\\\n]|\\.)+)/(?P<flags>[a-z]*)
    |%import[ ]+common\.(?P<common>\w+)(?=\s|$)
    |(?P<rule>[?!]?[a-z_]\w*|_?[A-Z]\w*)[ \t]*:
    |(?P<name>[A-Za-z_]\w*)
    |(?P<times>~[ ]*\d+(?:[ ]*\.\.[ ]*\d+)?|\{\d*,?\d*\})
    |(?P<sign>[|()\[\]*+?])""",
    re.VERBOSE,
)
_SIGNS: Final = {"(": "(?:", "[": "(?:", "]": ")?"}
_COMMON: Final = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
_NOT_REGULAR: Final = re.compile(r"\(\?(?!:)|\\[bBAzZ1-9]|\$|(?<!\[)\^")
"""What engines for whole texts have not: looking around, anchors, references."""


def expression_of(grammar: str) -> str | None:
    """The expression that matches the texts of a grammar; None where there is none, or it is too long."""
    try:
        return _LarkRules(dict(_COMMON), grammar).expression("start")
    except (_NotRegularError, RecursionError):
        return None


class _NotRegularError(Exception):
    """A grammar that no expression of a bounded length stands for."""


class _LarkRules:
    """The rules of one grammar, each as an expression once it was wanted."""

    def __init__(self, common: Mapping[str, str], grammar: str) -> None:
        self._known: dict[str, str] = {}
        self._bodies: dict[str, list[re.Match[str]]] = {}
        self._open: set[str] = set()
        body: list[re.Match[str]] = []
        for token in _tokens(grammar):
            if (name := token["rule"]) is not None:
                body = self._bodies[name.lstrip("?!")] = []
            elif (name := token["common"]) is not None:
                if name not in common:
                    raise _NotRegularError
                self._known[name] = common[name]
            else:
                body.append(token)

    def expression(self, name: str) -> str:
        """That of a rule."""
        if name not in self._known:
            if name in self._open or name not in self._bodies:
                raise _NotRegularError
            self._open.add(name)
            self._known[name] = self._joined(self._bodies[name])
            self._open.remove(name)
        return self._known[name]

    def _joined(self, body: Sequence[re.Match[str]]) -> str:
        parts, size = [], 0
        for token in body:
            parts.append(self._part(token))
            size += len(parts[-1])
            if size > MAX_EXPRESSION:
                raise _NotRegularError
        return "".join(parts)

    def _part(self, token: re.Match[str]) -> str:
        if token["string"] is not None:
            return _grouped(_literal(token["string"][1:-1]), token["flag"])
        if token["regex"] is not None:
            if _NOT_REGULAR.search(token["regex"]) or token["flags"] not in {"", "i", "s", "is", "si"}:
                raise _NotRegularError
            return _grouped(token["regex"].replace("\\/", "/"), token["flags"])
        if token["name"] is not None:
            return _grouped(self.expression(token["name"]))
        if token["times"] is not None:
            return "{" + re.sub(r"[~{} ]", "", token["times"]).replace("..", ",") + "}"
        return _SIGNS.get(token["sign"], token["sign"])


def _tokens(grammar: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(grammar):
        token = _TOKEN.match(grammar, place)
        if token is None:
            raise _NotRegularError
        place = token.end()
        if token["skip"] is None:
            yield token


def _grouped(expression: str, flags: str = "") -> str:
    return f"(?{flags}:{expression})"


def _literal(text: str) -> str:
    """A string of Lark as an expression for itself."""
    escapes = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
    plain = re.sub(r"\\(.)", lambda found: escapes.get(found[1], found[1]), text)
    if re.search(r"\\[xuU]", text):
        raise _NotRegularError
    return (
        re.sub(r"([\\.+*?()|\[\]{}^$/-])", r"\\\1", plain)
        .replace("\n", "\\n")
        .replace("\t", "\\t")
        .replace("\r", "\\r")
    )
