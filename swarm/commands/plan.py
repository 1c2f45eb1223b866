"""`swarm plan`: what a machine that joins with so many layers would change, and the command that joins."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from functools import partial

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm.base.cli_types import Count, Found, Milliseconds, Model, NetworkKeyFile, Peer
from swarm.base.errors import ConfigError
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span, SpanBorders, missing_layers
from swarm.commands.route import select_model, short
from swarm.directory.coverage import serve_line
from swarm.directory.dht.addresses import OPEN_SWARM, Membership
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.registry import Registry
from swarm.routing.latency import ghosts, measure_delays
from swarm.routing.placement import (
    JoinPlan,
    Layout,
    Newcomer,
    keep_to_borders,
    layout_of,
    plan_join,
    typical_capacity,
)
from swarm.routing.served import ServedModels

_YOU = PeerId("you")


@dataclass(frozen=True, slots=True)
class ShowPlan:
    """Print what a machine that joins would change: its layers, who holds what, the weakest layer.

    Layers that use each other's keys are planned for one machine, where the model's config is here or on the hub.

    Attributes:
        model: name or fingerprint of one model (default: the only one of the swarm).
        join: multiaddress of a peer of the swarm, or an invite (also without --join); may be repeated (default: the
            swarm joined last).
        num_layers: how many layers the machine would hold.
        ms: milliseconds that it takes for one layer in plain decoding (default: as a typical machine of
            this swarm).
        membership: of the swarm; not an option.
    """

    num_layers: Count
    join: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    model: tyro.conf.Positional[Model | None] = None
    ms: Milliseconds | None = None
    network_key: NetworkKeyFile = None
    membership: Found[Membership] = OPEN_SWARM

    def check(self) -> None:
        """Refuse options that are wrong for every swarm.

        Raises:
            ConfigError: names the option and what to write.
        """
        if not self.join:
            raise ConfigError("which swarm? use an invite, or give a peer's address with --join")
        if self.num_layers < 1:
            raise ConfigError(f"--num-layers {self.num_layers}: a machine holds at least 1")
        if self.ms is not None and not 0 < self.ms < float("inf"):
            raise ConfigError(f"--ms {self.ms:g}: milliseconds per layer are more than 0")


async def plan(command: ShowPlan, console: Console) -> None:
    """Print the plan.

    Raises:
        SwarmError: no such model or peer, or the model has fewer layers.
    """
    command.check()
    config = DhtConfig(join=command.join, client_mode=True, membership=command.membership)
    async with DhtRegistry.open(config) as registry:
        await show_plan(command, registry, console)


async def show_plan(command: ShowPlan, registry: Registry, console: Console) -> None:
    """The same through an open registry."""
    measure = partial(measure_delays, network=command.membership.network)
    model = await select_model(ServedModels(registry, measure), command.model)
    listed = await registry.records(model.fingerprint, model.num_layers, within_s=0.0)
    gone = await ghosts(listed, measure, random.SystemRandom())
    records = [record for record in listed if record.peer not in gone]
    Span(0, command.num_layers).within(model.num_layers)
    capacity = typical_capacity(records) if command.ms is None else 1e3 / command.ms
    layout = layout_of(records, model.num_layers, capacity)
    newcomer = Newcomer(_YOU, command.num_layers, capacity)
    found = plan_join(layout, newcomer)
    borders = await asyncio.to_thread(_borders, model)
    if borders is not None:
        found = keep_to_borders(found, layout, newcomer, borders)
    joined = layout.joined(replace(newcomer, num_layers=len(found.span)).at(found.span.start))
    console.print(Text(f"{model.name}: joining with {command.num_layers} layers at {1e3 / capacity:.2f} ms per layer"))
    console.print(Text(f"chosen: {found.span.describe(model.num_layers)}"))
    for line in _cuts(borders):
        console.print(Text(line))
    console.print(_table(layout, joined), soft_wrap=False)
    for line in (*_moves(found, joined, model), *_lines(command, found, model)):
        console.print(Text(line))


def _borders(model: ModelIdentity) -> SpanBorders | None:
    from swarm.files.borders import known_borders  # loads transformers

    return known_borders(model)


def _cuts(borders: SpanBorders | None) -> list[str]:
    """What a plan says of where the model may be cut; nothing where that is everywhere."""
    if borders is None:
        return ["where this model may be cut is not known here, as its config is not: a node takes the nearest layers"]
    together = ", ".join(str(span) for span in borders.together)
    return [f"layers that use each other's keys stay on one machine: {together}"] if together else []


def _table(before: Layout, joined: Layout) -> Table:
    table = Table()
    for title in ("", "now", "with this machine"):
        table.add_column(title, justify="right" if title else "left")
    for name, value_of in (
        ("layers that nobody holds", _gaps),
        ("layers with one holder", lambda layout: str(-layout.score().minus_singles)),
        ("fewest holders of a layer", lambda layout: str(int(layout.counts.min()))),
        ("weakest layer, sweeps/s", lambda layout: f"{layout.score().weakest:.2f}"),
    ):
        table.add_row(name, value_of(before), value_of(joined))
    return table


def _gaps(layout: Layout) -> str:
    gaps = missing_layers([holder.span for holder in layout.holders], layout.num_layers)
    return ", ".join(f"{start}-{end}" for start, end in gaps) or "none"


def _moves(found: JoinPlan, joined: Layout, model: ModelIdentity) -> list[str]:
    if not found.moves:
        return []
    lines = [
        f"then {short(move.peer)} would move from {move.old.describe(model.num_layers)} to "
        f"{move.new.describe(model.num_layers).partition(' ')[2]}"
        for move in found.moves
    ]
    gain = f"{joined.score().weakest:.2f} to {found.after.weakest:.2f} sweeps/s"
    return [
        *lines,
        f"that changes the weakest layer from {gain}, layers with one holder to {-found.after.minus_singles}",
    ]


def _lines(command: ShowPlan, found: JoinPlan, model: ModelIdentity) -> list[str]:
    auto = f"{serve_line(model.name, 'auto', command.join)} --num-layers {command.num_layers}"
    stays = serve_line(model.name, found.span, command.join)
    return [f"this takes them, and moves when it is needed elsewhere:\n{auto}", f"this takes them and stays:\n{stays}"]
