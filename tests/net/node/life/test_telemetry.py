"""A node's words over MQTT: to a real broker, over a wire that breaks, to brokers that are down, mute or mad."""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import node.life.startup
from node.life.publisher import MAX_EVENTS, Address, Outbox, PublishIntervals, TelemetryPublisher
from swarm.base.layers import Span
from swarm.demo import DRAFT, TARGET
from swarm.link.broker_address import parse_broker
from swarm.status.messages import Event, EventKind, MessageKind, Metrics, Presence, Receipts, Stamp, Status, Will
from tests.in_process_swarm import in_process_swarm
from tests.net.brokers import (
    CONNACK,
    TelemetryListener,
    cuttable_link,
    free_port,
    listener_at,
    mosquitto,
    scripted_broker,
)
from tests.telemetry_messages import FINGERPRINT, identity, metrics, status

needs_mosquitto = pytest.mark.needs_program("mosquitto", "mosquitto")
QUICK = PublishIntervals(
    metrics_s=0.05, status_s=30.0, answer_s=0.5, first_wait_s=0.02, longest_wait_s=0.05, leave_s=1.0, jitter=lambda: 0.5
)


@dataclass
class Speaker:
    """A reporter, and what the publisher told its owner."""

    state: Presence = Presence.SERVING
    lines: list[str] = field(default_factory=list)
    outbox: Outbox = field(default_factory=Outbox)
    waiting: list[bytes] = field(default_factory=list)
    _said: asyncio.Event = field(default_factory=asyncio.Event)

    def status(self, stamp: Stamp, *, is_birth: bool, leaving: bool) -> Status:
        state = Presence.LEFT if leaving else self.state
        return status(stamp.at, stamp.seq, stamp.nonce, is_birth=is_birth, state=state)

    def metrics(self, stamp: Stamp) -> Metrics:
        return metrics(stamp.at, stamp.seq, stamp.nonce)

    def receipts(self, stamp: Stamp, *, is_first: bool) -> Receipts | None:
        return Receipts(stamp, tuple(self.waiting[:2])) if self.waiting else None

    def published(self, receipts: Receipts) -> None:
        self.waiting = [one for one in self.waiting if one not in receipts.receipts]

    def say(self, line: str) -> None:
        self.lines.append(line)
        self._said.set()

    async def until_said(self, part: str) -> None:
        async with asyncio.timeout(10):
            while not any(part in line for line in self.lines):
                self._said.clear()
                await self._said.wait()


def publisher(speaker: Speaker, url: str, pace: PublishIntervals = QUICK, ca: Path | None = None) -> TelemetryPublisher:
    address = Address(parse_broker(url, ca), "canopy", FINGERPRINT, identity(0))
    return TelemetryPublisher(address, speaker, speaker.outbox, speaker.say, pace)


def born(body: object) -> bool:
    return isinstance(body, Status) and body.is_birth


def is_left(span: Span, body: object) -> bool:
    return isinstance(body, Status) and body.span == span and body.state is Presence.LEFT


@needs_mosquitto
async def test_a_node_is_born_speaks_and_leaves(tmp_path: Path) -> None:
    port, speaker = free_port(), Speaker(Presence.JOINING)
    with mosquitto(tmp_path, port):
        async with listener_at(port) as listener:
            async with publisher(speaker, f"mqtt://127.0.0.1:{port}"):
                await listener.until(born)
                speaker.state = Presence.SERVING
                speaker.outbox.request(MessageKind.STATUS)
                speaker.outbox.add_event(EventKind.JOINED, "serves layers 0…3 of 12")
                await listener.until(lambda body: isinstance(body, Status) and body.state is Presence.SERVING)
                await listener.until(lambda body: isinstance(body, Event))
                await listener.until(lambda body: isinstance(body, Metrics) and body.stamp.seq > 4)
                speaker.outbox.add_event(EventKind.LEFT, "left the swarm")
            await listener.until(lambda body: isinstance(body, Status) and body.state is Presence.LEFT)
            assert listener.rejected == []
            assert not any(isinstance(body, Will) for body in listener.accepted)
            assert {(message.topic.value.rsplit("/", 1)[1], message.qos) for message in listener.raw} == {
                ("status", 1),
                ("metrics", 0),
                ("events", 1),
            }
        async with listener_at(port) as late:
            left = await late.until(lambda body: isinstance(body, Status))
            assert isinstance(left, Status)
            assert left.state is Presence.LEFT, "a status is kept for who comes later, and nothing else is"
        assert [message.retain for message in late.raw] == [True]
    assert speaker.lines == [f"telemetry goes to mqtt://127.0.0.1:{port}"]


@needs_mosquitto
async def test_when_the_connection_breaks_the_will_comes_and_then_a_new_birth(tmp_path: Path) -> None:
    port, speaker = free_port(), Speaker()
    with mosquitto(tmp_path, port):
        async with (
            listener_at(port) as listener,
            cuttable_link(port) as wire,
            publisher(speaker, f"mqtt://127.0.0.1:{wire.port}"),
        ):
            first = await listener.until(born)
            began = time.monotonic()
            wire.cut()
            will = await listener.until(lambda body: isinstance(body, Will))
            assert time.monotonic() - began < 2
            assert will.stamp.nonce == first.stamp.nonce
            again = await listener.until(lambda body: born(body) and body.stamp.nonce != first.stamp.nonce)
            assert again.stamp.at > first.stamp.at
            await speaker.until_said("again")
    assert ["goes to" in line for line in speaker.lines] == [True, False, True]


@needs_mosquitto
async def test_a_broker_that_is_down_is_told_once_and_found_when_it_comes_back(tmp_path: Path) -> None:
    port, speaker = free_port(), Speaker()
    with mosquitto(tmp_path, port):
        url = "mqtt://127.0.0.1"
        async with (
            listener_at(port) as listener,
            cuttable_link(port, shut=True) as wire,
            publisher(speaker, f"{url}:{wire.port}"),
        ):
            await speaker.until_said("no telemetry")
            for number in range(1_000):
                speaker.outbox.add_event(EventKind.ERROR, f"number {number}")
            wire.shut = False
            await listener.until(lambda body: isinstance(body, Event) and body.text == "number 999")
    told = [body.text for body in listener.accepted if isinstance(body, Event)]
    assert told == [f"number {number}" for number in range(1_000 - MAX_EVENTS, 1_000)]
    assert ["no telemetry" in line for line in speaker.lines] == [True, False]


@needs_mosquitto
async def test_receipts_wait_for_a_broker_that_is_down_and_leave_with_the_node(tmp_path: Path) -> None:
    port, speaker = free_port(), Speaker()
    sealed = [f"receipt {number}".encode() for number in range(5)]
    speaker.waiting = sealed[:4]
    with mosquitto(tmp_path, port):
        async with listener_at(port) as listener, cuttable_link(port, shut=True) as wire:
            async with publisher(speaker, f"mqtt://127.0.0.1:{wire.port}"):
                await speaker.until_said("no telemetry")
                wire.shut = False
                await listener.until(lambda body: isinstance(body, Receipts) and sealed[3] in body.receipts)
                speaker.waiting.append(sealed[4])
            await listener.until(lambda body: isinstance(body, Status) and body.state is Presence.LEFT)
    assert [body.receipts for body in listener.accepted if isinstance(body, Receipts)] == [
        tuple(sealed[:2]),
        tuple(sealed[2:4]),
        tuple(sealed[4:]),
    ]
    assert {(message.qos, message.retain) for message in listener.raw if message.topic.value.endswith("receipts")} == {
        (1, False)
    }


BABBLE = b"\x30\x0a\x00\x04junkdata" * 500


@pytest.mark.parametrize(
    "answers",
    [
        (),
        (b"\x20\x02\x00\x05",),
        (CONNACK,),
        (CONNACK, b"\x40\x02\xff\xff"),
        (CONNACK + BABBLE, BABBLE),
        (b"\xff" * 400,),
        (b"\x20\x00",),
        (CONNACK, b"\x40\x00"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n",),
        (CONNACK + b"\x30\xff\xff\xff\x7f" + bytes(100_000),),
    ],
    ids=["mute", "refuses", "no PUBACK", "foreign PUBACK", "babbles", "noise", "short", "shorter", "HTTP", "huge"],
)
async def test_whatever_a_broker_does_the_node_goes_on(answers: tuple[bytes, ...]) -> None:
    speaker = Speaker()
    pace = replace(QUICK, answer_s=0.15, leave_s=0.1)
    async with scripted_broker(*answers) as broker:
        began = time.monotonic()
        async with publisher(speaker, f"mqtt://127.0.0.1:{broker.port}", pace):
            assert time.monotonic() - began < 0.1, "nobody waits for a broker"
            await speaker.until_said("no telemetry")
            await broker.until_visits(3)
        assert len(speaker.lines) == 1, "one outage, one line"


async def test_a_broker_that_talks_to_a_node_is_left_alone() -> None:
    speaker, talk = Speaker(), b"\x30\x06\x00\x03a/bx" * 50
    answers, host = (CONNACK, b"\x40\x02\x00\x01" + talk), "mqtt://127.0.0.1"
    async with scripted_broker(*answers) as broker, publisher(speaker, f"{host}:{broker.port}"):
        await speaker.until_said("subscribed to none")
        await broker.until_visits(2)


async def test_a_node_leaves_a_mute_broker_in_time() -> None:
    speaker = Speaker()
    pace = PublishIntervals(leave_s=0.1)
    async with scripted_broker() as broker:
        async with publisher(speaker, f"mqtt://127.0.0.1:{broker.port}", pace):
            await broker.until_visits(1)
            began = time.monotonic()
        assert time.monotonic() - began < 1


def secrets_in(folder: Path) -> None:
    """A password, a key, and its certificate for 127.0.0.1, which is its own authority."""
    subprocess.run(["mosquitto_passwd", "-b", "-c", "passwords", "me", "p@ss"], cwd=folder, check=True)
    (folder / "passwords").chmod(0o644)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / "key.pem").write_bytes(pem)


@needs_mosquitto
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")  # paho's, after a failed handshake
async def test_tls_and_a_password(tmp_path: Path) -> None:
    port, plain = free_port(), free_port()
    secrets_in(tmp_path)
    tls = [f"cafile {tmp_path}/cert.pem", f"certfile {tmp_path}/cert.pem", f"keyfile {tmp_path}/key.pem"]
    inside = [f"listener {plain} 127.0.0.1", "allow_anonymous true"]
    rules = [*tls, f"password_file {tmp_path}/passwords", "allow_anonymous false", *inside]
    with mosquitto(tmp_path, port, *rules):
        async with listener_at(plain) as listener:
            for url, ca, says in (
                (f"mqtts://me:p%40ss@127.0.0.1:{port}", tmp_path / "cert.pem", "goes to"),
                (f"mqtts://me:wrong@127.0.0.1:{port}", tmp_path / "cert.pem", "Not authorized"),
                (f"mqtts://me:p%40ss@127.0.0.1:{port}", None, "certificate"),
            ):
                speaker = Speaker()
                async with publisher(speaker, url, ca=ca):
                    await speaker.until_said(says)
                    if says == "goes to":
                        await listener.until(born)
                assert not any("p@ss" in line or "wrong" in line for line in speaker.lines)


@asynccontextmanager
async def spoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[TelemetryListener, str]]:
    """A broker and an ear for a whole node, which speaks quickly."""
    port = free_port()
    monkeypatch.setattr(
        node.life.startup,
        "TelemetryPublisher",
        partial(TelemetryPublisher, intervals=replace(QUICK, metrics_s=0.5)),
    )
    with mosquitto(tmp_path, port):
        async with listener_at(port) as listener:
            yield listener, f"mqtt://127.0.0.1:{port}"


@needs_mosquitto
async def test_whole_nodes_tell_what_they_do_and_nothing_of_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spoken(tmp_path, monkeypatch) as (listener, url):
        async with in_process_swarm(TARGET, ["0-6", "6-12"], mqtt=url, name=None) as here:
            async with here.client(draft=DRAFT) as swarm:
                await swarm.generate("It", max_new_tokens=6, nodes=4)
            for _ in here.nodes:
                await listener.until(lambda body: isinstance(body, Metrics) and body.tokens > 0 and body.sessions == 0)
            shown = [await listener.until(lambda body: isinstance(body, Receipts)) for _ in here.nodes]
            assert all(isinstance(body, Receipts) and body.receipts for body in shown)
            statuses = [body for body in listener.accepted if isinstance(body, Status)]
            assert {(body.span.start, body.state) for body in statuses} >= {
                (0, Presence.SERVING),
                (6, Presence.SERVING),
            }
        for span in (Span(0, 6), Span(6, 12)):
            await listener.until(partial(is_left, span))
        assert listener.rejected == []
        events = [body.event for body in listener.accepted if isinstance(body, Event)]
        assert sorted(events) == sorted([EventKind.JOINED, EventKind.DRAINING, EventKind.LEFT] * 2)
        last = [body for body in listener.accepted if isinstance(body, Metrics) and body.tokens]
        assert all(body.layer_tokens == 6 * body.tokens for body in last)
        assert all(body.bytes_in > 0 and body.bytes_out > 0 and body.compute_ms >= 0 for body in last)
        said = "".join(json.loads(str(message.payload, "utf-8"))["body"] for message in listener.raw)
        hidden = ["127.0.0.1", socket.gethostname(), str(TARGET), *(served.address for served in here.nodes)]
        assert not [word for word in hidden if word in said]
