"""How every program reads its command: options, and an invite wherever a swarm is meant.

An invite names itself, so it needs no `--join`: where a word of a command's own would stand, it is read as if it had
one. All programs read here, so no command can forget it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, get_type_hints

import tyro

from swarm.base.cli import plain_words
from swarm.base.version import VERSION
from swarm.directory.joining.invite import is_invite

JOIN: Final = "--join"


def read_command(program: str, about: str, commands: Mapping[str, type]) -> Any:  # noqa: ANN401 - one of the commands
    """What this process's command line asks for; ends the program where it asks for help, or for nothing that is."""
    words = sys.argv[1:]
    if words[:1] == ["--version"]:
        print(f"{program} {VERSION}")  # noqa: T201 - the command line's own output
        sys.exit()
    if words[:1] and words[0] in commands:
        words = [words[0], *with_join(words[1:], commands[words[0]])]
    readers: dict[str, Callable[..., Any]] = dict(commands)
    description = f"{about} --version prints the version."
    return tyro.extras.subcommand_cli_from_dict(
        readers, prog=program, description=description, args=words, registry=plain_words()
    )


def with_join(words: Sequence[str], command: type) -> list[str]:
    """The words of a command, with `--join` before each invite that stands by itself.

    Args:
        command: its class of options; one that joins nothing is left as it is.
    """
    kinds = dict(_options(command))
    if "join" not in kinds:
        return list(words)
    read: list[str] = []
    for word in words:
        before = read[-1] if read else ""
        if is_invite(word) and not _takes_a_value(before, kinds):
            read.append(JOIN)
        read.append(word)
    return read


def _takes_a_value(word: str, kinds: Mapping[str, object]) -> bool:
    name = word.removeprefix("--").replace("-", "_")
    return word.startswith("--") and "=" not in word and name in kinds and kinds[name] is not bool


def _options(command: type) -> Iterator[tuple[str, object]]:
    """The options of a class, those of its parts too, and the type of each."""
    hints = get_type_hints(command)
    for one in fields(command):
        kind = hints[one.name]
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _options(kind)
        else:
            yield one.name, kind
