"""The limits of messages and records: what a machine accepts from another. Pure values.

It is a module of its own because the wire codec and the directory's records share it, and neither imports the other.
"""

from __future__ import annotations

MAX_NODES = 65_536
"""Tree nodes, or rows, of one message."""
MAX_HOPS = 256
"""Machines of a route."""
MAX_RECORD_BYTES = 4_096
"""One node's signed record."""
MAX_HEADERS = 4_096
"""Unanswered sweeps of a snapshot."""
MAX_WIDTH = 1 << 20
"""Values of a hidden row."""
MAX_LAYERS = 1 << 16
"""Layers of a model."""
PART_BYTES = 1 << 20
"""Data of one part of a frame (F2)."""
SESSION_BYTES = 16
"""A session's id, exactly."""
TEXT_CHARACTERS = 256
"""Names, digests and versions."""
PEER_CHARACTERS = 128
"""A base58 peer id."""
SIGNATURE_BYTES = 512
"""A signature by an RSA key of 4,096 bits."""
PADDING_BYTES = 65_536
"""A ping's padding."""
REASON_CHARACTERS = 1_024
"""The text of a fault or close."""
