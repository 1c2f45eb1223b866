"""Swarms of a local network that does not exist."""

from __future__ import annotations

from collections.abc import Mapping

from swarm.base.ids import PeerId

PEERS = (
    PeerId("QmbLHAnMoJPWSCR5Zhtx6BHJX9KiKNN6tpvbUcqanj75Nb"),
    PeerId("QmcZf59bWwK5XFi76CZX8cbJ4BhTzzA3gU1ZjYZcYW3dwt"),
    PeerId("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"),
)


def address_of(number: int) -> str:
    """The multiaddress of one of the peers."""
    return f"/ip4/192.168.1.{7 + number}/tcp/31337/p2p/{PEERS[number]}"


def as_bytes(txt: Mapping[str, str]) -> dict[bytes, bytes | None]:
    """A TXT record as it comes over the network."""
    return {key.encode(): value.encode() for key, value in txt.items()}
