"""The layer map in characters: layers across, machines per layer on top, one row per machine. Pure.

Where there are more layers than columns, a column stands for several and shows the worst of them. Every colour has a
glyph beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from swarm.health.remote.state import ModelShown, NodeShown
from swarm.top.format import NONE, STATES, fitted, line, short_layers

MAX_PER_LAYER: Final = 8
LABEL: Final = 16
GAP: Final = "╎"
TICK_CELLS: Final = 6
_STEPS: Final = (1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 80, 100, 128, 200, 256, 512, 1_024)


@dataclass(frozen=True, slots=True)
class Columns:
    """Which cells show which layers: a layer takes several cells, or a cell shows several layers.

    Attributes:
        num_layers: of the model.
        width: cells of the whole map.
    """

    num_layers: int
    width: int

    @classmethod
    def fit(cls, num_layers: int, room: int) -> Columns:
        """The widest map for the room, in whole cells per layer where that is possible."""
        room = max(room, 1)
        per_layer = min(room // max(num_layers, 1), MAX_PER_LAYER)
        return cls(num_layers, num_layers * per_layer if per_layer else room)

    @property
    def per_cell(self) -> float:
        """Layers in a cell."""
        return self.num_layers / max(self.width, 1)

    def cell(self, layer: int) -> int:
        """The cell at which a layer begins."""
        return min(layer, self.num_layers) * self.width // max(self.num_layers, 1)

    def cells(self, span: tuple[int, int]) -> tuple[int, int]:
        """Cells of a span, at least one."""
        start = min(self.cell(span[0]), self.width - 1)
        return start, max(self.cell(span[1]), start + 1)

    def layers(self, cell: int) -> range:
        """The layers that a cell shows."""
        first = cell * self.num_layers // max(self.width, 1)
        last = -(-(cell + 1) * self.num_layers // max(self.width, 1))
        return range(first, max(last, first + 1))


def head(model: ModelShown, room: int) -> list[Text]:
    """The axis and the count of machines per layer."""
    columns = Columns.fit(model.num_layers, room - LABEL)
    counts = line((fitted("machines", LABEL), "dim"))
    per_layer = columns.width // model.num_layers if model.num_layers else 0
    for cell in range(columns.width):
        min_count = min(
            (model.replicas[layer] for layer in columns.layers(cell) if layer < len(model.replicas)), default=0
        )
        is_first = per_layer <= 1 or cell % per_layer == 0
        counts.append(*_count(min_count, is_first))
    return [line((fitted("layer", LABEL), "dim"), (_axis(columns), "dim")), counts]


def _count(min_count: int, is_first: bool) -> tuple[str, str]:
    """A cell of the row of counts; the number stands at the layer's first cell."""
    if min_count <= 0:
        return "✗", "bold red"
    text = (str(min_count) if min_count < 10 else "+") if is_first else "·"
    return text, "bold yellow" if min_count == 1 else "green"


def _axis(columns: Columns) -> str:
    width = max(columns.width, 1)
    every = next((step for step in _STEPS if step * width >= TICK_CELLS * columns.num_layers), 2_048)
    text = ""
    for layer in range(0, columns.num_layers, every):
        label = str(layer)
        at = columns.cell(layer)
        if at >= len(text) and at + len(label) <= width:
            text = text.ljust(at) + label
    return text.ljust(width)


def in_order(nodes: Sequence[NodeShown]) -> list[NodeShown]:
    """The nodes by span, so that a change of state moves nothing."""
    return sorted(nodes, key=lambda node: (node.span[0], -node.span[1], node.peer))


def row(node: NodeShown, model: ModelShown, room: int) -> Text:
    """One machine's bar; gaps are drawn through all rows."""
    columns = Columns.fit(model.num_layers, room - LABEL)
    sign = STATES.get(node.state, NONE)
    start, end = columns.cells(node.span)
    gaps = {cell for missing in model.missing for cell in range(*columns.cells(missing))}
    left, right = _gapped(range(start), gaps), _gapped(range(end, columns.width), gaps)
    label = line((sign.glyph, sign.style), " ", fitted(node.label, LABEL - 3), " ")
    label.append_text(left)
    label.append(_bar(sign.fill, end - start, node), sign.style)
    label.append_text(right)
    return label


def _bar(fill: str, cells: int, node: NodeShown) -> str:
    """The bar; it names a state other than serving, where there is room."""
    bar = fill * cells
    word = f" {node.state} {short_layers(node.span)} "
    return bar if node.state == "serving" or len(word) + 2 > cells else word.center(cells, fill)


def _gapped(cells: range, gaps: set[int]) -> Text:
    text = Text(end="")
    for cell in cells:
        if cell in gaps:
            text.append(GAP, "red")
        else:
            text.append(" ")
    return text
