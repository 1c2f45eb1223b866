"""Escape sequences, hidden characters and directions, one by one."""

from __future__ import annotations

import io

import pytest

from swarm.base.plain_text import plain, plain_for, plain_line


class Tty(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;ZXZpbA==\x07\x1b[2J", "�]52;c;ZXZpbA==��[2J"),
        ("a\rb", "a�b"),
        ("\x9b31m", "�31m"),  # a C1 control that is a whole escape sequence's head
        ("gnp.\u202egpj", "gnp.�gpj"),
        ("pay\u200bpal\ufeff\u2060", "pay�pal��"),
        ("one\u2028two\u2029", "one�two�"),
        ("\ud800", "�"),
        ("\U000e0061tag", "�tag"),
        (
            "def f():\n\treturn 'é 漢 👩\u200d🔬 می\u200cخواهم'\n",
            "def f():\n\treturn 'é 漢 👩\u200d🔬 می\u200cخواهم'\n",
        ),
        ("\u00a0\u3000\u2009", "\u00a0\u3000\u2009"),
    ],
)
def test_each_is_shown_as_what_it_is(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_a_line_names_its_breaks() -> None:
    assert plain_line("no\n2026-01-01 node: all is well\t!") == "no\\n2026-01-01 node: all is well\\t!"


def test_a_models_text_is_plain_on_a_terminal_and_itself_elsewhere() -> None:
    said = "\x1b]0;owned\x07é\r\n"
    assert plain_for(Tty(), said) == "�]0;owned�é�\n"
    assert plain_for(io.StringIO(), said) == said
