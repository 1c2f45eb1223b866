"""The two ends of a network that a test partitions, each a program that runs in a network namespace of its own.

`python -m tests.e2e.partition_ends publish mqtt://…` publishes a node's telemetry and serves nothing.
`python -m tests.e2e.partition_ends watch http://…` prints the states of nodes that the health page shows.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request

from node.life.publisher import Address, Outbox, TelemetryPublisher
from swarm.directory.identity import Identity
from swarm.link.broker_address import parse_broker
from swarm.status.messages import Metrics, Presence, Receipts, Stamp, Status
from tests.telemetry_messages import FINGERPRINT, metrics, status


class FixedReporter:
    """Reports that never change."""

    def status(self, stamp: Stamp, *, is_birth: bool, leaving: bool) -> Status:
        state = Presence.LEFT if leaving else Presence.SERVING
        return status(stamp.at, stamp.seq, stamp.nonce, is_birth=is_birth, state=state)

    def metrics(self, stamp: Stamp) -> Metrics:
        return metrics(stamp.at, stamp.seq, stamp.nonce)

    def receipts(self, stamp: Stamp, *, is_first: bool) -> None:
        return None

    def published(self, receipts: Receipts) -> None:
        raise AssertionError("it has none")


async def publish(url: str) -> None:
    """Publish telemetry until killed."""
    address = Address(parse_broker(url), "canopy", FINGERPRINT, Identity.ephemeral())
    async with TelemetryPublisher(address, FixedReporter(), Outbox(), print):
        await asyncio.Event().wait()


def watch(url: str) -> None:
    """Print the states of all nodes, and the time, whenever they change."""
    before = None
    with urllib.request.urlopen(f"{url}api/v1/stream", timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                state = json.loads(line[6:])
                now = [node["state"] for model in state["models"] for node in model["nodes"]]
                if now != before:
                    sys.stdout.write(f"{time.monotonic():.3f} {' '.join(now)}\n")
                    sys.stdout.flush()
                before = now


if __name__ == "__main__":
    if sys.argv[1] == "publish":
        asyncio.run(publish(sys.argv[2]))
    else:
        watch(sys.argv[2])
