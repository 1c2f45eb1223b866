"""The names of things, as distinct types: peers, sessions, tree nodes. Owns no behaviour."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)
"""Base58 libp2p peer id: the hash of the machine's public key."""

SessionId = NewType("SessionId", bytes)
"""128 random bits, chosen by the client; whoever knows them may speak for the session."""

TreeNodeId = NewType("TreeNodeId", int)
"""Number of a tree node within its session, in the order in which the client appends; never reused."""
