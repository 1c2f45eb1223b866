"""Is a reply one that an honest tail could have sent to this sweep? Pure; a wrong one is its tail's fault alone."""

from __future__ import annotations

from itertools import pairwise

from swarm.errors import RemoteProtocolError
from swarm.ids import TreeNodeId
from swarm.protocol.messages import Reply, Sweep
from swarm.protocol.session import SessionState

MAX_ROWS = 64
"""Hidden rows of a reply beside those of a prompt (P10)."""


def check_reply(reply: Reply, sweep: Sweep, state: SessionState) -> None:
    """Raise unless a reply answers its sweep.

    Args:
        reply: what came.
        sweep: what was asked.
        state: of the session now: nodes that died since may lack a pick (P7).

    Raises:
        RemoteProtocolError: a pick is for a node that the sweep did not ask for, lies outside the vocabulary, comes
            twice, or is missing for a node that lives; or rows were not asked for, or are of nodes that nobody sent; or
            log-probabilities are not those that were asked for.
    """
    asked = range(sweep.picks_from, sweep.first_id + len(sweep.tokens))
    for node, token in reply.picks:
        if node not in asked:
            raise RemoteProtocolError("picks", f"one after node {node}, for which nobody asked")
        if not 0 <= token < state.limits.vocab_size:
            raise RemoteProtocolError("picks", f"token {token} is outside the vocabulary")
    if any(first >= second for (first, _), (second, _) in pairwise(reply.picks)):
        raise RemoteProtocolError("picks", "are not in the order of their nodes")
    picked = {node for node, _ in reply.picks}
    for node in map(TreeNodeId, asked):
        if node not in picked and state.is_alive(node):
            raise RemoteProtocolError("picks", f"none for node {node}, which cannot be dead")
    _check_log_probs(reply, sweep, state.limits.vocab_size)
    if reply.rows is None:
        return
    _check_rows(reply, sweep, state)


def _check_rows(reply: Reply, sweep: Sweep, state: SessionState) -> None:
    prompt = [node for node in reply.row_ids if node in sweep.prompt_nodes]
    others = [node for node in reply.row_ids if node not in sweep.prompt_nodes]
    if sweep.want is None or (not sweep.want.hidden_rows and (others or not prompt)):
        raise RemoteProtocolError("rows", "were not asked for")
    if any(first >= second for first, second in pairwise(prompt)):
        raise RemoteProtocolError("rows", "are not in the order of their nodes")
    if len(others) > MAX_ROWS or any(node >= state.next_id for node in others):
        raise RemoteProtocolError("rows", "are of nodes that were never sent")


def _check_log_probs(reply: Reply, sweep: Sweep, vocab_size: int) -> None:
    asked = sweep.want is not None and sweep.want.log_probs
    if asked != (reply.log_probs is not None):
        raise RemoteProtocolError("log_probs", "are missing" if asked else "were not asked for")
    top = sweep.want.top_log_probs if sweep.want is not None and asked else 0
    found = reply.top_log_probs or ((),) * len(reply.picks)
    if any(len(best) != min(top, vocab_size) for best in found):
        raise RemoteProtocolError("top_log_probs", f"are not the {top} that were asked for")
    if any(token >= vocab_size for best in found for token, _ in best):
        raise RemoteProtocolError("top_log_probs", "has a token outside the vocabulary")
