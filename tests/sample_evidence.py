"""The evidence of a small text over three machines, made without a chain: what tests alter, field by field."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

import numpy as np

from swarm.base.ids import PeerId, TreeNodeId
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.protocol.authority import SessionKey
from swarm.protocol.messages import Codec, RouteHop, Rows, Sampling, Sweep
from swarm.protocol.session import Limits, SessionState
from swarm.trust.commitment import (
    Committed,
    CommittedStream,
    commit_picks,
    commit_rows,
    commit_tokens,
    placed,
    rules_digest,
)
from swarm.trust.evidence import (
    VERSION,
    SentRows,
    StreamLeaves,
    TextEvidence,
    ToldRoute,
    ToldStream,
    ToldSweep,
    ToldText,
    signed_part,
    told_bytes,
)
from swarm.trust.settlement import Settlement, SettlingKey, settled

SPANS = (Span(0, 4), Span(4, 8), Span(8, 12))
WIDTH = 8
SAMPLING = Sampling(seed=5, temperature=0.7)
PROMPT, ANSWER = (1, 2, 3), (4, 5, 6, 7)
FINGERPRINT = "f" * 64
SIGNED_AT = 1_790_000_000


@cache
def identity(number: int) -> Identity:
    """A machine's identity; keys take long to make."""
    del number
    return Identity.ephemeral()


@dataclass
class SignedText:
    """A text that three machines computed: a prompt, a tree of three nodes of which two are taken, and a last sweep.

    Attributes:
        key: of its session.
        settlements: what each machine signs.
        told: what the client says.
        messages: that hops 0 and 1 sent, and the tail's replies.
        rows: [nodes along the text] of hops 0 and 1.
    """

    key: SessionKey = field(default_factory=SessionKey.fresh)
    settlements: list[Settlement] = field(default_factory=list)
    told: ToldText = field(init=False)
    messages: list[list[Committed]] = field(default_factory=list)
    rows: list[SentRows] = field(default_factory=list)
    keys: list[SettlingKey] = field(default_factory=lambda: [SettlingKey() for _ in SPANS])

    def __post_init__(self) -> None:
        peers = [identity(number).peer_id for number in range(len(SPANS))]
        session, ends = self.key.session, ["", *peers, ""]
        streams = [CommittedStream(session, 0, sender, receiver) for sender, receiver in pairwise(ends)]
        state, rng = SessionState(Limits(100, 64, 8, 64)), np.random.default_rng(1)
        sent: list[dict[TreeNodeId, bytes]] = [{}, {}]
        for sweep in _sweeps():
            applied = state.apply(sweep)
            nodes = placed(state, applied.appended)
            assert nodes is not None
            streams[0].add(commit_tokens(session, sweep.sequence, nodes, sweep.tokens, snapshot=False))
            for hop in (0, 1):
                values = rng.standard_normal((len(nodes), WIDTH), dtype=np.float32)
                data = values.tobytes()
                rows = Rows(Codec.FP32, len(nodes), WIDTH, data)
                streams[hop + 1].add(commit_rows(session, sweep.sequence, nodes, rows, snapshot=False))
                sent[hop] |= {at.node: bytes(rows.row(place).data) for place, at in enumerate(nodes)}
            asked = [at for at in nodes if at.node >= sweep.picks_from]
            picked = [(hashlib.sha256(rng.bytes(4 * WIDTH)).digest(), _next_token(at.position)) for at in asked]
            streams[3].add(commit_picks(session, sweep.sequence, asked, picked, rules_digest(state.sampling)))
        route = tuple(RouteHop(peer, span) for peer, span in zip(peers, SPANS, strict=True))
        for place, one in enumerate(route):
            received, left = (settled(stream, one.peer) for stream in streams[place : place + 2])
            made = Settlement(
                *(session, one.peer, FINGERPRINT, "cpu-float32", one.span, 12, Codec.FP32, 0, 0),
                *((received,), (left,), SIGNED_AT),
            )
            self.settlements.append(made)
        self.messages = [stream.messages for stream in streams[1:]]
        path = (*(token.id for token in state.committed), *_live_path(state))
        for hop in (0, 1):
            data = b"".join(sent[hop][node] for node in path)
            self.rows.append(SentRows(hop, WIDTH, path, data))
        told = ToldStream(0, peers[0], tuple((sweep.sequence, False) for sweep in _sweeps()))
        tells = tuple(map(ToldSweep.of, _sweeps()))
        self.told = ToldText(
            *(VERSION, self.key.public_key, FINGERPRINT, (), (ToldRoute(0, route),), (told,), tells),
            *(len(PROMPT), (*PROMPT, *ANSWER)),
        )

    @property
    def evidence(self) -> TextEvidence:
        """The file's content, as it stands."""
        return self.signed(self.told)

    def signed(self, told: ToldText, seal: Callable[[int, Settlement], bytes] | None = None) -> TextEvidence:
        """The same with another word of the client, which it signs."""
        seal = seal or self.seal
        text = told_bytes(told)
        return TextEvidence(
            told,
            text,
            self.key.sign(signed_part(text)),
            tuple(seal(place, one) for place, one in enumerate(self.settlements)),
            (StreamLeaves(2, 0, tuple(self.messages[2])),),
            tuple(StreamLeaves(hop, 0, tuple(self.messages[hop])) for hop in (0, 1)),
            tuple(self.rows),
        )

    def seal(self, place: int, settlement: Settlement) -> bytes:
        """A settlement as that machine signs it."""
        return self.keys[place].seal(settlement, identity(place))

    def with_settlement(self, place: int, **changes: object) -> TextEvidence:
        """One machine signed something else."""
        whole = self.evidence
        other = replace(self.settlements[place], **changes)  # type: ignore[arg-type]
        sealed = list(whole.settlements)
        sealed[place] = self.seal(place, other)
        return replace(whole, settlements=tuple(sealed))


def _sweeps() -> Sequence[Sweep]:
    """Prompt; its last token and a tree 4, 9 │ 5 of which 4 and 5 are taken; then 6."""
    node = TreeNodeId
    return (
        Sweep(1, 0, node(0), (1, 2), (None, node(0)), node(2), sampling=SAMPLING),
        Sweep(2, 2, node(2), (3, 4, 9, 5), (None, node(2), node(2), node(3)), node(2), commit_to=node(1), acked=1),
        Sweep(3, 5, node(6), (6,), (None,), node(6), commit_to=node(5), acked=2),
    )


def _next_token(position: int) -> int:
    """What the tail picks after a node: the text goes on by one."""
    return position + 2


def _live_path(state: SessionState) -> list[TreeNodeId]:
    child = state.child(None, 6)
    assert child is not None
    return [child]


def peer(number: int) -> PeerId:
    """The name of a machine of the text."""
    return identity(number).peer_id
