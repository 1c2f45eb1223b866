"""The chat on a terminal: answers stream, commands answer, and nothing that goes wrong ends the conversation."""

from __future__ import annotations

import io
from collections.abc import Generator
from dataclasses import replace
from typing import Any, cast

import pytest
from rich.console import Console

from client.base.stats import Result, Stats
from client.dialogue.messages import Message
from client.library.session import Piece
from client.terminal.chat import ChatTerminal
from swarm.base.errors import GenerationInterrupted

STATS = Stats(
    tokens=2,
    prompt_tokens=30,
    reused_tokens=20,
    prefill_sweeps=1,
    seed=7,
    reproducible=True,
    numeric_class="cpu-float32",
    time_to_first_token_s=0.5,
    total_s=1.0,
    sweeps=(),
    hops=(),
)


class FakeChat:
    """Answers every line with its words, one piece each; some words do something else."""

    def __init__(self) -> None:
        self.history: list[Message] = []
        self.seeds: list[int | None] = []
        self.left = 0
        self.stats: Stats | None = None

    def stream(self, text: str, seed: int | None) -> Generator[Piece, None, None]:
        self.seeds.append(seed)
        self.history.append(Message("user", text))
        try:
            for word in text.split():
                if word == "ctrl-c":
                    raise KeyboardInterrupt
                if word == "break":
                    raise GenerationInterrupted("node Qm vanished", "", ())
                yield Piece("", reasoning=word) if word.startswith("hm") else Piece(word + " ")
            yield Piece("", Result(text, (1, 2), "length", STATS))
        finally:
            self.stats = replace(STATS, seed=seed or 99)
            self.left += 1

    def clear(self) -> None:
        self.history.clear()


class Tty(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def talk(
    *lines: str, seed: int | None = None, out: io.StringIO | None = None, draft_notes: tuple[str, ...] = ()
) -> tuple[str, FakeChat, ChatTerminal]:
    out = out or io.StringIO()
    chat = FakeChat()
    talk = ChatTerminal(cast("Any", chat), Console(file=out, width=200), seed, draft_notes)
    talk.run(iter(lines))
    return out.getvalue(), chat, talk


def test_thoughts_are_shown_before_the_answer_and_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert talk("hm, hm. Yes.")[0] == "hm,hm.\n\nYes. \n"
    said, _, _ = talk("hm\x1b[31m Yes.", out=Tty())
    assert "\x1b[2m" in said
    assert "\x1b[31m" not in said
    assert said.endswith("\nYes. \n")


def test_answers_stream_line_by_line_and_blank_lines_are_no_turns() -> None:
    said, chat, talked = talk("one two", "", "  three  ")
    assert said == "one two \nthree \n"
    assert [message.content for message in chat.history] == ["one two", "three"]
    assert (chat.left, talked.failed) == (2, 0)


def test_an_answer_is_plain_on_a_terminal_and_itself_in_a_pipe() -> None:
    line = "one \x1b]0;owned\x07 \u202etxt"
    said, _, _ = talk(line, "/history", out=Tty())
    assert said.count("one �]0;owned� �txt") == 2
    assert "\x1b" not in said
    assert talk(line)[0] == f"{line} \n"


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    said, chat, talked = talk("one ctrl-c two", "three")
    assert said.startswith("one \n(stopped;")
    assert "two" not in said
    assert said.endswith("three \n")
    assert (chat.left, talked.failed) == (2, 0)


def test_a_broken_chain_is_one_line_and_the_conversation_goes_on() -> None:
    said, _, talked = talk("one break", "two")
    assert "client: generation interrupted after 0 tokens: node Qm vanished\n" in said
    assert said.endswith("two \n")
    assert talked.failed == 1


@pytest.mark.parametrize(
    ("command", "says", "then"),
    [
        ("/seed 7", "seed: 7", 7),
        ("/seed random", "seed: drawn for each answer", None),
        ("/seed", "seed: 3", 3),
        ("/seed -1", "'-1' is no seed", 3),
        (f"/seed {2**63}", "is no seed", 3),
    ],
)
def test_the_seed_can_be_seen_set_and_left_to_chance(command: str, says: str, then: int | None) -> None:
    said, chat, _ = talk(command, "one", seed=3)
    assert says in said
    assert chat.seeds == [then]


def test_stats_are_those_of_the_last_answer() -> None:
    assert "nothing was answered yet" in talk("/stats")[0]
    said = talk("/seed 11", "one", "/stats")[0]
    assert "seed 11, reproducible" in said
    assert "conversation of 30 tokens, 20 kept by the nodes, 10 sent" in said
    assert "whole sweep" in said


def test_stats_say_how_much_of_the_vocabulary_a_draft_knows() -> None:
    note = "draft small knows 37.2 % of the target's tokens (1,524 of 4,096), and drafts no others"
    assert f"{note}\n" in talk("one", "/stats", draft_notes=(note,))[0]
    assert note not in talk("one", "/stats")[0]


def test_a_stopped_answer_has_stats_too() -> None:
    assert "seed 11, reproducible" in talk("/seed 11", "one ctrl-c", "/stats")[0]


def test_history_clear_help_and_quit() -> None:
    said, chat, _ = talk("one", "/history", "/clear", "/history", "/help", "/what", "/quit", "never")
    assert said.count("user: one") == 1
    assert "/clear" in said
    assert "there is no /what; /help lists what there is" in said
    assert "never" not in said
    assert not chat.history
