"""What a sweep says about picking, from protobuf to checked values."""

from __future__ import annotations

from collections.abc import Collection

from swarm.errors import RemoteProtocolError
from swarm.protocol.messages import Sampling
from swarm.protocol.proposal import DraftDistribution
from swarm.wire import checks
from swarm.wire.v1 import node_pb2 as pb


def sampling_of(sampling: pb.Sampling) -> Sampling:
    """How the tail picks."""
    top_k = sampling.top_k if sampling.HasField("top_k") else None
    if top_k == 0:
        raise RemoteProtocolError("top_k", "0 would leave no token")
    return Sampling(
        seed=sampling.seed,
        temperature=checks.non_negative(sampling.temperature, "temperature"),
        top_k=top_k,
        top_p=checks.share(sampling.top_p, "top_p") if sampling.HasField("top_p") else None,
        min_p=checks.share(sampling.min_p, "min_p") if sampling.HasField("min_p") else None,
        multistep=sampling.multistep,
    )


def guesses_of(guesses: Collection[pb.Guess], nodes: int) -> tuple[DraftDistribution, ...]:
    """What was drawn after nodes of a sweep of so many."""
    found: list[DraftDistribution] = []
    for sent in checks.at_most(guesses, nodes, "guesses"):
        guess = DraftDistribution(sent.offset, tuple(sent.tokens), tuple(sent.weights), tuple(sent.draws))
        complaint = guess.complaint(checks.TOKEN_END)
        if complaint is not None:
            raise RemoteProtocolError("guesses", complaint)
        if guess.offset >= nodes or (found and guess.offset <= found[-1].offset):
            raise RemoteProtocolError("guesses", f"offset {guess.offset} is not below {nodes} or not rising")
        found.append(guess)
    return tuple(found)
