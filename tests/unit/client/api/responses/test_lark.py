"""Grammars in Lark's syntax as regular expressions: the same texts match."""

from __future__ import annotations

import re

import pytest

from client.api.responses.tools import MAX_EXPRESSION, expression_of

LOG = r"""
// a ship's log
start: day+ end?
?day: "## " date LF (entry -> written)* LF
date: DIGIT~4 "-" DIGIT~1..2
entry: "- " [time " "] TEXT LF
     | "* " "calm"i LF
time: /\d\d:\d\d/
end: "# (the \"end\") \\o/ [1+1]"
TEXT: /[^\n]+/
%import common.LF
%import common.DIGIT
"""


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("## 1850-1\n- 06:30 calm sea\n\n", True),
        ("## 1850-1\n- calm sea\n* CaLm\n\n## 1850-12\n\n", True),
        ('## 1850-1\n\n# (the "end") \\o/ [1+1]', True),
        ("## 185-1\n\n", False),
        ("## 1850-123\n\n", False),
        ("## 1850-1\n- \n\n", False),
        ("## 1850-1\n* stormy\n\n", False),
        ("## 1850-1\n", False),
        ("# (the end) o/ [1+1]", False),
        ("", False),
    ],
)
def test_its_texts_match(text: str, matches: bool) -> None:
    expression = expression_of(LOG)
    assert expression is not None
    assert (re.fullmatch(expression, text) is not None) is matches


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start? ")"',
        'start: a\na: "x" b\nb: a?',
        "start: nothing",
        'first: "x"',
        'start: "x"\n%ignore " "',
        'start: "x"\n%import common.SIGNED_NUMBER',
        'start: "a".."z"',
        "start: /a(?=b)/",
        "start: /^a/",
        "start: /a$/",
        "start: /a/x",
        r'start: "\x41"',
        "start: " + " ".join(f"a{n}" for n in range(3)) + "\n",
        "\n".join(["start: a20", 'a0: "ab"', *(f"a{n}: a{n - 1} a{n - 1}" for n in range(1, 21))]),
        "\n".join(["start: a5000", 'a0: "a"', *(f"a{n}: a{n - 1}" for n in range(1, 5_001))]),
        "",
    ],
)
def test_what_no_expression_stands_for_has_none(grammar: str) -> None:
    assert expression_of(grammar) is None


def test_an_expression_is_bounded() -> None:
    long = "\n".join(["start: a9", 'a0: "ab"', *(f"a{n}: a{n - 1} a{n - 1}" for n in range(1, 10))])
    expression = expression_of(long)
    assert expression is not None
    assert len(expression) <= MAX_EXPRESSION
