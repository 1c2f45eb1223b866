"""Whether a machine joins a swarm that it found in its own network: its user says so, once per swarm.

Owns the questions and the file of answers; `swarm.directory.joining.lan` hears what there is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from swarm.base.cli_types import LanMode
from swarm.base.errors import ConfigError
from swarm.base.files import replace_file
from swarm.base.ids import shown_swarm
from swarm.base.plain_text import plain_line
from swarm.directory.dht.addresses import Membership, PeerSource
from swarm.directory.identity import default_identity_path
from swarm.protocol.peer_keys import is_peer_id

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from swarm.directory.joining.lan import LanSwarm

_Joining = TypeVar("_Joining", bound="DataclassInstance")
NOT_ASKED: Final = "no terminal to ask at: no swarm was looked for in the local network (--lan yes joins one)"
MAX_ANSWERS: Final = 64
"""Answers that are remembered: the newest."""
MAX_FILE_BYTES: Final = 16_384

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LanAnswer:
    """What the user said of a peer's swarm.

    Attributes:
        join: whether it is joined.
        swarm: the swarm's id, in hex, when the question was first answered; the answer is for no other.
    """

    join: bool
    swarm: str | None = None


class LanAnswers:
    """What the user answered before, per peer that announced a swarm and proved who it is, and per swarm."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the answers when one is wanted.

        Args:
            path: the file; None: `lan.json` beside the machine's identity.
        """
        self._path = path or default_identity_path().with_name("lan.json")

    def of(self, swarm: LanSwarm) -> bool | None:
        """The answer about a peer's swarm; None if there is none, or the peer is of another swarm now."""
        answer = self._read().get(swarm.peer)
        if answer is None or answer.swarm not in (None, _hex(swarm)):
            return None
        return answer.join

    def remember(self, swarm: LanSwarm, answer: bool) -> None:
        """Keep an answer, and of which swarm the peer is; one that cannot be written is asked for again."""
        kept = self._read()
        kept.pop(swarm.peer, None)
        kept[swarm.peer] = LanAnswer(answer, _hex(swarm))
        text = json.dumps({peer: asdict(one) for peer, one in list(kept.items())[-MAX_ANSWERS:]}, indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self._path, text.encode())
        except OSError as error:
            logger.info("the answer is not remembered: %s", error.strerror)

    def _read(self) -> dict[str, LanAnswer]:
        try:
            with self._path.open(encoding="utf-8") as file:
                content = json.loads(file.read(MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict):
            return {}
        found = {peer: _answer(said) for peer, said in content.items() if is_peer_id(peer)}
        return {peer: answer for peer, answer in found.items() if answer is not None}


def _answer(said: object) -> LanAnswer | None:
    """An answer in the file; release 0.2 wrote a yes or no alone."""
    match said:
        case bool(join) | {"join": bool(join), "swarm": None}:
            return LanAnswer(join)
        case {"join": bool(join), "swarm": str(swarm)}:
            return LanAnswer(join, swarm)
        case _:
            return None


def _hex(swarm: LanSwarm) -> str | None:
    return None if swarm.swarm is None else swarm.swarm.hex()


@dataclass(frozen=True, slots=True)
class LanSearch:
    """How a swarm is looked for in the local network.

    Attributes:
        mode: `yes` joins what is found, `ask` asks the user, `no` does not look.
        say: takes lines for the user.
        ask: shows a question and returns the line that was typed; None where nobody can be asked.
        listen: finds the swarms.
        model: the one that is wanted, as the user calls it; None takes any.
        answers: what was answered before.
    """

    mode: LanMode
    say: Callable[[str], None]
    ask: Callable[[str], str] | None
    listen: Callable[[], list[LanSwarm]]
    model: str | None = None
    answers: LanAnswers = field(default_factory=LanAnswers)

    def find(self) -> LanSwarm | None:
        """The swarm to join; None where there is none, or the user does not want it.

        Raises:
            ConfigError: `yes`, and there are several.
        """
        if self.mode == "no" or (self.mode == "ask" and self.ask is None):
            return None
        found = [one for one in self.listen() if self._fits(one)]
        if self.mode == "yes":
            return self._only(found)
        for swarm in found:
            if self._wants(swarm):
                return swarm
        return None

    def _fits(self, swarm: LanSwarm) -> bool:
        return self.model is None or swarm.model is None or _is_called(swarm.model, self.model)

    def _only(self, found: Sequence[LanSwarm]) -> LanSwarm | None:
        known = [one for one in found if self.answers.of(one)]
        if len(known) == 1:
            found = known  # the one that was joined before, whoever else is there
        if len(found) > 1:
            lines = "; ".join(f"{_described(one)}: --join {one.join[0]}" for one in found)
            raise ConfigError(f"--lan yes: {len(found)} swarms were found, say which: {plain_line(lines)}")
        for swarm in found:
            self.say(f"joins {_described(swarm)}, found in the local network")
            self.answers.remember(swarm, True)
            return swarm
        return None

    def _wants(self, swarm: LanSwarm) -> bool:
        assert self.ask is not None, "checked before"
        known = self.answers.of(swarm)
        if known is not None:
            what = "joins" if known else "does not join"
            self.say(f"{what} {_described(swarm)}, found in the local network: you said so before")
            self.answers.remember(swarm, known)  # release 0.2 did not write of which swarm the peer is
            return known
        typed = self.ask(plain_line(f"{_described(swarm)} was found: join it? [Y/n] "))
        answer = typed.strip().lower() in ("", "y", "yes")
        self.answers.remember(swarm, answer)
        return answer


def with_lan(command: _Joining, mode: LanMode, say: Callable[[str], None], *, wants_model: bool = False) -> _Joining:
    """A command with the swarm of the local network that it means, where nothing else named one.

    Args:
        command: with the fields `join`, `model` and `membership`; one that names a peer stays as it is.
        wants_model: whether it needs the name of a model too; else it finds out what the swarm serves.

    Raises:
        ConfigError: `yes`, and there are several.
    """
    has = {one.name for one in fields(command)}
    if command.join or ("new" in has and command.new):  # type: ignore[attr-defined]
        return command
    model = command.model  # type: ignore[attr-defined]
    found = LanSearch(mode, say, _typed if can_ask() else None, _heard, model).find()
    if found is None:
        return command
    membership: Membership = command.membership  # type: ignore[attr-defined]
    source = PeerSource(text="found in the local network")
    there = replace(
        membership, swarm=found.swarm, is_certain=found.swarm is not None, sources=dict.fromkeys(found.join, source)
    )
    return replace(command, join=found.join, model=model or (found.model if wants_model else None), membership=there)


def _heard() -> list[LanSwarm]:
    """What the local network announces; of a program that has no event loop yet."""
    from swarm.directory.joining.lan import browse  # brings mDNS, which nothing else here needs

    return asyncio.run(browse())


def can_ask() -> bool:
    """Whether somebody sits at a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _typed(question: str) -> str:
    """What is typed after a question; its end is a no."""
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline() or "no"


def _described(swarm: LanSwarm) -> str:
    what = "a private swarm" if swarm.is_private else "a swarm" if swarm.swarm is None else shown_swarm(swarm.swarm)
    serves = f" that serves {swarm.model} ({swarm.fingerprint})" if swarm.model is not None else ""
    return f"{what}{serves} at {swarm.host}"


def _is_called(name: str, wanted: str) -> bool:
    """Whether a user's MODEL may be a swarm's: its name, the last part of it, or a folder so named."""
    return Path(wanted).name == Path(name).name
