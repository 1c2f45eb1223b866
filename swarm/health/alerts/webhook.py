"""Tells receivers elsewhere what alerts do: JSON by HTTP POST, in order, and never holds up anyone.

Each receiver has a queue of its own. One that fails is tried again with back-off and jitter; what waits is bounded, and
the oldest gives way. Where messages go is a secret (chat services put a password into the path), so only scheme and
host are ever logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import random
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from swarm.errors import ConfigError
from swarm.health.alerts.feed import title_of
from swarm.health.alerts.record import change_shown
from swarm.health.alerts.rules import AlertTransition, Change, Severity

logger = logging.getLogger(__name__)
for _name in ("httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.WARNING)  # below that they log whole URLs

MAX_WEBHOOKS: Final = 8
MAX_WAITING: Final = 256
_SIGNS: Final = {Severity.INFO: "🔵", Severity.WARNING: "🟠", Severity.CRITICAL: "🔴"}
_ERROR: Final = 400
_SERVER_ERROR: Final = 500


@dataclass(frozen=True, slots=True)
class WebhookPace:
    """How long is waited, in seconds. tries: of one message. jitter: drawn from [0, 1) for each wait."""

    answer_s: float = 10.0
    tries: int = 6
    first_wait_s: float = 2.0
    longest_wait_s: float = 60.0
    between_s: float = 1.0
    jitter: Callable[[], float] = random.random


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where messages go, and what is sent. secret: signs them; `url` and `secret` are never shown."""

    url: httpx2.URL = field(repr=False)
    minimum: Severity = Severity.WARNING
    secret: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.url.scheme}://{self.url.host}"


def parse_receiver(url: str, minimum: Severity, secret: str | None) -> Receiver:
    """Read a URL: https anywhere, http to this machine or a private address only.

    Raises:
        ConfigError: it cannot be used. The message never holds its path or a password.
    """
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError, TypeError) as error:
        raise ConfigError("--webhook: that is no URL; write https://host/path") from error
    if parsed.scheme not in ("https", "http") or not parsed.host:
        raise ConfigError("--webhook: that is no URL; write https://host/path")
    if parsed.scheme == "http" and not _is_near(parsed.host):
        raise ConfigError(
            f"--webhook http://{parsed.host}/…: without TLS only localhost and private IP addresses are told; use https"
        )
    return Receiver(parsed, minimum, secret)


def _is_near(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_private


class Webhook:
    """One receiver: `offer` changes, and `run` in a task."""

    def __init__(self, receiver: Receiver, swarm: str, pace: WebhookPace | None = None) -> None:
        self._receiver, self._swarm, self._pace = receiver, swarm, pace or WebhookPace()
        self._waiting: deque[Change] = deque()
        self._news = asyncio.Event()
        self._is_failing = False
        self.lost = 0

    def offer(self, changes: Iterable[Change]) -> None:
        """Let it be told, if it is bad enough."""
        for change in changes:
            if change.worst.rank < self._receiver.minimum.rank:
                continue
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._lose("too many wait for it")
            self._waiting.append(change)
            self._news.set()

    async def run(self) -> None:
        """Send for ever."""
        # no variables of the environment, no redirects: messages go where the operator said and nowhere else
        async with httpx2.AsyncClient(
            verify=ssl.create_default_context(),
            timeout=self._pace.answer_s,
            trust_env=False,
            follow_redirects=False,
            headers={"user-agent": "canopy-health"},
        ) as client:
            while True:
                while self._waiting:
                    await self._deliver(client, self._waiting.popleft())
                    await asyncio.sleep(self._pace.between_s)
                self._news.clear()
                await self._news.wait()

    async def _deliver(self, client: httpx2.AsyncClient, change: Change) -> None:
        """Send one, again and again until it is taken, or refused, or tried often enough."""
        pace, wait_s = self._pace, self._pace.first_wait_s
        for left in reversed(range(pace.tries)):
            trouble = await self._send(client, change)
            if trouble is None:
                if self._is_failing:
                    logger.info("the webhook at %s takes messages again", self._receiver)
                self._is_failing = False
                return
            if trouble.is_final or not left:
                self._lose(trouble.text)
                return
            await asyncio.sleep(wait_s * (0.5 + pace.jitter()))
            wait_s = min(2 * wait_s, pace.longest_wait_s)

    async def _send(self, client: httpx2.AsyncClient, change: Change) -> _Trouble | None:
        body = json.dumps(message(change, self._swarm), ensure_ascii=True).encode()
        at = str(int(time.time()))
        headers = {"content-type": "application/json", "x-canopy-timestamp": at, "x-canopy-delivery": _ascii(change.id)}
        if self._receiver.secret is not None:
            headers["x-canopy-signature"] = sign(self._receiver.secret, at, body)
        try:
            async with (
                asyncio.timeout(self._pace.answer_s),
                client.stream("POST", self._receiver.url, content=body, headers=headers) as answer,
            ):
                status = answer.status_code  # what it says beyond that is not read
        except TimeoutError:
            return _Trouble("no answer in time")
        except (httpx2.HTTPError, OSError) as error:
            return _Trouble(type(error).__name__)  # its text may hold the URL
        if httpx2.codes.is_success(status):
            return None
        is_final = status < _SERVER_ERROR
        return _Trouble(f"status {status}" + (", a redirect" if status < _ERROR else ""), is_final)

    def _lose(self, why: str) -> None:
        self.lost += 1
        if not self._is_failing:
            logger.warning("the webhook at %s misses a message (%s)", self._receiver, why)
        self._is_failing = True


@dataclass(frozen=True, slots=True)
class _Trouble:
    text: str
    is_final: bool = False


def message(change: Change, swarm: str) -> dict[str, Any]:
    """What is sent: a line that chat services show as it is, and everything as values."""
    over = change.step in (AlertTransition.ENDED, AlertTransition.FORGOTTEN)
    line = f"{'🟢' if over else _SIGNS[change.alert.finding.severity]} {title_of(change)}"
    fix = change.alert.finding.fix
    if fix is not None and not over:
        line += f"\nWhat helps: {fix}"
    return {"v": 1, "text": plain(line), "swarm": swarm, **change_shown(change)}


def plain(text: str) -> str:
    """A text in which chat services find no commands of theirs: model names are chosen by strangers."""
    for found, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("@", "@\u200b")):
        text = text.replace(found, written)
    return text


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """The signature's header: HMAC-SHA256 over the timestamp, a dot and the body."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
