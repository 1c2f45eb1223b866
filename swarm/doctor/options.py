"""The options of `swarm doctor` and `node doctor`. Loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from swarm.base.cli_types import File, Found, Model, NetworkKeyFile, Peer, Port, Url, headed
from swarm.directory.dht.addresses import OPEN_SWARM, Membership


@headed(
    swarm=("join", "network_key", "model"), machine=("port",), broker=("mqtt", "mqtt_ca"), output=("json", "verbose")
)
@dataclass(frozen=True, slots=True)
class Doctor:
    """Look for what keeps this machine from serving or using a swarm, and say what mends it.

    Attributes:
        join: multiaddress of a peer of the swarm, or an invite (also without --join); may be repeated (default:
            CANOPY_JOIN, else the swarm joined last).
        mqtt: MQTT broker for telemetry, as for `node serve` (default: CANOPY_MQTT, else none is tried).
        mqtt_ca: file of certificates to trust for an mqtts:// broker (default: the system's).
        model: hub id, folder or GGUF file of the model to be served (default: CANOPY_MODEL, else none is looked for).
        port: TCP port on which a node would listen; may be repeated (default: any free one).
        json: print one JSON object instead of lines.
        verbose: print also what is well.
        membership: of the swarm; not an option.
    """

    join: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    mqtt: Url | None = None
    mqtt_ca: File | None = None
    model: Model | None = None
    port: tyro.conf.UseAppendAction[tuple[Port, ...]] = ()
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    verbose: tyro.conf.FlagCreatePairsOff[bool] = False
    network_key: NetworkKeyFile = None
    membership: Found[Membership] = OPEN_SWARM
