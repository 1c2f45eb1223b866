"""The two ends of a network that is cut: `tell URL` is a node that only talks, `watch URL` prints what a page shows.

Each is a process of its own, so that it can run in a network namespace: `python -m tests.e2e.partition_ends tell mqtt://…`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request

from node.telemetry.outbox import Outbox
from node.telemetry.publisher import Address, TelemetryPublisher
from swarm.discovery.identity import Identity
from swarm.telemetry.broker_address import parse_broker
from swarm.telemetry.messages import Metrics, Presence, Stamp, Status
from tests.telemetry_messages import PRINT, metrics, status


class Speaker:
    """A node's words."""

    def status(self, stamp: Stamp, *, is_birth: bool, leaving: bool) -> Status:
        state = Presence.LEFT if leaving else Presence.SERVING
        return status(stamp.at, stamp.seq, stamp.nonce, is_birth=is_birth, state=state)

    def metrics(self, stamp: Stamp) -> Metrics:
        return metrics(stamp.at, stamp.seq, stamp.nonce)


async def tell(url: str) -> None:
    """Talk until killed."""
    address = Address(parse_broker(url), "canopy", PRINT, Identity.ephemeral())
    async with TelemetryPublisher(address, Speaker(), Outbox(), print):
        await asyncio.Event().wait()


def watch(url: str) -> None:
    """Print the states of all nodes whenever they change, and when."""
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
    if sys.argv[1] == "tell":
        asyncio.run(tell(sys.argv[2]))
    else:
        watch(sys.argv[2])
