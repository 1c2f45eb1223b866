"""The options of `swarm health`; its command line is built from them, and defaults stand here only.

A file of its own, so that the command line is read without importing a web server or a broker's client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from swarm.base.cli_types import (
    Count,
    File,
    Folder,
    Found,
    Host,
    Insecure,
    NetworkKeyFile,
    Peer,
    Port,
    Seconds,
    Text,
    Url,
    headed,
)
from swarm.directory.dht.addresses import OPEN_SWARM, Membership
from swarm.health.alerts.rules import Severity
from swarm.status.messages import DEFAULT_PREFIX


@headed(
    swarm=("join", "network_key", "insecure"),
    broker=("mqtt", "mqtt_ca", "prefix", "embedded_broker", "broker_host", "broker_port", "broker_passwords"),
    page=("host", "port", "data", "snapshot", "url"),
    probe=("probe_every", "probe_budget"),
    alert=("webhook", "webhook_min"),
)
@dataclass(frozen=True, slots=True)
class Health:
    """Watch a swarm: a live page with its verdict, history, probes and alerts, as one process.

    Attributes:
        join: multiaddress of a peer of the swarm, or an invite (also without --join); may be repeated (default: the
            swarm joined last).
        mqtt: broker to which nodes publish, mqtt://host:port or mqtts://user:password@host:port; without one the
            DHT alone is shown (default: CANOPY_MQTT, else the swarm's).
        mqtt_ca: file of certificates to trust for an mqtts:// broker (default: the system's).
        embedded_broker: run a broker in this program, to which nodes publish.
        broker_host: IP address on which the embedded broker listens.
        broker_port: TCP port on which it listens; 0 takes any free one.
        broker_passwords: file with user:hash lines, argon2 (default: none, anybody may publish signed telemetry).
        prefix: first levels of the MQTT topics.
        host: IP address on which the page is served.
        port: TCP port on which it is served; 0 takes any free one.
        data: SQLite file that keeps the history (default: health.sqlite3 in the user's data folder).
        webhook: URL to which alerts are sent by POST, as JSON; may be repeated. CANOPY_WEBHOOK takes more, for URLs
            that not every user of this machine may read; CANOPY_WEBHOOK_SECRET signs what is sent.
        webhook_min: lowest severity that is sent.
        webhook_secret: signs the messages; not an option.
        probe_every: seconds between canary generations through each model; 0 probes never.
        probe_budget: tokens that probes may use in an hour, prompts included.
        snapshot: folder into which the page is also written every minute, as files for any static host (default: none).
        url: with --snapshot: address of a health service that runs already, of which one snapshot is written
            (default: this one).
        membership: of the swarm; not an option.
    """

    join: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    mqtt: Url | None = None
    mqtt_ca: File | None = None
    embedded_broker: bool = False
    broker_host: Host = "127.0.0.1"
    broker_port: Port = 1_883
    broker_passwords: File | None = None
    prefix: Text = DEFAULT_PREFIX
    host: Host = "127.0.0.1"
    port: Port = 8_080
    data: File | None = None
    webhook: tyro.conf.UseAppendAction[tuple[Url, ...]] = ()
    webhook_min: tyro.conf.EnumChoicesFromValues[Severity] = Severity.WARNING
    webhook_secret: Annotated[str | None, tyro.conf.Suppress] = field(default=None, repr=False)
    probe_every: Seconds = 300.0
    probe_budget: Count = 4_000
    snapshot: Folder | None = None
    url: Url | None = None
    insecure: Insecure = False
    network_key: NetworkKeyFile = None
    membership: Found[Membership] = OPEN_SWARM
