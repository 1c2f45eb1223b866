"""What a node holds from its start to its end, whichever layers it serves. Owns nothing: a value.

The start-up fills it before any layer is chosen; the span's host and the announcer work with it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from node.config import ServeConfig
from node.membership.rebalance import Rebalance
from node.model.checkpoint import Checkpoint
from node.model.loading import Say
from node.reach.reached import Whereabouts
from node.session.counters import NodeCounters
from node.telemetry.outbox import Outbox
from swarm.discovery.node_record import NodeRecord
from swarm.discovery.registry import Registry
from swarm.ids import ModelIdentity
from swarm.protocol.manifest import Manifest
from swarm.runtime.tasks import TaskScope
from swarm.transport.certificate import ServerCertificate
from swarm.transport.dial import Dialer
from swarm.transport.uplink import Uplink
from swarm.transport.way import Ways


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What exists once the ports are bound, the directory is joined and the model is found."""

    config: ServeConfig
    say: Say
    """Takes lines for the user."""
    registry: Registry
    whereabouts: Whereabouts
    """How others reach the gRPC service, now."""
    port: int
    """The TCP port that is bound for it."""
    certificate: ServerCertificate | None
    """With which it answers until it ends, whichever layers it serves; None with `--insecure`."""
    identity: ModelIdentity
    """Of the model."""
    manifest: Manifest
    """Of its weights."""
    left_behind: NodeRecord | None
    """The record of an earlier run of this machine that has not expired yet."""
    checkpoint: Checkpoint
    rebalance: Rebalance
    counters: NodeCounters
    uplink: Uplink
    """By which the rows of all sessions leave, whichever layers it serves."""
    outbox: Outbox
    loaded: ExitStack
    """Ends the loaded layers, after everything that computes with them."""
    dialer: Dialer
    ways: Ways | None
    """Lead past relays; None where the system has not what they need."""
    scope: TaskScope
    """Owns the node's background tasks."""

    @property
    def address(self) -> str:
        """Under which others reach the gRPC service now, as the record has it."""
        return self.whereabouts.now.address
