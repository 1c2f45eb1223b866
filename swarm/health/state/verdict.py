"""How a model fares: from its nodes and probes to a verdict, its reason, and the command that helps most. Pure.

broken     some layer has no serving machine, or no chain of one numeric class, or the last two probes failed
degraded   the last probe failed, or broker and DHT disagree
serving    otherwise, also where a layer hangs on one machine: the margin, the fixes and an alert say so
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.discovery.coverage import serve_line
from swarm.health.state.node import Condition, NodeView, ReportedModel
from swarm.layers import Span, missing_layers, name_layers

MAX_FIXES = 8


class Grade(enum.StrEnum):
    """The verdict's word."""

    SERVING = "serving"
    DEGRADED = "degraded"
    BROKEN = "broken"

    @property
    def rank(self) -> int:
        """Higher is worse."""
        return list(Grade).index(self)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is the matter with a model.

    missing: layers without a serving machine. replicas: serving machines per layer. margin: machines that may go, any
    ones, before it breaks. fixes: commands, the one that helps most first.
    """

    grade: Grade
    reason: str
    missing: tuple[Span, ...]
    replicas: tuple[int, ...]
    margin: int
    fixes: tuple[str, ...]


def judge(model: ReportedModel, nodes: Sequence[NodeView], failures: int, join: Sequence[str]) -> Verdict:
    """Say how a model is.

    Args:
        model: which.
        nodes: all that is known of it.
        failures: probes that failed since the last that did not.
        join: an address of the swarm, for the commands.
    """
    serving = [node for node in nodes if node.condition is Condition.SERVING]
    replicas = count_replicas(serving, model.num_layers)
    missing = tuple(Span(*gap) for gap in missing_layers([node.span for node in serving], model.num_layers))
    survivable = sum(_fewest(kind, model.num_layers) for kind in _by_class(serving))
    grade, reason = _grade(missing, survivable, failures, serving)
    wanted = missing or (_weakest(replicas, serving) if survivable <= 1 and replicas else ())
    fixes = tuple(serve_line(model.name, span, join) for span in wanted[:MAX_FIXES])
    return Verdict(grade, reason, missing, replicas, max(survivable - 1, 0), fixes)


def count_replicas(serving: Iterable[NodeView], num_layers: int) -> tuple[int, ...]:
    """Machines per layer."""
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
    """A chain never mixes numeric classes, so each has to cover the model by itself."""
    classes: dict[str, list[NodeView]] = {}
    for node in serving:
        classes.setdefault(node.numeric_class, []).append(node)
    return list(classes.values())


def _fewest(nodes: Sequence[NodeView], num_layers: int) -> int:
    """How many machines hold the layer that the fewest hold: as many must go before these cover no chain."""
    return min(count_replicas(nodes, num_layers), default=0)


def _grade(missing: Sequence[Span], survivable: int, failures: int, serving: Sequence[NodeView]) -> tuple[Grade, str]:
    if missing:
        return Grade.BROKEN, f"nobody serves {name_layers(missing[:MAX_FIXES])}"
    if survivable == 0:
        return Grade.BROKEN, f"no chain of one numeric class covers it ({_classes(serving)})"
    if failures >= 2:
        return Grade.BROKEN, f"the last {failures} probes failed"
    if failures:
        return Grade.DEGRADED, "the last probe failed"
    torn = sum(node.disagrees for node in serving)
    if torn:
        return Grade.DEGRADED, f"broker and DHT disagree about {_machines(torn)}"
    if survivable == 1:
        return Grade.SERVING, "one machine away from breaking: some layers have a single one"
    return Grade.SERVING, f"every layer has at least {_machines(survivable)}"


def _weakest(replicas: Sequence[int], serving: Sequence[NodeView]) -> tuple[Span, ...]:
    """The layers that the fewest machines hold, in pieces as large as machines here take."""
    fewest, longest = min(replicas), max(len(node.span) for node in serving)
    spans: list[Span] = []
    start: int | None = None
    for layer, count in enumerate([*replicas, fewest + 1]):
        if count > fewest and start is not None:
            spans += [Span(at, min(at + longest, layer)) for at in range(start, layer, longest)]
            start = None
        elif count == fewest and start is None:
            start = layer
    return tuple(spans)


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


def _classes(serving: Sequence[NodeView]) -> str:
    return ", ".join(sorted(Counter(node.numeric_class for node in serving)))
