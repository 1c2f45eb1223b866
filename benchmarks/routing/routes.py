"""How long does finding a route take, how good is it, and how do clients spread?

Swarms of random machines; no node runs.

    python -m benchmarks routing --record
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from statistics import median

import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.sheet import Recording, Sheet
from swarm.discovery.node_record import MAX_DELAYS, NodeRecord, NodeState
from swarm.ids import ModelIdentity, PeerId
from swarm.layers import Span
from swarm.routing.route import Route, RouteQuery, best_route
from swarm.runtime.cli import make_console

CLIENTS = 200
HOLDERS = 10


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure routing."""

    layers: int = 80
    """Layers of the model."""
    peers: int = 1_000
    """Machines of each swarm."""
    least: int = 4
    """Fewest layers of a span."""
    most: int = 20
    """The most layers of a machine."""
    swarms: int = 5
    """How many random swarms."""
    repeats: int = 20
    """How often each is measured."""
    seed: int = 1
    """Of all that is random."""


@dataclass(frozen=True, slots=True)
class Terrain:
    """Where machines stand, and how fast they are.

    Attributes:
        across_ms: One-way delay from side to side.
        layer_ms: Times per layer that machines may have.
    """

    name: str
    across_ms: float
    layer_ms: tuple[float, ...]


TERRAINS = (
    Terrain("wide area, 1 to 85 ms", 60.0, (1.0, 2.0, 5.0, 20.0)),
    Terrain("one site, up to 0.5 ms", 0.3, (0.2, 1.0, 5.0, 20.0)),
)


@dataclass(frozen=True, slots=True)
class FoundRoute:
    """One route.

    Attributes:
        times_ms: Milliseconds of each search for it.
        gap_ms: How much cheaper a chain may be at most.
    """

    times_ms: tuple[float, ...]
    hops: int
    sweep_ms: float
    gap_ms: float


def random_swarm(terrain: Terrain, options: Options, rng: random.Random) -> tuple[list[NodeRecord], RouteQuery]:
    """Machines in a square, each with the delays to 16 of those that may follow it, and a client in the middle."""
    places = [(rng.random(), rng.random()) for _ in range(options.peers)]
    sizes = [rng.randint(options.least, options.most) for _ in places]
    spans = [Span(start, start + size) for size in sizes for start in [rng.randint(0, options.layers - size)]]
    peers = [PeerId(f"peer{number:05}") for number in range(options.peers)]

    def delay_ms(place: tuple[float, float], other: int) -> float:
        return 0.1 + terrain.across_ms * math.dist(place, places[other])

    records = []
    for number, span in enumerate(spans):
        after = [other for other, it in enumerate(spans) if other != number and it.start <= span.end < it.end]
        asked = rng.sample(after, min(MAX_DELAYS, len(after)))
        layer_ms, busy = rng.choice(terrain.layer_ms), rng.choice([0.0, 0.3, 0.8])
        sweep_ms = tuple((nodes, layer_ms * len(span) * (1 + nodes / 16)) for nodes in (1, 8, 64))
        delays_ms = tuple((peers[other], delay_ms(places[number], other)) for other in asked)
        plain = _record(peers[number], span, options.layers)
        records.append(replace(plain, sweep_ms=sweep_ms, busy=busy, delays_ms=delays_ms))
    ends = [number for number, span in enumerate(spans) if span.start == 0 or span.end == options.layers]
    near = {peers[number]: delay_ms((0.5, 0.5), number) for number in rng.sample(ends, min(16, len(ends)))}
    return records, RouteQuery("big", options.layers, delays_ms=near)


def _record(peer: PeerId, span: Span, layers: int) -> NodeRecord:
    model = ModelIdentity("big", "f" * 64, "c" * 64, "e" * 64, "d" * 64, layers)
    serving = NodeState.SERVING
    return NodeRecord(
        peer, model, span, "192.0.2.1:1", serving, "cpu-float32", "0", None, ((1, 10.0),), 10_000, 10_000, 1, 0.0
    )


def repair_of(route: Route, query: RouteQuery) -> RouteQuery:
    """The query after the middle hop has died."""
    dead = route.hops[len(route.hops) // 2]
    kept = tuple(hop for hop in route.hops if hop != dead)
    return replace(query, keep=kept, avoid=frozenset([dead.peer]), replay_layer_ms=20.0)


def timed(records: list[NodeRecord], query: RouteQuery, repeats: int) -> FoundRoute:
    """Find the route again and again."""
    times_ms: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        route = best_route(records, query)
        times_ms.append((time.perf_counter() - started) * 1e3)
    return FoundRoute(tuple(times_ms), len(route.hops), route.sweep_ms, route.gap_ms)


def measure(options: Options, console: Console) -> dict[str, list[FoundRoute]]:
    """Per case, one entry per swarm."""
    rng = random.Random(options.seed)
    found: dict[str, list[FoundRoute]] = defaultdict(list)
    for terrain in TERRAINS:
        for _ in track(range(options.swarms), terrain.name, console=console):
            records, query = random_swarm(terrain, options, rng)
            repair = repair_of(best_route(records, query), query)
            for name, wanted in {"fastest": query, "spread": replace(query, seed=1), "repair": repair}.items():
                found[f"{terrain.name}: {name}"].append(timed(records, wanted, options.repeats))
    return found


def spread(options: Options) -> Counter[PeerId]:
    """Which machines many clients take where every span has equal replicas."""
    size = options.most
    spans = [Span(start, min(start + size, options.layers)) for start in range(0, options.layers, size)]
    records = [_record(PeerId(f"{span}/{holder}"), span, options.layers) for span in spans for holder in range(HOLDERS)]
    routes = [best_route(records, RouteQuery("big", options.layers, seed=client)) for client in range(CLIENTS)]
    return Counter(hop.peer for route in routes for hop in route.hops)


def sheet(found: dict[str, list[FoundRoute]], taken: Counter[PeerId], options: Options) -> Sheet:
    made = Sheet(
        "routing",
        f"A route over {options.layers} layers, {options.peers:,} peers with {options.least} to {options.most} layers "
        f"each; {options.swarms} random swarms, {options.repeats} repeats, ms",
        ("case", "median", "worst swarm's median", "worst", "hops", "gap"),
        measured={
            "cases": {name: [asdict(one) for one in some] for name, some in found.items()},
            "taken": sorted(taken.values()),
        },
    )
    for name, some in found.items():
        medians = [median(one.times_ms) for one in some]
        worst = max(max(one.times_ms) for one in some)
        gap = max(one.gap_ms / one.sweep_ms for one in some)
        cells = [f"{ms:.1f}" for ms in (median(medians), max(medians), worst)]
        made.rows.append((name, *cells, f"{median(one.hops for one in some):g}", f"{gap:.2%}"))
    made.notes = [
        "Gap: what the cheapest chain may be below the one found, since a machine may stand in a chain once only.",
        f"{CLIENTS} clients, {HOLDERS} equal holders of each span: {min(taken.values())} to {max(taken.values())} "
        f"clients on a machine, {CLIENTS / HOLDERS:.0f} expected.",
    ]
    return made


def main() -> None:
    options = tyro.cli(Options)
    console = make_console()
    made = sheet(measure(options, console), spread(options), options)
    made.finish(console, options)
