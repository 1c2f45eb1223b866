"""What `node serve` can be told; the command line is built from it and defaults stand here only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

Dtype = Literal["auto", "float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Serve some layers of a model to the swarm."""

    layers: str
    """Half-open range: 0-20 is layers 0…19."""
    model: Annotated[str | None, tyro.conf.Positional] = None
    """Hub id or folder; default: CANOPY_MODEL, else the only model of the joined swarm."""
    join: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Multiaddress of a peer of the swarm; may be given several times. Without one a new swarm begins."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU if there is one."""
    dtype: Dtype = "auto"
    """Compute type; auto is float32 on a CPU and the checkpoint's own on a GPU."""
    threads: int | None = None
    """CPU threads for computing; default: all cores. Give each of several nodes on one machine its share."""
    kv_tokens: int | None = None
    """KV cache in tokens, for all sessions together; default: from free memory."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = 0
    """TCP port of the node's gRPC service; 0 takes a free one."""
    dht_port: int = 0
    """TCP port of the DHT; 0 takes a free one."""
    announce_address: str | None = None
    """host:port under which other machines reach this node, when it differs (port forwarding)."""
    identity: Path | None = None
    """Identity file; default: one per machine, in the user's configuration folder."""
    name: str | None = None
    """A name shown to others; none is published unless given."""
