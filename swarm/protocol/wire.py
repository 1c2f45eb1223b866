"""The wire: typed messages to protobuf and back, with every edge check. Owns bytes; no I/O and no session rules.

Decoding trusts nothing: counts, lengths, ranges, finite numbers and texts are checked, and `RemoteProtocolError`
names the field. Row values are not in these bytes: `swarm.protocol.frames` carries them behind the head.
"""

from swarm.protocol.decoding import (
    FramePart,
    decode_frame,
    decode_held,
    decode_hold,
    decode_info,
    decode_part,
    decode_replies_up,
    decode_upstream,
)
from swarm.protocol.encoding import (
    encode_frame,
    encode_held,
    encode_hold,
    encode_info,
    encode_part,
    encode_replies_up,
    encode_upstream,
)
from swarm.protocol.limits import PART_BYTES
from swarm.protocol.manifests import decode_manifest, encode_manifest

SERVICE = "swarm.wire.v1.Node"
HELLO = f"/{SERVICE}/Hello"
"""Unary, raw bytes both ways: `swarm.discovery.address_proof` defines them."""
INFO = f"/{SERVICE}/Info"
"""Unary: the request is empty bytes, the answer is for `decode_info`."""
MANIFEST = f"/{SERVICE}/Manifest"
"""Unary: the request is empty bytes, the answer is for `decode_manifest`."""
LINK = f"/{SERVICE}/Link"
"""Stream of parts down, stream of `decode_upstream` back."""
REPLIES = f"/{SERVICE}/Replies"
"""Stream of `decode_replies_up` from the client, stream of parts back."""
HOLD = f"/{SERVICE}/Hold"
"""Unary: `decode_hold`, `decode_held`."""

__all__ = [
    "HELLO",
    "HOLD",
    "INFO",
    "LINK",
    "MANIFEST",
    "PART_BYTES",
    "REPLIES",
    "SERVICE",
    "FramePart",
    "decode_frame",
    "decode_held",
    "decode_hold",
    "decode_info",
    "decode_manifest",
    "decode_part",
    "decode_replies_up",
    "decode_upstream",
    "encode_frame",
    "encode_held",
    "encode_hold",
    "encode_info",
    "encode_manifest",
    "encode_part",
    "encode_replies_up",
    "encode_upstream",
]
