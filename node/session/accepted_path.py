"""The path that the tail's own walk accepts: its hidden rows travel back when a client wants them (P10). Pure.

from the tip follow the tail's picks while a child holds the picked token
where the tip's pick is not known (a prompt's token, or a pick that an earlier tail made and the client holds),
what certainly comes next is the first node of the last sweep, if that hangs from the tip
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarm.ids import TreeNodeId
from swarm.protocol.limits import MAX_REPLY_ROWS
from swarm.protocol.messages import Sweep
from swarm.protocol.session import Parent, SessionState


class AcceptedPath:
    """Keeps the picks after live nodes and the tip, no others."""

    def __init__(self) -> None:
        self._picks: dict[Parent, int] = {}

    def forget(self) -> None:
        """The session begins again from a snapshot."""
        self._picks = {}

    def note(self, picks: Mapping[TreeNodeId, int], state: SessionState, *, is_cut: bool) -> None:
        """Take the picks of a sweep that was run.

        Args:
            picks: token by tree node.
            state: of the session, the sweep included.
            is_cut: the sweep truncated first, so earlier picks are void.
        """
        known: dict[Parent, int] = {} if is_cut else dict(self._picks)
        known.update(picks.items())
        tip = _tip(state)
        self._picks = {node: token for node, token in known.items() if node == tip or node in state.live}

    def walk(self, state: SessionState, last: Sweep) -> list[TreeNodeId]:
        """Live nodes on the path, from below the tip down; `last` is the newest sweep, which `state` includes."""
        path: list[TreeNodeId] = []
        at: Parent = None
        tip = _tip(state)
        if tip not in self._picks and last.parents and last.parents[0] is None:
            self._picks[tip] = last.tokens[0]
        pick = self._picks.get(tip)
        while pick is not None and (child := state.child(at, pick)) is not None:
            path.append(child)
            at, pick = child, self._picks.get(child)
        return path


def _tip(state: SessionState) -> Parent:
    return state.committed[-1].id if state.committed else None


def requested_rows(sweep: Sweep, path: Iterable[TreeNodeId]) -> tuple[TreeNodeId, ...]:
    """The nodes whose hidden rows answer a sweep: its own on the path whose picks are asked for, the deepest ones."""
    if sweep.want is None or not sweep.want.hidden_rows:
        return ()
    end = sweep.first_id + len(sweep.tokens)
    return tuple(node for node in path if sweep.picks_from <= node < end)[-MAX_REPLY_ROWS:]
