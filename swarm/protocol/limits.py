"""The limits of messages and records: what a machine accepts from another. Pure values."""

from __future__ import annotations

MAX_NODES = 65_536
"""Most tree nodes in one message."""

MAX_HOPS = 256
MAX_RECORD_BYTES = 4_096
MAX_HEADERS = 4_096
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1 << 16
SESSION_BYTES = 16
TEXT_CHARACTERS = 256
PEER_CHARACTERS = 128
PADDING_BYTES = 65_536
REASON_CHARACTERS = 1_024
