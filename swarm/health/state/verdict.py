"""How a model fares: from its nodes and probes to a verdict, its reason, and the commands that help. Pure.

broken     some layer has no serving machine, or no chain of one numeric class, or the last two probes failed
degraded   the last probe failed, or broker and DHT disagree
serving    otherwise, also where a layer hangs on one machine: the margin, the fixes and an alert say so
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.base.layers import Span, missing_layers, name_layers
from swarm.directory.coverage import serve_line
from swarm.health.state.node import Condition, NodeView
from swarm.health.state.probe_results import ProbeLog
from swarm.status.messages import ServedModel

MAX_FIXES = 8


class Grade(enum.StrEnum):
    SERVING = "serving"
    DEGRADED = "degraded"
    BROKEN = "broken"

    @property
    def rank(self) -> int:
        """Higher is worse."""
        return list(Grade).index(self)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a model fares, and why.

    Attributes:
        reason: one line for people.
        missing: layers without a serving machine.
        replicas: serving machines per layer.
        margin: machines, whichever they are, that may go while the model still works.
        fixes: commands, the one that helps most first.
    """

    grade: Grade
    reason: str
    missing: tuple[Span, ...]
    replicas: tuple[int, ...]
    margin: int
    fixes: tuple[str, ...]


def judge(model: ServedModel, nodes: Sequence[NodeView], failures: int, join: Sequence[str]) -> Verdict:
    """Judge a model."""
    serving = [node for node in nodes if node.condition is Condition.SERVING]
    replicas = count_replicas(serving, model.num_layers)
    missing = tuple(Span(*gap) for gap in missing_layers([node.span for node in serving], model.num_layers))
    holders = sum(_min_holders(one_class, model.num_layers) for one_class in _by_class(serving))
    grade, reason = _grade(missing, holders, failures, serving)
    weak_spans = missing or (_weakest(replicas, serving) if holders <= 1 and replicas else ())
    fixes = tuple(serve_line(model.name, span, join) for span in weak_spans[:MAX_FIXES])
    return Verdict(grade, reason, missing, replicas, max(holders - 1, 0), fixes)


def count_replicas(serving: Iterable[NodeView], num_layers: int) -> tuple[int, ...]:
    """Serving machines per layer."""
    steps = [0] * (num_layers + 1)
    for node in serving:
        steps[node.span.start] += 1
        steps[node.span.end] -= 1
    counts, sum_so_far = [], 0
    for step in steps[:-1]:
        sum_so_far += step
        counts.append(sum_so_far)
    return tuple(counts)


def _by_class(serving: Sequence[NodeView]) -> list[list[NodeView]]:
    """Nodes by numeric class: a chain never mixes classes, so each has to cover the model by itself."""
    classes: dict[str, list[NodeView]] = {}
    for node in serving:
        classes.setdefault(node.numeric_class, []).append(node)
    return list(classes.values())


def _min_holders(nodes: Sequence[NodeView], num_layers: int) -> int:
    """Machines of the layer that the fewest hold: as many must go before these machines form no chain."""
    return min(count_replicas(nodes, num_layers), default=0)


def _grade(missing: Sequence[Span], holders: int, failures: int, serving: Sequence[NodeView]) -> tuple[Grade, str]:
    if missing:
        return Grade.BROKEN, f"nobody serves {name_layers(missing[:MAX_FIXES])}"
    if holders == 0:
        return Grade.BROKEN, f"no chain of one numeric class covers it ({_classes(serving)})"
    if failures >= 2:
        return Grade.BROKEN, f"the last {failures} probes failed"
    if failures:
        return Grade.DEGRADED, "the last probe failed"
    disagreeing = sum(node.disagrees for node in serving)
    if disagreeing:
        return Grade.DEGRADED, f"broker and DHT disagree about {_machines(disagreeing)}"
    if holders == 1:
        return Grade.SERVING, "no machine to spare: some layers have a single one"
    return Grade.SERVING, f"every layer has at least {_machines(holders)}"


def _weakest(replicas: Sequence[int], serving: Sequence[NodeView]) -> tuple[Span, ...]:
    """The layers that the fewest machines hold, in pieces as large as machines here take."""
    min_count, max_length = min(replicas), max(len(node.span) for node in serving)
    spans: list[Span] = []
    start: int | None = None
    for layer, count in enumerate([*replicas, min_count + 1]):
        if count > min_count and start is not None:
            spans += [Span(at, min(at + max_length, layer)) for at in range(start, layer, max_length)]
            start = None
        elif count == min_count and start is None:
            start = layer
    return tuple(spans)


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


def _classes(serving: Sequence[NodeView]) -> str:
    return ", ".join(sorted(Counter(node.numeric_class for node in serving)))


class LinkState(enum.StrEnum):
    """How the connection to one of the two sources is."""

    OFF = "off"
    CONNECTED = "connected"
    OK = "ok"
    DOWN = "down"


@dataclass(slots=True)
class SourceStatus:
    """The connection to the broker, or to the DHT, and since when its state holds (Unix seconds)."""

    state: LinkState = LinkState.OFF
    since: float = 0.0

    def change_to(self, state: LinkState, now: float) -> bool:
        """Set the state; whether it is another one."""
        if state is self.state:
            return False
        self.state, self.since = state, now
        return True

    def shown(self) -> dict[str, object]:
        return {"state": self.state.value, "since": round(self.since, 3)}


@dataclass(frozen=True, slots=True)
class Assessment:
    """One model, its nodes, and the verdict.

    Attributes:
        since: when the verdict became what it is, in Unix seconds.
    """

    model: ServedModel
    nodes: Sequence[NodeView]
    verdict: Verdict
    since: float
    log: ProbeLog
