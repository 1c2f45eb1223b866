"""The limits of messages and records: what a machine accepts from another. Pure values.

It is a module of its own because the wire codec and the directory's records share it, and neither imports the other.
"""

from __future__ import annotations

MAX_NODES = 65_536
"""Tree nodes, or rows, of one message."""
MAX_HOPS = 256
"""Machines of a route."""
MAX_RECORD_BYTES = 6_144
"""One node's signed record: the largest one, of an identity with 4,096 bits and with a certificate, has 4.7 KB."""
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
SESSION_KEY_BYTES = 32
"""A session's public key (ed25519), exactly."""
SESSION_SIGNATURE_BYTES = 64
"""Its signature, exactly."""
MAX_KEY_BYTES = 1_024
"""The public key of whoever calls: a session's, or an identity's (RSA) as libp2p encodes it."""
MAX_SIGNATURE_BYTES = 512
"""Its signature: RSA with 4,096 bits."""
NONCE_BYTES, TIME_BYTES = 16, 8
"""Of an introduction."""
MAX_GENERATION_STEP = 1_024
"""How far a session's generation may rise at once, on a hop that knows the session."""
TEXT_CHARACTERS = 256
"""Names, digests and versions."""
PEER_CHARACTERS = 128
"""A base58 peer id."""
PADDING_BYTES = 65_536
"""A ping's padding."""
REASON_CHARACTERS = 1_024
"""The text of a fault or close."""
