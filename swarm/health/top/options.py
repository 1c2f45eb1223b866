"""The options of `swarm top`; its command line is built from them, and defaults stand here only.

A file of its own, so that the command line is read without importing a terminal's toolkit or an HTTP client.
"""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from swarm.base.cli_types import Found, Model, NetworkKeyFile, Peer, Url
from swarm.directory.dht.addresses import OPEN_SWARM, Membership

DEFAULT_URL = "http://127.0.0.1:8080"


@dataclass(frozen=True, slots=True)
class Top:
    """Watch a swarm in a terminal: verdicts, layers, machines, probes and alerts, live.

    Attributes:
        url: address of a health service, as `swarm health` prints it (default: http://127.0.0.1:8080).
        model: name or fingerprint of the model to show first, or its beginning (default: the worst one).
        once: print one screen as plain text, and end.
        join: multiaddress of a peer, or an invite (also without --join); may be repeated. Shows what the DHT alone
            knows, without a health service.
        membership: of the swarm; not an option.
    """

    url: Url | None = None
    model: Model | None = None
    once: bool = False
    join: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    network_key: NetworkKeyFile = None
    membership: Found[Membership] = OPEN_SWARM
