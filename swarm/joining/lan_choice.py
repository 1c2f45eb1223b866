"""Whether a machine joins a swarm that it found in its own network: its user says so, once per swarm.

Owns the questions and the file of answers; `swarm.joining.lan` hears what there is.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from swarm.discovery.identity import default_identity_path, is_peer_id
from swarm.errors import ConfigError
from swarm.ids import PeerId
from swarm.joining.lan import LanSwarm, browse
from swarm.runtime.cli_types import LanMode
from swarm.runtime.plain_text import plain_line

MAX_ANSWERS: Final = 64
"""Answers that are remembered: the newest."""
MAX_FILE_BYTES: Final = 16_384

logger = logging.getLogger(__name__)


class LanAnswers:
    """What the user answered before, per peer that announced a swarm: a peer's name cannot be taken by another one."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the answers when one is wanted.

        Args:
            path: the file; None: `lan.json` beside the machine's identity.
        """
        self._path = path or default_identity_path().with_name("lan.json")

    def of(self, peer: PeerId) -> bool | None:
        """The answer about a peer's swarm; None if there is none."""
        return self._read().get(peer)

    def remember(self, peer: PeerId, answer: bool) -> None:
        """Keep an answer; one that cannot be written is asked for again."""
        kept = self._read()
        kept.pop(peer, None)
        kept[peer] = answer
        text = json.dumps(dict(list(kept.items())[-MAX_ANSWERS:]), indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            Path(name).replace(self._path)
        except OSError as error:
            logger.info("the answer is not remembered: %s", error.strerror)

    def _read(self) -> dict[str, bool]:
        try:
            with self._path.open(encoding="utf-8") as file:
                content = json.loads(file.read(MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict):
            return {}
        return {peer: answer for peer, answer in content.items() if is_peer_id(peer) and isinstance(answer, bool)}


@dataclass(frozen=True, slots=True)
class LanSearch:
    """How a swarm is looked for in the local network.

    Attributes:
        mode: `yes` joins what is found, `ask` asks the user, `no` does not look.
        say: takes lines for the user.
        ask: shows a question and returns the line that was typed; None where nobody can be asked.
        model: the one that is wanted, as the user calls it; None takes any.
        answers: what was answered before.
        listen: finds the swarms.
    """

    mode: LanMode
    say: Callable[[str], None]
    ask: Callable[[str], Awaitable[str]] | None
    model: str | None = None
    answers: LanAnswers = field(default_factory=LanAnswers)
    listen: Callable[[], Awaitable[list[LanSwarm]]] = browse

    async def find(self) -> LanSwarm | None:
        """The swarm to join; None where there is none, or the user does not want it.

        Raises:
            ConfigError: `yes`, and there are several.
        """
        if self.mode == "no":
            return None
        if self.mode == "ask" and self.ask is None:
            self.say("no terminal to ask at: no swarm is looked for in the local network (--lan yes joins one)")
            return None
        found = [one for one in await self.listen() if self._fits(one)]
        if self.mode == "yes":
            return self._only(found)
        for swarm in found:
            if await self._wants(swarm):
                return swarm
        return None

    def _fits(self, swarm: LanSwarm) -> bool:
        return self.model is None or swarm.model is None or _is_called(swarm.model, self.model)

    def _only(self, found: Sequence[LanSwarm]) -> LanSwarm | None:
        if len(found) > 1:
            lines = "; ".join(f"{_described(one)}: --join {one.join[0]}" for one in found)
            raise ConfigError(f"--lan yes: {len(found)} swarms were found, say which: {plain_line(lines)}")
        for swarm in found:
            self.say(f"joins {_described(swarm)}, found in the local network")
            return swarm
        return None

    async def _wants(self, swarm: LanSwarm) -> bool:
        assert self.ask is not None, "checked before"
        known = self.answers.of(swarm.peer)
        if known is not None:
            what = "joins" if known else "does not join"
            self.say(f"{what} {_described(swarm)}, found in the local network: you said so before")
            return known
        typed = await self.ask(plain_line(f"{_described(swarm)} was found: join it? [Y/n] "))
        answer = typed.strip().lower() in ("", "y", "yes")
        self.answers.remember(swarm.peer, answer)
        return answer


def _described(swarm: LanSwarm) -> str:
    what = "a private swarm" if swarm.is_private else "a swarm"
    serves = f" that serves {swarm.model} ({swarm.fingerprint})" if swarm.model is not None else ""
    return f"{what}{serves} at {swarm.host}"


def _is_called(name: str, wanted: str) -> bool:
    """Whether a user's MODEL may be a swarm's: its name, the last part of it, or a folder so named."""
    return Path(wanted).name == Path(name).name
