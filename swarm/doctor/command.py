"""The command `doctor`: the ladder with this machine's own probes, and the exit status."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm.base.errors import ConfigError, SwarmError
from swarm.base.version import VERSION
from swarm.directory.dht.addresses import PeerSource, check_join_address
from swarm.directory.identity import default_identity_path
from swarm.directory.joining.invite import is_invite
from swarm.directory.joining.remembered import SwarmMemory
from swarm.directory.joining.resolve import SwarmFinder, with_swarm
from swarm.doctor.directory import own_peer
from swarm.doctor.ladder import Diagnosis, Level, climb, first_cause
from swarm.doctor.network import NamedPeer
from swarm.doctor.options import Doctor
from swarm.doctor.redaction import PrivateWords, private_words, redact
from swarm.doctor.rungs import RUNGS, DoctorProbes, Examination


async def doctor(
    options: Doctor, console: Console, environment: Mapping[str, str] = os.environ, probes: DoctorProbes | None = None
) -> int:
    """Look at everything and print it; 1 where something is in the way, else 0."""
    began = time.monotonic()
    memory = SwarmMemory.of_user()
    found_options, refusal = meant(options, environment, memory)
    peers = named_peers(found_options)
    examination = Examination(found_options, environment, peers, refusal, probes)
    is_silent = options.json or not console.is_terminal
    with nullcontext() if is_silent else console.status("looking") as status:

        def on_progress(done: int) -> None:
            if status is not None:
                status.update(f"looking: {done} of {len(RUNGS)}")

        found = await climb(RUNGS, examination, on_progress=on_progress)
    shown = redacted(found, private_of(found_options, peers, environment))
    if options.json:
        console.print(as_json(shown, time.monotonic() - began), soft_wrap=True)
    else:
        show(shown, console, verbose=options.verbose)
    return int(first_cause(found) is not None)


def meant(options: Doctor, environment: Mapping[str, str], memory: SwarmMemory) -> tuple[Doctor, str]:
    """The options with the swarm that is meant by them, by variables or by memory, which nothing changes here.

    Where that is not clear they name none, and the reason is returned with them.
    """
    own = own_peer(default_identity_path())
    finder = SwarmFinder(memory, environment, () if own is None else (own,), is_look=True)
    try:
        found, _ = with_swarm(options, finder)
    except SwarmError as error:
        model = None if options.model is not None and is_invite(options.model) else options.model
        return replace(options, join=(), model=model), str(error)
    membership = replace(found.membership, note_peers=None, note_model=None, nobody="")
    return replace(found, membership=membership), ""


def named_peers(found: Doctor) -> list[NamedPeer]:
    """The peers of the swarm that is meant, each with who named it."""
    texts = [found.membership.sources.get(one, PeerSource()).text for one in found.join]
    counts = [f" ({texts[:place].count(text) + 1} of {texts.count(text)})" for place, text in enumerate(texts)]
    return [
        _named(address, f"the peer {text}{count if texts.count(text) > 1 else ''}")
        for address, text, count in zip(found.join, texts, counts, strict=True)
    ]


def _named(address: str, origin: str) -> NamedPeer:
    try:
        check_join_address(address)
    except ConfigError:
        return NamedPeer(address, origin)
    _, _, host, transport, port, *rest = address.split("/")
    return NamedPeer(address, origin, host, int(port) if transport == "tcp" else 0, "tls" in rest)


def private_of(options: Doctor, peers: list[NamedPeer], environment: Mapping[str, str]) -> PrivateWords:
    """What must not be shown of this machine and these options."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no such user, as in a container
        user = ""
    hosts = [peer.host for peer in peers]
    urls = (options.mqtt or "", environment.get("HF_ENDPOINT", ""))
    return private_words(environment, str(Path.home()), {user, platform.node()}, [*hosts, *urls])


def run_doctor(options: Doctor, console: Console) -> int:
    """`doctor`, for a command line; threads that still wait for an answer do not hold up the end."""
    status = asyncio.run(doctor(options, console))
    sys.stdout.flush()
    return status


SCHEMA: Final = 2
_STYLES: Final[Mapping[Level, str]] = {
    Level.OK: "green",
    Level.HINT: "yellow",
    Level.NOT_KNOWN: "dim",
    Level.NOT_ASKED: "dim",
    Level.TROUBLE: "bold red",
}


def redacted(found: Sequence[Diagnosis], private: PrivateWords) -> list[Diagnosis]:
    """The findings without what is private."""
    return [replace(one, text=redact(one.text, private), mend=redact(one.mend, private)) for one in found]


def show(found: Sequence[Diagnosis], console: Console, *, verbose: bool) -> None:
    """Print lines: on a terminal each with its mend below, elsewhere each on one line with its mend behind an arrow."""
    quiet = set() if verbose else {Level.OK, Level.NOT_ASKED}
    shown = [one for one in found if one.level not in quiet]
    if console.is_terminal:
        _show_table(shown, console)
    else:
        for one in shown:
            console.print(Text(f"{one.level.value:<9} {one.rung:<10} {one.text}{one.mend and f' → {one.mend}'}"))
    if not verbose:
        idle: dict[str, list[str]] = {}
        for one in found:
            if one.level is Level.NOT_ASKED:
                idle.setdefault(one.text, []).append(one.rung)
        for why, rungs in idle.items():
            console.print(Text(f"not asked, {why}: {', '.join(rungs)}"), soft_wrap=False)
        if well := list(dict.fromkeys(one.rung for one in found if one.level is Level.OK)):
            console.print(Text(f"well: {', '.join(well)}"), soft_wrap=False)
    console.print(Text(_summary(found)), soft_wrap=False)


def _show_table(shown: Sequence[Diagnosis], console: Console) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in shown:
        said = Text.assemble(one.text, "\n→ ", (one.mend, "bold")) if one.mend else Text(one.text)
        table.add_row(Text(one.level.value, _STYLES[one.level]), Text(one.rung), said)
    if shown:
        console.print(table, soft_wrap=False)


def _summary(found: Sequence[Diagnosis]) -> str:
    cause = first_cause(found)
    said = [
        f"{number} {level.value if number == 1 else f'{level.value}s'}"
        for level in (Level.TROUBLE, Level.HINT)
        if (number := sum(one.level is level for one in found))
    ]
    said += [f"{number} not known"] if (number := sum(one.level is Level.NOT_KNOWN for one in found)) else []
    if cause is None:
        return "; ".join(["nothing is in the way", *([", ".join(said)] if said else [])])
    counts = f"{', '.join(said)}; this output can be pasted into an issue as it is"
    return f"first cause: {cause.rung}: {cause.text}\n{counts}"


def as_json(found: Sequence[Diagnosis], took_s: float) -> str:
    """The same for programs, as docs/reference/doctor.md describes it."""
    cause = first_cause(found)
    report: dict[str, Any] = {
        "v": SCHEMA,
        "version": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "took_s": round(took_s, 1),
        "troubles": sum(one.level is Level.TROUBLE for one in found),
        "hints": sum(one.level is Level.HINT for one in found),
        "first_cause": None if cause is None else _said(cause),
        "findings": list(map(_said, found)),
    }
    return json.dumps(report, indent=2)


def _said(one: Diagnosis) -> dict[str, str]:
    return {"check": one.rung, "level": one.level.value, "kind": one.kind, "text": one.text, "mend": one.mend}
