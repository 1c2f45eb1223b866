"""Signed records that claim what is not so: one of them is free, and everybody reads it."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.kit import RECORD_S
from benchmarks.redteam.sealing import filings_of, other_model
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import Filing
from swarm.directory.node_record import NodeRecord, NodeState, open_sealed, seal, tombstone
from swarm.directory.registry import RECORD_TTL_S, record_keys
from swarm.protocol.limits import MAX_LAYERS
from swarm.protocol.messages import RouteHop

NOWHERE = "127.0.0.1:9"
STATUS_S = 25.0
LONGEST_S = 80.0
"""A record may be valid for 90 s."""
AGAIN_S = 15.0
MEMBERS = 12
"""Memberships of a flood: each is a process of libp2p."""


async def publish(fight: Fight, span: str, address: str = NOWHERE, count: int = 1, **claims: object) -> None:
    """List such machines under identities of one's own until the attack is stopped; then take them back."""
    everybody = await prepared(fight, count)
    await fight.go()
    records: list[tuple[NodeRecord, Identity]] = []
    try:
        while True:
            keep = {"expires_at": time.time() + RECORD_S}
            records = [
                (fight.kit.record(who, Span.parse(span), address, **{**keep, **claims}), who) for who in everybody
            ]
            taken = await asyncio.gather(*(fight.kit.announce(*one) for one in records))
            fight.note(f"{sum(taken)} of {count} were listed")
            await asyncio.sleep(AGAIN_S)
    finally:
        with suppress(Exception):
            async with asyncio.timeout(8.0):
                for record, who in records[:64]:
                    await fight.kit.announce(tombstone(record), who)


async def prepared(fight: Fight, count: int) -> list[Identity]:
    """So many identities that have joined the directory."""
    everybody = await asyncio.to_thread(fight.kit.identities, count)
    await fight.kit.join(*everybody)
    return everybody


@attack("infinite-speed", Kind.RECORDS, stains=True)
async def infinite_speed(fight: Fight) -> None:
    """One record whose speeds are ±1e308 ms, so that routes cost no number."""
    await publish(fight, "0-12", sweep_ms=((0, -1e308), (1, 1e308), (16, -1e308), (17, 1e308)))


@attack("negative-speed", Kind.RECORDS, stains=True)
async def negative_speed(fight: Fight) -> None:
    """Four records of speeds below zero, of zero and in odd orders, with nobody behind them."""
    await publish(fight, "0-12", count=4, sweep_ms=((64, -5.0), (1, -1.0), (1, 0.0)))


@attack("dead-quick", Kind.RECORDS)
async def dead_quick(fight: Fight) -> None:
    """Sixteen records of idle, quick machines that nobody can reach."""
    await publish(fight, "0-12", count=16, sweep_ms=((1, 0.01), (64, 0.02)))


@attack("other-weights", Kind.RECORDS, stains=True)
async def other_weights(fight: Fight) -> None:
    """One record of a model with the honest name, config and tokenizer, and other weights."""
    model = other_model(fight.ground.model, weights_digest=secrets.token_hex(32))
    await publish(fight, "0-12", model=model)


@attack("more-layers", Kind.RECORDS, stains=True)
async def more_layers(fight: Fight) -> None:
    """One record with the honest fingerprint and 13 layers."""
    await publish(fight, "0-13", model=replace(fight.ground.model, num_layers=13))


@attack("other-config", Kind.RECORDS, stains=True)
async def other_config(fight: Fight) -> None:
    """One record with the honest fingerprint and another config's digest."""
    await publish(fight, "0-12", model=replace(fight.ground.model, config_digest="2" * 64))


@attack("fifty-models", Kind.RECORDS, stains=True)
async def fifty_models(fight: Fight) -> None:
    """Fifty records of models that are called as the honest one, each with other digests."""
    everybody = await prepared(fight, 50)
    await fight.go()

    def made(who: Identity) -> NodeRecord:
        model = other_model(
            fight.ground.model, config_digest=secrets.token_hex(32), weights_digest=secrets.token_hex(32)
        )
        return fight.kit.record(who, Span(0, 12), NOWHERE, model=model)

    taken = await asyncio.gather(*(fight.kit.announce(made(who), who) for who in everybody))
    fight.note(f"{sum(taken)} of {len(taken)} were listed")
    await fight.stay()


@attack("deep-model", Kind.RECORDS, stains=True, lasts_s=STATUS_S)
async def deep_model(fight: Fight) -> None:
    """Sixteen records of the deepest model that may be; `swarm status` must still show the honest one."""
    model = other_model(fight.ground.model, name="deep", num_layers=MAX_LAYERS)
    showing = asyncio.create_subprocess_exec
    task = publish(fight, f"0-{MAX_LAYERS}", count=16, model=model)

    async def look() -> None:
        await fight.started.wait()
        await asyncio.sleep(4.0)
        await check_status(fight, showing)

    fight.kit.scope.spawn(look())
    await task


async def check_status(fight: Fight, run: object = asyncio.create_subprocess_exec) -> None:
    """Run `swarm status`: it must show the honest model, and nothing that steers a terminal or a shell."""
    assert callable(run)
    command = (sys.executable, "-m", "swarm.cli", "status", "--join", fight.ground.join)
    process = await run(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    try:
        async with asyncio.timeout(STATUS_S):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        fight.breach("`swarm status` does not answer")
        return
    if fight.ground.model.name.encode() not in out or process.returncode:
        fight.breach(f"`swarm status` shows no honest model: {out[-120:].decode(errors='replace')!r}")
    if b"\x1b" in out:
        fight.breach("`swarm status` writes a stranger's escapes")
    for line in out.decode(errors="replace").splitlines():
        if "node serve" in line and " --mqtt" in line and "'--mqtt" not in line:
            fight.breach("`swarm status` offers a line whose option a stranger chose")


@attack("option-name", Kind.RECORDS, stains=True, lasts_s=16.0)
async def option_name(fight: Fight) -> None:
    """A record of a model that is called as an option of the line which `swarm status` offers to copy."""
    model = other_model(fight.ground.model, name="--mqtt=mqtt://evil.example", num_layers=20)

    async def look() -> None:
        await fight.started.wait()
        await asyncio.sleep(3.0)
        await check_status(fight)

    fight.kit.scope.spawn(look())
    await publish(fight, "0-10", model=model)


@attack("scanner", Kind.RECORDS)
async def scanner(fight: Fight) -> None:
    """Records that name other addresses of a node's network, which it dials; what it tells of them is a breach."""
    held: list[asyncio.StreamWriter] = []

    def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        writer.write(b"SSH-2.0-x\r\n")

    silent = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    speaking = await asyncio.start_server(speak, "127.0.0.1", 0)
    ports = [server.sockets[0].getsockname()[1] for server in (silent, speaking)]
    addresses = [f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", "127.0.0.1:9", "no-such-host.invalid:80"]
    identities = await asyncio.to_thread(fight.kit.identities, len(addresses))
    span = fight.ground.nodes[1].span
    await fight.go()
    told = set()
    for who, address in zip(identities, addresses, strict=True):
        sealed = seal(fight.kit.record(who, span, address), who)
        attach = fight.kit.attach()
        link, is_ready = await fight.kit.session(attach)
        if not is_ready:
            continue
        with suppress(Exception):
            route = (fight.kit.route[0], RouteHop(who.peer_id, span))
            await link.send(fight.kit.reroute(attach, 1, route, sealed))
            async with asyncio.timeout(6.0):
                while (answer := await link.read()) is not None:
                    reason = getattr(answer, "reason", None)
                    if reason is not None:
                        told.add(reason.replace(address, "ADDRESS"))
                        break
    if len(told) > 1:
        fight.breach(f"a node tells what answers at addresses of its network: {sorted(told)[0][:60]!r} and others")
    silent.close()
    speaking.close()
    for writer in held:
        writer.transport.abort()
    await fight.stay()


@attack("successor-flood", Kind.RECORDS)
async def successor_flood(fight: Fight) -> None:
    """60 Reroutes a second to machines with signed records, each at another address, which a node dials one by one."""
    identities = await asyncio.to_thread(fight.kit.identities, 400)
    span = fight.ground.nodes[1].span
    await fight.go()
    connection = await fight.kit.connection(fight.ground.nodes[0])
    link, attach = None, fight.kit.attach()
    async for number in fight.pace(60.0):
        who = identities[number % len(identities)]
        try:
            if link is None:
                link, attach = fight.kit.link_over(connection), fight.kit.attach()
                await link.send(attach)
                fight.kit.scope.spawn(link.listen())
            record = fight.kit.record(who, span, f"127.{number % 200 + 20}.{number // 200 % 250}.1:9")
            route = (fight.kit.route[0], RouteHop(who.peer_id, span))
            await link.send(fight.kit.reroute(attach, number + 1, route, seal(record, who)))
            fight.tally.acts += 1
        except Exception:  # noqa: BLE001 (the stream was ended: begin another)
            fight.tally.refused += 1
            link = None


# Clocks


@attack("far-future", Kind.CLOCKS)
async def far_future(fight: Fight) -> None:
    """Records that run out in five minutes, in a year and at the end of time; one that is stored is a breach."""
    everybody = await prepared(fight, 3)
    await fight.go()
    for who, ahead in zip(everybody, (280.0, 3.2e7, 1e17), strict=True):
        record = fight.kit.record(who, Span(0, 12), NOWHERE, expires_at=time.time() + ahead)
        if any(await fight.kit.file(who, filings_of(record, who)[0], record.expires_at)):
            fight.breach(f"a record that runs out in {ahead:.0f} s was stored")
    await fight.stay()


@attack("sequence-leap", Kind.CLOCKS)
async def sequence_leap(fight: Fight) -> None:
    """One's own records whose sequences leap to 2^62 and back, twice a second."""
    [who] = await prepared(fight, 1)
    await fight.go()
    async for number in fight.pace(2.0):
        sequence = (1 << 62) - number if number % 2 else number
        record = fight.kit.record(who, Span(0, 12), NOWHERE, sequence=sequence, expires_at=time.time() + RECORD_S)
        await fight.kit.announce(record, who)


@attack("replayed-records", Kind.CLOCKS)
async def replayed_records(fight: Fight) -> None:
    """The honest nodes' own records, filed again and again, also under other names and for longer."""
    [who] = await prepared(fight, 1)
    await fight.go()
    async for _ in fight.pace(4.0):
        for sealed in fight.sealed:
            record = open_sealed(sealed, time.time())
            keys = record_keys(record)
            own, others = ([Filing(key, name, sealed) for key in keys] for name in (record.peer, who.peer_id))
            taken = [
                *await fight.kit.file(who, own, time.time() + RECORD_TTL_S),
                *await fight.kit.file(who, [*own, *others], record.expires_at),
            ]
            if any(taken):
                fight.breach("an honest record was taken from somebody who did not sign it")


@attack("wrong-clock", Kind.CLOCKS)
async def wrong_clock(fight: Fight) -> None:
    """Machines whose clocks are two days ahead and two days behind list themselves."""
    everybody = await prepared(fight, 2)
    await fight.go()
    async for _ in fight.pace(1.0):
        for who, days in zip(everybody, (2, -2), strict=True):
            record = fight.kit.record(who, Span(0, 12), NOWHERE, expires_at=time.time() + days * 86_400 + RECORD_S)
            if any(await fight.kit.file(who, filings_of(record, who)[0], record.expires_at)):
                fight.breach("a record of another day was stored")


# Many at once


async def pour(fight: Fight, count: int, make: Callable[[int, Identity], Sequence[NodeRecord]]) -> None:
    """List machines of so many identities, of which the first few have joined; one of these brings the others' items.

    Only what its signer brings may be taken.
    """
    everybody = await asyncio.to_thread(fight.kit.identities, count)
    members, others = everybody[:MEMBERS], everybody[MEMBERS:]
    await fight.kit.join(*members)
    await fight.go()

    async def list_all(number: int, who: Identity) -> list[bool]:
        taken = []
        for record in make(number, who):
            filings, _ = await asyncio.to_thread(filings_of, record, who)
            taken += await fight.kit.file(who if who in members else members[0], filings, record.expires_at)
        return taken

    try:
        own = await asyncio.gather(*(list_all(number, who) for number, who in enumerate(members)))
        held = [one for taken in own for one in taken]
        fight.note(f"{sum(held)} of {len(held)} items of {len(members)} members were taken")
        for number, who in enumerate(others, len(members)):
            if any(await list_all(number, who)):
                fight.breach("an item was taken from somebody who did not sign it")
            fight.tally.acts += 1
        await fight.stay()
    finally:
        fight.note(f"{fight.tally.refused} calls were refused")


@attack("models-flood", Kind.DIRECTORY, stains=True, lasts_s=30.0)
async def models_flood(fight: Fight) -> None:
    """Twelve members list nine models each, and bring those of 300 more who have not joined."""

    def make(number: int, who: Identity) -> list[NodeRecord]:
        names = tuple((fight.ground.nodes[0].peer, 1.0) for _ in range(16))
        claims = {"delays_ms": names, "expires_at": time.time() + LONGEST_S}
        models = [other_model(fight.ground.model, name="x" * 90 + f"{number}-{place}") for place in range(9)]
        # The directory holds one record of a peer, the one that expires last, and a pointer for each model.
        return [
            fight.kit.record(who, Span(0, 12), NOWHERE, model=model, sequence=place + 1, **later(claims, place))
            for place, model in enumerate(models[: 9 if number < MEMBERS else 1])
        ]

    await pour(fight, MEMBERS + 300, make)


def later(claims: dict[str, Any], place: int) -> dict[str, Any]:
    """The same claims, valid for a moment longer than the one before."""
    return claims | {"expires_at": claims["expires_at"] + 0.01 * place}


@attack("keys-flood", Kind.DIRECTORY, stains=True, lasts_s=40.0)
async def keys_flood(fight: Fight) -> None:
    """Twelve members list two of the deepest models each, under 66 keys each, so that honest records are pushed out."""

    def make(number: int, who: Identity) -> list[NodeRecord]:
        keep, records = {"expires_at": time.time() + LONGEST_S}, []
        for place in range(3):
            model = other_model(fight.ground.model, name="wide", num_layers=MAX_LAYERS)
            records.append(
                fight.kit.record(
                    who, Span(0, MAX_LAYERS), NOWHERE, model=model, sequence=place + 1, **later(keep, place)
                )
            )
        return records

    await pour(fight, MEMBERS, make)


@attack("identities-flood", Kind.DIRECTORY, stains=True, lasts_s=20.0)
async def identities_flood(fight: Fight) -> None:
    """600 identities, of whom twelve have joined, list quick machines of the honest model where nobody is."""

    def make(number: int, who: Identity) -> list[NodeRecord]:
        address = f"127.0.0.1:{20_000 + number}"
        return [fight.kit.record(who, Span(0, 12), address, expires_at=time.time() + LONGEST_S)]

    await pour(fight, 600, make)


@attack("joining-flood", Kind.DIRECTORY, stains=True)
async def joining_flood(fight: Fight) -> None:
    """Twelve members announce and withdraw machines of the honest model, over and over."""
    everybody = await prepared(fight, MEMBERS)
    await fight.go()
    async for number in fight.pace(10.0):
        who = everybody[number % MEMBERS]
        state = NodeState.JOINING if number % 2 else NodeState.SERVING
        keep = time.time() + RECORD_S
        record = fight.kit.record(who, Span(0, 12), NOWHERE, state=state, sequence=number + 1, expires_at=keep)
        await fight.kit.announce(replace(record, left=number % 3 == 0), who)
