"""The limits of messages and records: what a machine accepts from another. Pure values.

It is a module of its own because the wire codec and the directory's records share it, and neither imports the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from swarm.base.declared import Within, below

ID_END = 1 << 63
"""Ids, sequences, generations and lengths are below it."""
TOKEN_END = 1 << 31
"""Token ids are below it."""
WORD_END = 1 << 32
"""What a protobuf message holds in 32 bits is below it."""
MAX_NODES = 65_536
"""Tree nodes, or rows, of one message."""
MAX_HOPS = 256
"""Machines of a route."""
MAX_RECORD_BYTES = 6_144
"""One node's signed record: the largest one, of an identity with 4,096 bits and with a certificate, has 4.7 KB."""
MAX_TELL_NODES = 1_024
"""Tree nodes of which the client tells a tail in one message."""
MAX_HEADERS = 4_096
"""Unanswered sweeps of a snapshot."""
MAX_WIDTH = 1 << 20
"""Values of a hidden row."""
MAX_LAYERS = 512
"""Layers of a model."""
MAX_SWEEP_ROWS = 4_096
"""Tree nodes of a sweep whose time a machine claims."""
SWEEP_MS = 0.01, 1e6
"""What a sweep through a span may be claimed to take, in milliseconds."""
MAX_HOP_MS = 120_000.0
"""Each of the times that a hop reports for one sweep: as long as a client waits for a reply."""
MAX_TEMPERATURE = 1e6
"""Of sampling: with it, every pick is noise."""
MAX_REPLY_ROWS = 64
"""Hidden rows of a reply: the deepest ones of its path."""
MAX_PROMPT_ROWS = 1_024
"""Hidden rows of forced tokens for which one sweep may ask, the newest ones."""
PROMPT_ROWS_BYTES = 8 << 20
"""Of these rows in replies that a client did not acknowledge, per session: a tail sends no more."""
MAX_AUX_LAYERS = 4
"""Layers whose rows travel beside those of the last one."""
MAX_HOLD_S = 3_600.0
"""For how long a client may ask a session to be held."""
MAX_COUNT = 1 << 53
"""What is counted is at most this, so that a float holds it exactly."""
PART_BYTES = 1 << 20
"""Data of one part of a frame (F2)."""
SESSION_BYTES = 16
TICKET_BYTES = 16
"""Of an Attach, by which a full machine knows again who asks anew."""
"""A session's id, exactly."""
SESSION_KEY_BYTES = 32
"""A session's public key (ed25519), exactly."""
BLOCK_TOKENS = 64
"""Committed tokens that machines keep and find under one name."""
NAME_BYTES = 16
"""Such a name, exactly."""
MAX_BORDERS = 64
"""Beginnings of its text that a session may ask machines to begin with."""
SESSION_SIGNATURE_BYTES = 64
"""Its signature, exactly."""
MAX_KEY_BYTES = 1_024
"""The public key of whoever calls: a session's, or an identity's (RSA) as libp2p encodes it."""
MAX_SIGNATURE_BYTES = 512
"""Its signature, and that of a fault: RSA with 4,096 bits."""
HASH_BYTES = 32
"""A leaf, a commitment, or the head of a chain of them."""
MAX_SETTLED_BYTES = 64 << 10
"""What a hop signs of a session when it settles, with its keys."""
MAX_RECEIPT_BYTES = 4_096
"""A receipt, sealed (S7)."""
MAX_SUCCESSION_BYTES = 1_536
"""What an old key signs of the one that takes its place, with both keys' names."""
MAX_SHOWN_NODES = 4_096
"""Nodes whose rows one question asks for."""
SHOWN_BYTES = 1 << 20
"""Leaves or rows of one answer, and one message or row more."""
MAX_REPORT_BYTES = 16 << 20
"""Evidence of one hop that another machine takes in order to recompute it."""
REFUTED_S = 86_400.0
"""For how long it is said that a machine was found wrong, and so old may be what proves it."""
NONCE_BYTES, TIME_BYTES = 16, 8
"""Of an introduction."""
MAX_GENERATION_STEP = 1_024
"""How far a session's generation may rise at once, on a hop that knows the session."""
TEXT_CHARACTERS = 256
"""Names, digests and versions."""
PEER_CHARACTERS = 128
"""A base58 peer id."""
PEER_ID = re.compile(r"Qm[1-9A-HJ-NP-Za-km-z]{44}")
"""What a peer id looks like: the base58 form of a SHA-256 multihash."""
PADDING_BYTES = 65_536
"""A ping's padding."""
REASON_CHARACTERS = 1_024
"""The text of a fault or close."""

OPENING_HEAD_BYTES = 64 << 10
"""The head of a stream's first message, before anything is known of its session."""
RECORDS_BYTES = 40 << 10
"""The records that travel with a route, which leaves room for 256 hops in an opening's head."""
TOKEN_HEAD_BYTES = 64
"""What a token of a snapshot, or a tree node of a sweep, takes in a head at most (33 in fact)."""
GUESS_HEAD_BYTES = 384
"""What a draft's distribution after a node takes besides."""
RULES_HEAD_BYTES = 176 << 10
"""What rules of picks take in a head at most, a snapshot's and those of one header: each a grammar, 1,024 biases and 64
ids that end a text (80 KiB in fact)."""
MAX_HEAD_BYTES = 4 << 20
"""A frame's head, whatever the credits."""

Natural = Annotated[int, below(ID_END)]
Granted = Annotated[int, Within(1, WORD_END - 1)]
WaitS = Annotated[float, Within(0.0, 3_600.0)]
"""How long a full machine expects to be asked to wait."""
HopMs = Annotated[float, Within(0.0, MAX_HOP_MS)]
TokenNumber = Annotated[int, below(TOKEN_END)]
Counted = Annotated[int, Within(0, MAX_COUNT)]


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """What a session's heads may hold: checked before anything is made of them.

    Attributes:
        window_tokens: committed tokens of a snapshot.
        sweeps: unanswered sweeps of a snapshot.
        nodes: live nodes, and nodes of unanswered sweeps.
    """

    window_tokens: int = MAX_NODES
    sweeps: int = MAX_HEADERS
    nodes: int = MAX_NODES

    @property
    def head_bytes(self) -> int:
        """Bytes that the largest legal head takes, and some more."""
        tokens = TOKEN_HEAD_BYTES * (self.window_tokens + self.nodes)
        most = OPENING_HEAD_BYTES + RULES_HEAD_BYTES + tokens + GUESS_HEAD_BYTES * self.nodes
        return min(most, MAX_HEAD_BYTES)
