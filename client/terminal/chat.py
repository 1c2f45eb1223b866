"""The chat on a terminal: reads lines, prints answers, obeys commands such as /stats. Owns no model and no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

from rich.console import Console
from rich.text import Text

from client.library.sync import Chat
from client.terminal import report
from swarm.base.errors import ConfigError, SwarmError
from swarm.base.plain_text import plain_for, plain_line

HELP = """\
/stats     where the last answer's time went
/seed      show the seed; /seed 7 sets it, /seed random draws one per answer
/history   everything said so far
/clear     begin again
/quit      leave, as Ctrl-D does; Ctrl-C stops an answer"""


class ChatTerminal:
    """A conversation of a user and a model on a terminal.

    Attributes:
        failed: answers that ended with an error.
    """

    def __init__(self, chat: Chat, console: Console, seed: int | None, draft_notes: Sequence[str] = ()) -> None:
        """Talk through a chat.

        Args:
            console: to print to.
            seed: of each answer; None draws one.
            draft_notes: what /stats says of the drafts.
        """
        self._draft_notes = draft_notes
        self.failed = 0
        self._chat = chat
        self._console = console
        self._seed = seed

    def run(self, lines: Iterator[str]) -> None:
        """Answer each line until they end or one is /quit."""
        for line in lines:
            text = line.strip()
            if text in {"/quit", "/exit"}:
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        """Stream one answer. Ctrl-C and errors end the answer, not the conversation."""
        is_thinking = False
        try:
            with closing(self._chat.stream(text, seed=self._seed)) as pieces:
                for piece in pieces:
                    self._think(piece.reasoning)
                    is_thinking = is_thinking or bool(piece.reasoning)
                    if piece.text and is_thinking:
                        self._show("\n")
                        is_thinking = False
                    self._show(piece.text, end="")
            self._show("")
        except KeyboardInterrupt:
            self._console.print("\n(stopped; what you read stays in the history)", style="dim")
        except SwarmError as error:
            self.failed += 1
            self._show("")
            self._console.print(f"client: {plain_line(str(error))}", style="red", markup=False, soft_wrap=True)

    def _command(self, text: str) -> None:
        name, _, value = text.partition(" ")
        match name:
            case "/stats" if (stats := self._chat.stats) is not None:
                self._console.print(report.summary(stats), soft_wrap=True)
                self._console.print(report.turn(stats), soft_wrap=True)
                for note in self._draft_notes:
                    self._console.print(plain_line(note), soft_wrap=True, markup=False, highlight=False)
                self._console.print(report.waterfall(stats))
            case "/stats":
                self._show("nothing was answered yet")
            case "/seed":
                self._set_seed(value.strip())
            case "/history":
                for message in self._chat.history:
                    self._show(f"{message.role}: {message.content}")
            case "/clear":
                self._chat.clear()
                self._show("forgotten")
            case "/help":
                self._show(HELP)
            case _:
                self._show(f"there is no {name}; /help lists what there is")

    def _set_seed(self, value: str) -> None:
        if value == "random":
            self._seed = None
        elif value.isdecimal() and int(value) < 2**63:
            self._seed = int(value)
        elif value:
            self._show(f"{value!r} is no seed; give a number below 2⁶³, or random")
            return
        self._show(f"seed: {'drawn for each answer' if self._seed is None else self._seed}")

    def _think(self, text: str) -> None:
        """Show what the model thinks before it answers."""
        if text:
            shown = plain_for(self._console.file, text)
            self._console.print(Text(shown, style="dim"), end="", soft_wrap=True)

    def _show(self, text: str, end: str = "\n") -> None:
        self._console.file.write(plain_for(self._console.file, text) + end)
        self._console.file.flush()


def typed_lines(is_terminal: bool) -> Iterator[str]:
    """Yield the lines of standard input; Ctrl-C at the prompt discards the line.

    Raises:
        ConfigError: a line is not UTF-8.
    """
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its line editing
    while True:
        try:
            yield input("› " if is_terminal else "")
        except EOFError:
            return
        except UnicodeDecodeError:
            raise ConfigError("prompt: is not valid text (UTF-8)") from None
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")  # noqa: T201 - the command line's own output
