"""Webhooks: which URLs are taken, what is sent, what a receiver that fails, refuses, redirects or hangs does."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import tyro

from swarm.base.errors import ConfigError
from swarm.base.tasks import TaskScope
from swarm.health.alerts.rules import Alert, AlertTransition, Change, Finding, Severity
from swarm.health.alerts.webhook import MAX_WAITING, Webhook, WebhookTiming, message, parse_receiver, sign
from swarm.health.options import Health
from tests.telemetry_messages import FINGERPRINT, NOW

SECRET_PATH = "T0KEN-in-the-path"
PACE = WebhookTiming(answer_s=0.3, tries=3, first_wait_s=0.01, max_wait_s=0.02, pause_s=0.0, jitter=lambda: 0.5)


def change(
    text: str = "demo: gap", step: AlertTransition = AlertTransition.BEGAN, severity: Severity = Severity.CRITICAL
) -> Change:
    finding = Finding("gap", severity, FINGERPRINT, text, model="demo", fix="node serve demo --layers 4-8")
    return Change(Alert(finding, NOW), step, NOW + 3, severity)


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example/x",
        "http://localhost:9/x",
        "http://127.0.0.1/x",
        "http://[::1]:8000/",
        "http://192.168.1.7:8000/",
        "https://user:word@hooks.example/",
    ],
)
def test_urls_that_are_taken(url: str) -> None:
    receiver = parse_receiver(url, Severity.WARNING, "hush")
    assert "x" not in str(receiver).rpartition("/")[2].replace("example", "")
    assert "hush" not in repr(receiver)
    assert "word" not in repr(receiver) + str(receiver)


@pytest.mark.parametrize(
    "url", ["", "x", "ftp://h/x", "http://hooks.example/x", "http://8.8.8.8/x", "https://", "http://[bad/x", "\x00"]
)
def test_urls_that_are_not(url: str) -> None:
    with pytest.raises(ConfigError, match="--webhook") as refused:
        parse_receiver(f"{url}{SECRET_PATH}" if url.endswith("/x") else url, Severity.WARNING, None)
    assert SECRET_PATH not in str(refused.value)


def test_the_message_is_a_line_for_chats_and_values_for_programs() -> None:
    sent = message(change("<!channel> @here & <http://x|y>"), "canopy")
    assert sent["text"].startswith("🔴 &lt;!channel&gt; @\u200bhere &amp; &lt;http://x|y&gt;")
    assert "What helps: node serve demo --layers 4-8" in sent["text"]
    assert (sent["step"], sent["worst"], sent["swarm"]) == ("began", "critical", "canopy")
    assert (sent["alert"]["model"], sent["alert"]["model_name"]) == (FINGERPRINT, "demo")
    assert sent["alert"]["text"] == "<!channel> @here & <http://x|y>"
    assert message(change(step=AlertTransition.ENDED), "canopy")["text"] == "🟢 over: demo: gap"


@dataclass
class Receiving:
    """An HTTP server that answers what it is told to, and keeps what it got."""

    answers: list[bytes]
    port: int = 0
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    _has_waiting: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: list[asyncio.StreamWriter] = field(default_factory=list)

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(fields["content-length"]))
                self.got.append((fields | {":path": lines[0].split()[1]}, body))
                self._has_waiting.set()
                writer.write(self.answers.pop(0) if self.answers else b"HTTP/1.1 204 No Content\r\n\r\n")
        except (asyncio.IncompleteReadError, OSError):
            pass
        writer.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._has_waiting.clear()
                await self._has_waiting.wait()

    def texts(self) -> list[str]:
        return [json.loads(body)["alert"]["text"] for _, body in self.got]

    def deliveries(self) -> list[str]:
        return [fields["x-canopy-delivery"] for fields, _ in self.got]


@asynccontextmanager
async def receiving(*answers: bytes) -> AsyncIterator[Receiving]:
    one = Receiving(list(answers))
    server = await asyncio.start_server(one.receive, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        server.close()
        for end in one._ends:
            end.transport.abort()
        await server.wait_closed()


@asynccontextmanager
async def webhook(port: int, minimum: Severity = Severity.WARNING) -> AsyncIterator[Webhook]:
    receiver = parse_receiver(f"http://127.0.0.1:{port}/{SECRET_PATH}", minimum, "hush")
    async with TaskScope() as scope:
        made = Webhook(receiver, "canopy", PACE)
        scope.spawn(made.run())
        yield made


def status(line: str, *fields: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {line}", "content-length: 0", *fields, "", ""]).encode()


async def test_it_arrives_signed_in_order_and_only_what_is_bad_enough(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with receiving() as server, webhook(server.port) as made:
        made.offer(
            [change("one"), change("no", severity=Severity.INFO), change("two"), change("one", AlertTransition.ENDED)]
        )
        await server.until(lambda: len(server.got) == 3)
    assert server.texts() == ["one", "two", "one"]
    fields, body = server.got[0]
    signed = fields["x-canopy-timestamp"].encode() + b"." + body
    assert fields["x-canopy-signature"] == "sha256=" + hmac.new(b"hush", signed, hashlib.sha256).hexdigest()
    assert fields["x-canopy-signature"] == sign("hush", fields["x-canopy-timestamp"], body)
    assert (fields["content-type"], fields[":path"]) == ("application/json", f"/{SECRET_PATH}")
    assert SECRET_PATH not in caplog.text, "not by the library either"


async def test_an_alert_that_became_bad_enough_is_told_to_its_end() -> None:
    async with receiving() as server, webhook(server.port, Severity.CRITICAL) as made:
        mild = change("mild", severity=Severity.WARNING)
        end = Change(mild.alert, AlertTransition.ENDED, NOW + 9, Severity.CRITICAL)
        made.offer([mild, Change(mild.alert, AlertTransition.WORSE, NOW + 5, Severity.CRITICAL), end])
        await server.until(lambda: len(server.got) == 2)
    assert [json.loads(body)["step"] for _, body in server.got] == ["worse", "ended"]


async def test_a_receiver_that_fails_is_tried_again_and_the_order_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    async with receiving(status("500 No"), status("503 No")) as server, webhook(server.port) as made:
        made.offer([change("one"), change("two")])
        await server.until(lambda: len(server.got) == 4)
    assert server.texts() == ["one", "one", "one", "two"]
    assert len(set(server.deliveries()[:3])) == 1, "so that who hears it twice can know"
    assert made.dropped == 0


async def test_what_is_refused_is_not_said_again_and_no_redirect_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    async with receiving() as elsewhere:
        away = status("307 There", f"location: http://127.0.0.1:{elsewhere.port}/")
        async with receiving(status("404 No"), status("429 No"), away) as server, webhook(server.port) as made:
            made.offer([change(str(number)) for number in range(4)])
            await server.until(lambda: len(server.got) == 4)
        assert (server.texts(), made.dropped, elsewhere.got) == (["0", "1", "2", "3"], 3, [])
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1, "an outage is told once"


async def test_who_hangs_or_is_not_there_holds_up_nobody_and_secrets_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with receiving(b"HTTP/1.1 200", b"HTTP/1.1 200", b"garbage\r\n\r\n") as server, webhook(server.port) as made:
        made.offer([change("one"), change("two")])
        await server.until(lambda: "two" in server.texts())
    assert (server.texts()[:3], made.dropped) == (["one"] * 3, 1)
    async with webhook(server.port) as nobody:
        for number in range(MAX_WAITING + 10):
            nobody.offer([change(str(number))])
        assert nobody.dropped == 10
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("swarm")]
    assert ours
    assert SECRET_PATH not in "".join(ours)
    assert "hush" not in caplog.text
    assert SECRET_PATH not in caplog.text


@pytest.mark.parametrize("severity", ["info", "warning", "critical"])
def test_the_least_severity_is_said_as_documented(severity: str) -> None:
    assert tyro.cli(Health, args=["--webhook-min", severity]).webhook_min == severity
