"""The health page and its broker: idle readers, floods of requests and messages, and what signed telemetry claims."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiomqtt

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.attacks.connections import ENDED_SOCKET
from swarm.directory.identity import Identity
from swarm.status.messages import (
    MessageKind,
    Metrics,
    Presence,
    ServedModel,
    Stamp,
    Status,
    part_of,
    seal_body,
    topic_of,
)

DAY_S = 86_400.0
LOG_GROWTH = 1 << 20


def log_of(fight: Fight) -> Path:
    return Path(fight.ground.folder) / "health.log"


async def page_connections(fight: Fight, count: int, first: bytes) -> None:
    """So many connections to the page that say this and nothing more."""
    before = log_of(fight).stat().st_size
    await fight.go()
    try:
        async for _ in fight.pace(500.0, count):
            try:
                one = await fight.kit.socket(fight.ground.page)
                await one.send(first)
            except ENDED_SOCKET:
                fight.tally.refused += 1
        await fight.stay()
    finally:
        grown = log_of(fight).stat().st_size - before
        if grown > LOG_GROWTH:
            fight.breach(f"the page's log grew by {grown / 1e6:.0f} MB")


@attack("page-idle", Kind.HEALTH, lasts_s=15.0)
async def page_idle(fight: Fight) -> None:
    """1,100 connections to the page that say nothing."""
    await page_connections(fight, 1_100, b"")


@attack("page-half", Kind.HEALTH)
async def page_half(fight: Fight) -> None:
    """990 requests to the page of which half is sent."""
    await page_connections(fight, 990, b"GET / HTTP/1.1\r\nHost: a\r\n")


@attack("page-streams", Kind.HEALTH)
async def page_streams(fight: Fight) -> None:
    """400 readers of the page's live stream who never read."""
    await page_connections(fight, 400, b"GET /api/v1/stream HTTP/1.1\r\nHost: a\r\n\r\n")


@attack("page-dripped", Kind.HEALTH)
async def page_dripped(fight: Fight) -> None:
    """200 requests to the page at one byte per second."""
    await fight.go()
    opened = []
    for _ in range(200):
        with suppress(*ENDED_SOCKET):
            opened.append(await fight.kit.socket(fight.ground.page))
    head = b"GET /api/v1/state HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 4_000
    async for number in fight.pace(1.0):
        for one in opened:
            with suppress(*ENDED_SOCKET):
                await one.send(head[number : number + 1])


@attack("page-flood", Kind.HEALTH)
async def page_flood(fight: Fight) -> None:
    """80 requests a second for the page's state, history and badges."""
    await fight.go()
    paths = ["/api/v1/state", f"/api/v1/history?model={fight.ground.model.fingerprint}&window=30d", "/", "/nothing"]

    async def read(path: str) -> None:
        with suppress(*ENDED_SOCKET):
            one = await fight.kit.socket(fight.ground.page)
            await one.send(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
            await one.drop()

    async for number in fight.pace(80.0):
        fight.tally.acts += 1
        fight.kit.scope.spawn(read(paths[number % len(paths)]))


@asynccontextmanager
async def publisher(fight: Fight) -> AsyncIterator[aiomqtt.Client]:
    """A connection to the broker."""
    host, _, port = fight.ground.broker.rpartition(":")
    fight.tally.connections += 1
    async with aiomqtt.Client(host, int(port), bind_address=fight.kit.strangers[0], timeout=10.0) as client:
        yield client


async def publish(fight: Fight, messages: Iterable[tuple[str, bytes]], per_s: float, *, retained: bool = False) -> None:
    """Publish messages at a rate; connect anew where the broker ended the connection."""
    waiting = iter(messages)
    await fight.go()
    while True:
        with suppress(aiomqtt.MqttError, OSError):
            async with publisher(fight) as client:
                async for _ in fight.pace(per_s):
                    topic, payload = next(waiting)
                    fight.tally.sent_bytes += len(topic) + len(payload)
                    fight.tally.acts += 1
                    await client.publish(topic, payload, qos=0, retain=retained)
        fight.tally.refused += 1
        await asyncio.sleep(1.0)


NOBODY = "Qm" + "a" * 44
"""Looks like a peer id."""


def garbage(fight: Fight) -> Iterable[tuple[str, bytes]]:
    """Messages that mean nothing, under topics that look right."""
    model = fight.ground.model.fingerprint
    while True:
        yield topic_of("canopy", model, NOBODY, MessageKind.METRICS), secrets.token_bytes(300)


@attack("mqtt-garbage", Kind.HEALTH)
async def mqtt_garbage(fight: Fight) -> None:
    """1,000 messages a second to the broker that mean nothing."""
    await publish(fight, garbage(fight), 1_000.0)


@attack("mqtt-forged", Kind.HEALTH)
async def mqtt_forged(fight: Fight) -> None:
    """400 messages a second in the honest nodes' names, with signatures of somebody else."""
    who = Identity.ephemeral()
    payload = sealed(fight, who, metrics())[1]
    model, peer = fight.ground.model.fingerprint, fight.ground.nodes[0].peer
    forged = topic_of("canopy", model, peer, MessageKind.METRICS)

    def many() -> Iterable[tuple[str, bytes]]:
        while True:
            yield forged, payload

    await publish(fight, many(), 400.0)


@attack("mqtt-nested", Kind.HEALTH)
async def mqtt_nested(fight: Fight) -> None:
    """300 messages a second of JSON that is nested 4,000 deep."""
    topic = topic_of("canopy", fight.ground.model.fingerprint, fight.ground.nodes[0].peer, MessageKind.STATUS)
    deep = b"[" * 4_000 + b"]" * 4_000

    def many() -> Iterable[tuple[str, bytes]]:
        while True:
            yield topic, deep

    await publish(fight, many(), 300.0)


@attack("mqtt-retained", Kind.HEALTH)
async def mqtt_retained(fight: Fight) -> None:
    """500 retained messages a second of 4 KiB, each under a topic of its own."""

    def many() -> Iterable[tuple[str, bytes]]:
        number = 0
        while True:
            number += 1
            yield f"canopy/v1/{number:064x}/x/status", bytes(4_096)

    await publish(fight, many(), 500.0, retained=True)


@attack("mqtt-connections", Kind.HEALTH)
async def mqtt_connections(fight: Fight) -> None:
    """600 connections to the broker that say nothing."""
    await fight.go()
    async for _ in fight.pace(300.0, 600):
        try:
            await fight.kit.socket(fight.ground.broker)
        except ENDED_SOCKET:
            fight.tally.refused += 1
    await fight.stay()


@attack("mqtt-sybils", Kind.HEALTH)
async def mqtt_sybils(fight: Fight) -> None:
    """120 identities publish signed telemetry of the honest model, each of which claims all of its work."""
    identities = await asyncio.to_thread(fight.kit.identities, 120)
    say = [sealed(fight, who, body) for who in identities for body in (status(fight), metrics(tokens=1 << 50))]

    def many() -> Iterable[tuple[str, bytes]]:
        while True:
            yield from say

    await publish(fight, many(), 200.0)


@attack("telemetry-of-tomorrow", Kind.CLOCKS)
async def telemetry_of_tomorrow(fight: Fight) -> None:
    """Signed telemetry of a machine whose clock is 40 days ahead, and whose sequence leaps."""
    [who] = await asyncio.to_thread(fight.kit.identities, 1)

    def many() -> Iterable[tuple[str, bytes]]:
        number = 0
        while True:
            number += 1
            ahead = Stamp(secrets.token_hex(16), (1 << 52) + 2 * number, time.time() + 40 * DAY_S)
            yield sealed(fight, who, replace(status(fight), stamp=ahead))
            yield sealed(fight, who, replace(metrics(), stamp=replace(ahead, seq=ahead.seq + 1)))

    await publish(fight, many(), 20.0)


@attack("telemetry-of-no-number", Kind.HEALTH)
async def telemetry_of_no_number(fight: Fight) -> None:
    """Signed telemetry whose numbers are as large as JSON can write them."""
    [who] = await asyncio.to_thread(fight.kit.identities, 1)

    def many() -> Iterable[tuple[str, bytes]]:
        number = 0
        while True:
            number += 1
            for field in ("queue_ms", "compute_ms", "uptime_s", "tokens", "bytes_in"):
                yield by_hand(fight, who, {field: 10**300 if number % 2 else 1.7e308})

    await publish(fight, many(), 20.0)


def stamp() -> Stamp:
    """A message's place in a connection of its own."""
    return Stamp(secrets.token_hex(16), 1, time.time())


def status(fight: Fight) -> Status:
    """What a made-up machine is."""
    model = fight.ground.model
    served = ServedModel(model.name, model.fingerprint, model.num_layers)
    span, now = fight.ground.nodes[0].span, time.time()
    return Status(
        stamp(), True, served, span, Presence.SERVING, "cpu", fight.ground.numeric_class, "0.2.0", None, now, 1_000
    )


def metrics(tokens: int = 0) -> Metrics:
    """What a made-up machine has done."""
    return Metrics(
        stamp(), 1.0, tokens, tokens, tokens, tokens, tokens, tokens, 0, 1.0, 1.0, 1.0, 0, 1_000, 1, ((1, 1.0),)
    )


def sealed(fight: Fight, who: Identity, body: Status | Metrics) -> tuple[str, bytes]:
    topic = topic_of("canopy", fight.ground.model.fingerprint, who.peer_id, part_of(body))
    return topic, seal_body(body, topic, who)


def by_hand(fight: Fight, who: Identity, changes: dict[str, Any]) -> tuple[str, bytes]:
    """The same with fields that our own program would not sign."""
    from swarm.status import messages

    body = metrics()
    topic = topic_of("canopy", fight.ground.model.fingerprint, who.peer_id, part_of(body))
    written = {"kind": messages._kind(body), **messages._FORMS[type(body)].encode(body)}
    text = json.dumps({**written, **changes})
    signature = who.sign(messages._signed_bytes(topic.removeprefix("canopy/"), text))
    envelope = {"v": 1, "body": text, "key": _base64(who.public_key), "sig": _base64(signature)}
    return topic, json.dumps(envelope).encode()


def _base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()
