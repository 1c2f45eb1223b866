"""The parts of docs/reference that are generated from the programs, as Markdown. Reads the programs; writes nothing.

A page includes a part with `<!-- generated: NAME -->`, which readers of the repository do not see.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, cast, get_args
from unittest.mock import patch

import client
import client.cli
import node.cli
import swarm.cli
from swarm.base import errors
from swarm.base.declared import bare, facts, table
from swarm.base.errors import SwarmError
from swarm.health.tasks.publisher import StatePublisher
from swarm.health.web.api import alert_routes, make_app
from swarm.protocol import wire

COLUMNS = 88
"""As wide as a block of text on a desktop page."""

_MAIN_CLASSES = ("Swarm", "AsyncSwarm", "Chat", "AsyncChat")
_COMMAND = re.compile(r"^ +• ([a-z-]+) ", re.MULTILINE)
_PROGRAMS: dict[str, Callable[[], None]] = {
    "client": client.cli.main,
    "node": node.cli.main,
    "swarm": swarm.cli.main,
}


def parts() -> dict[str, Callable[[], str]]:
    """Functions that generate each part, by the part's name."""
    programs = {f"cli {name}": lambda name=name: commands(name) for name in _PROGRAMS}
    return {
        **programs,
        "messages": messages,
        "http-api": lambda: http_api(openapi()),
        "python": python_api,
        "errors": error_tree,
    }


def help_text(program: str, *command: str) -> str:
    """What `program command --help` prints on a terminal that knows ASCII alone, so without frames."""
    output = io.StringIO()
    environment = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    with (
        patch.object(sys, "argv", [program, *command, "--help"]),
        patch.dict(os.environ, environment),
        contextlib.redirect_stdout(output),
        contextlib.suppress(SystemExit),
    ):
        _PROGRAMS[program]()
    return "\n".join(line.rstrip() for line in output.getvalue().strip().splitlines())


def commands(program: str) -> str:
    """A program's help, then the help of each of its commands under a heading."""
    first = help_text(program)
    names = _COMMAND.findall(first)
    if not names:
        raise ValueError(f"{program} --help lists no command; its output:\n{first}")
    sections = [f"## `{program} {name}`\n\n{_fenced(help_text(program, name))}" for name in names]
    return "\n\n".join([_fenced(first), *sections])


def messages() -> str:
    """A table of the fields of each message of a session that is declared, and of what stands in it."""
    kinds = dict.fromkeys(kind for form in wire.FORMS for kind in _parts_of(form.kind))
    return "\n\n".join(section for kind in kinds for section in _fields(kind))


def _parts_of(kind: Any) -> Iterator[type]:  # noqa: ANN401
    yield kind
    for fact in facts(kind):
        for hint in (fact.hint, *(bare(arg)[0] for arg in get_args(fact.hint))):
            if is_dataclass(hint):
                yield from _parts_of(hint)


def _fields(kind: type) -> Iterator[str]:
    yield f"### {kind.__name__}"
    yield (inspect.getdoc(kind) or "").partition("\n\n")[0]
    rows = [
        f"| `{name}` | {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |" for name, *cells in table(kind)
    ]
    yield "\n".join(["| field | type | bounds | meaning |", "|---|---|---|---|", *rows])


def openapi() -> dict[str, Any]:
    """The health service's own description of its API, without a service."""

    async def no_points(model: str, window: str) -> dict[str, Any]:
        raise KeyError(model, window)

    app = make_app(StatePublisher(), no_points)
    app.include_router(alert_routes(cast("Any", None)))  # routes are described, never called
    return app.openapi()


def http_api(description: dict[str, Any]) -> str:
    """Every path of an OpenAPI description, with its parameters."""
    return "\n\n".join(
        section for path, methods in sorted(description["paths"].items()) for section in _path(path, methods["get"])
    )


def _path(path: str, method: dict[str, Any]) -> Iterator[str]:
    yield f"### `GET {path}`"
    yield f"{method['summary']}. {method.get('description', '')}".strip()
    rows = [_parameter(one) for one in method.get("parameters", ())]
    if rows:
        yield "\n".join(["| parameter | in | default | values | meaning |", "|---|---|---|---|---|", *rows])


def _parameter(one: dict[str, Any]) -> str:
    choices = [one["schema"], *one["schema"].get("anyOf", ())]
    values = next((f"at most {choice['maxLength']} characters" for choice in choices if "maxLength" in choice), "text")
    for choice in choices:
        if "enum" in choice:
            values = ", ".join(f"`{value}`" for value in choice["enum"])
        if "pattern" in choice:
            values = f"`{choice['pattern']}`"
    default = one["schema"].get("default")
    needed = "required" if one.get("required") else "none" if default is None else f"`{default}`"
    return f"| `{one['name']}` | {one['in']} | {needed} | {values} | {one.get('description', '')} |"


def python_api() -> str:
    """A directive of mkdocstrings for every name that `client` exports, but for the error that `error_tree` shows."""
    others = [name for name in client.__all__ if name not in {*_MAIN_CLASSES, SwarmError.__name__}]
    return "\n\n".join(f"::: client.{name}" for name in (*_MAIN_CLASSES, *others))


def error_tree() -> str:
    """The tree of errors as their module's docstring draws it, then a directive of mkdocstrings for each."""
    drawn = inspect.getdoc(errors) or ""
    names = [
        name for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    ]  # fmt: skip
    return "\n\n".join([_fenced(drawn.partition("\n\n")[2]), *(f"::: swarm.base.errors.{name}" for name in names)])


def _fenced(text: str) -> str:
    return f"```text\n{text}\n```"
