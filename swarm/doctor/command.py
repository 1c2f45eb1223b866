"""The command `doctor`: the ladder with this machine's own probes, and the exit status."""

from __future__ import annotations

import asyncio
import getpass
import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from swarm.discovery.dht.addresses import PeerSource, check_join_address
from swarm.discovery.identity import default_identity_path
from swarm.doctor.ladder import climb, first_cause
from swarm.doctor.network import NamedPeer
from swarm.doctor.options import Doctor
from swarm.doctor.redaction import PrivateWords, private_words
from swarm.doctor.report import as_json, redacted, show
from swarm.doctor.rungs import RUNGS, DoctorProbes, Examination
from swarm.doctor.swarm_view import own_peer
from swarm.errors import ConfigError, SwarmError
from swarm.joining.invite import is_invite
from swarm.joining.remembered import SwarmMemory
from swarm.joining.resolve import SwarmFinder, with_swarm


async def doctor(
    options: Doctor, console: Console, environment: Mapping[str, str] = os.environ, probes: DoctorProbes | None = None
) -> int:
    """Look at everything and print it.

    Args:
        options: of the command line.
        console: where to.
        environment: the process's variables.
        probes: how files, programs and machines are asked.

    Returns:
        The exit status: 1 where something is in the way, else 0.
    """
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
    """The options with the swarm that is meant by them, by variables or by memory; nothing is remembered here.

    Returns:
        The options, and why the swarm is not clear; then they name none.
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
