"""Sends changes of alerts to receivers elsewhere: JSON by HTTP POST, in order. Never delays the service.

Each receiver has a queue of its own. One that fails is tried again with back-off and jitter; the queue is bounded, and
the oldest message gives way. Where messages go is a secret (chat services put a password into the path), so only scheme
and host are ever logged.
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

from swarm.base.errors import ConfigError
from swarm.health.alerts.rules import AlertTransition, Change, Severity, change_shown

logger = logging.getLogger(__name__)
for _name in ("httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.WARNING)  # below that they log whole URLs

MAX_WEBHOOKS: Final = 8
MAX_WAITING: Final = 256
_BEFORE: Final = {
    AlertTransition.BEGAN: "",
    AlertTransition.WORSE: "worse: ",
    AlertTransition.ENDED: "over: ",
    AlertTransition.FORGOTTEN: "not known any more: ",
}
_SIGNS: Final = {Severity.INFO: "🔵", Severity.WARNING: "🟠", Severity.CRITICAL: "🔴"}
_ERROR: Final = 400
_SERVER_ERROR: Final = 500


@dataclass(frozen=True, slots=True)
class WebhookTiming:
    """Time limits and pauses of deliveries.

    Attributes:
        answer_s: longest wait for an answer.
        tries: attempts for one message.
        first_wait_s: pause after the first failure; doubled after each that follows.
        max_wait_s: longest such pause.
        pause_s: pause between two messages.
        jitter: drawn from [0, 1) for each pause after a failure.
    """

    answer_s: float = 10.0
    tries: int = 6
    first_wait_s: float = 2.0
    max_wait_s: float = 60.0
    pause_s: float = 1.0
    jitter: Callable[[], float] = random.random


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where messages go, and which; `url` and `secret` are never shown.

    Attributes:
        url: takes them by POST.
        minimum: lowest severity that is sent.
        secret: signs messages; None signs none.
    """

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
    if parsed.scheme == "http" and not _is_local(parsed.host):
        raise ConfigError(
            f"--webhook http://{parsed.host}/…: without TLS only to localhost or a private IP address; use https"
        )
    return Receiver(parsed, minimum, secret)


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_private


class Webhook:
    """One receiver: `offer` changes, and `run` in a task."""

    def __init__(self, receiver: Receiver, swarm: str, timing: WebhookTiming | None = None) -> None:
        self._receiver, self._swarm, self._timing = receiver, swarm, timing or WebhookTiming()
        self._waiting: deque[Change] = deque()
        self._has_waiting = asyncio.Event()
        self._is_failing = False
        self.dropped = 0

    def offer(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.worst.rank < self._receiver.minimum.rank:
                continue
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._drop("its queue is full")
            self._waiting.append(change)
            self._has_waiting.set()

    async def run(self) -> None:
        # no proxy from the environment, no redirects: messages go to the operator's URL and nowhere else
        async with httpx2.AsyncClient(
            verify=ssl.create_default_context(),
            timeout=self._timing.answer_s,
            trust_env=False,
            follow_redirects=False,
            headers={"user-agent": "canopy-health"},
        ) as client:
            while True:
                while self._waiting:
                    await self._deliver(client, self._waiting.popleft())
                    await asyncio.sleep(self._timing.pause_s)
                self._has_waiting.clear()
                await self._has_waiting.wait()

    async def _deliver(self, client: httpx2.AsyncClient, change: Change) -> None:
        """Send one message until it is accepted, refused, or tried `tries` times."""
        timing, wait_s = self._timing, self._timing.first_wait_s
        for tries_left in reversed(range(timing.tries)):
            failure = await self._send(client, change)
            if failure is None:
                if self._is_failing:
                    logger.info("the webhook at %s takes messages again", self._receiver)
                self._is_failing = False
                return
            if failure.is_final or not tries_left:
                self._drop(failure.text)
                return
            await asyncio.sleep(wait_s * (0.5 + timing.jitter()))
            wait_s = min(2 * wait_s, timing.max_wait_s)

    async def _send(self, client: httpx2.AsyncClient, change: Change) -> _Failure | None:
        body = json.dumps(message(change, self._swarm), ensure_ascii=True).encode()
        at = str(int(time.time()))
        headers = {"content-type": "application/json", "x-canopy-timestamp": at, "x-canopy-delivery": _ascii(change.id)}
        if self._receiver.secret is not None:
            headers["x-canopy-signature"] = sign(self._receiver.secret, at, body)
        try:
            async with (
                asyncio.timeout(self._timing.answer_s),
                client.stream("POST", self._receiver.url, content=body, headers=headers) as answer,
            ):
                status = answer.status_code  # the body is not read
        except TimeoutError:
            return _Failure("no answer in time")
        except (httpx2.HTTPError, OSError) as error:
            return _Failure(type(error).__name__)  # its text may hold the URL
        if httpx2.codes.is_success(status):
            return None
        is_final = status < _SERVER_ERROR
        return _Failure(f"status {status}" + (", a redirect" if status < _ERROR else ""), is_final)

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if not self._is_failing:
            logger.warning("the webhook at %s misses a message (%s)", self._receiver, why)
        self._is_failing = True


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str
    is_final: bool = False


def message(change: Change, swarm: str) -> dict[str, Any]:
    """The message: a line that chat services show as it is, and everything as values."""
    is_over = change.step in (AlertTransition.ENDED, AlertTransition.FORGOTTEN)
    finding = change.alert.finding
    line = f"{'🟢' if is_over else _SIGNS[finding.severity]} {_BEFORE[change.step]}{finding.text}"
    fix = finding.fix
    if fix is not None and not is_over:
        line += f"\nWhat helps: {fix}"
    return {"v": 1, "text": plain(line), "swarm": swarm, **change_shown(change)}


def plain(text: str) -> str:
    """The text without what chat services would interpret: model names are chosen by strangers."""
    for found, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("@", "@\u200b")):
        text = text.replace(found, written)
    return text


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """The value of `x-canopy-signature`: HMAC-SHA256 over the timestamp, a dot and the body."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
