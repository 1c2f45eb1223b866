"""What `swarm top` can be told; its command line is built from this and defaults stand here only."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

DEFAULT_URL = "http://127.0.0.1:8080"


@dataclass(frozen=True, slots=True)
class Top:
    """Watch a swarm in a terminal: verdicts, layers, machines, probes and alerts, live.

    Attributes:
        url: address of a health service, as `swarm health` prints it (default: http://127.0.0.1:8080).
        model: name or fingerprint of the model to show first, or its beginning; the worst one if not given.
        once: print one screen as plain text, and end.
        join: multiaddress of a peer: show what the DHT alone knows, without a health service; may be repeated.
    """

    url: str | None = None
    model: str | None = None
    once: bool = False
    join: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
