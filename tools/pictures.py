"""`python -m tools.pictures`: draws docs/img/*.svg. Three of them show a sweep that tools/one_sweep.py recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tools.drawing import Drawing

FOLDER: Final = Path(__file__).resolve().parent.parent / "docs" / "img"
SHOWN: Final = 1
"""Which of the recorded sweeps the pictures show."""
COLUMN, ROW, BOX = 129, 52, (108, 38)
ROW_BYTES = 192 * 4
"""Bytes of one hidden row of the demo model in fp32."""
SPANS = ("layers 0…3", "layers 4…7", "layers 8…11")

Sweep = dict[str, Any]


def accepted(sweep: Sweep) -> list[int]:
    """The accepted nodes: the walk from the root along the picks, while a child holds the picked token."""
    nodes, picks, at = sweep["nodes"], sweep["picks"], None
    walk: list[int] = []
    while True:
        pick = picks["root" if at is None else str(at)]
        found = [i for i, node in enumerate(nodes) if node["parent"] == at and node["token"] == pick]
        if not found:
            return walk
        at = found[0]
        walk.append(at)


def places(sweep: Sweep) -> dict[int | None, tuple[int, float]]:
    """Level and row of every node in the picture; the root is None."""
    children: dict[int | None, list[int]] = {}
    for number, node in enumerate(sweep["nodes"]):
        children.setdefault(node["parent"], []).append(number)
    found: dict[int | None, tuple[int, float]] = {}
    free = 0.0

    def place(node: int | None, level: int) -> float:
        nonlocal free
        below = [place(child, level + 1) for child in children.get(node, [])]
        if not below:
            below = [free]
            free += 1
        found[node] = level, below[0]
        return below[0]

    place(None, 0)
    return found


def shown(token: str) -> str:
    """A token as a line of a box."""
    return f"`{token.strip() or '␣'}"


def brief(token: str) -> str:
    """A token, shortened to 8 characters."""
    text = token.strip()
    return text if len(text) <= 8 else f"{text[:7]}…"


def tree(record: dict[str, Any]) -> Drawing:
    """The token tree of one sweep, with the accepted path."""
    sweep = record["sweeps"][SHOWN]
    nodes, at, walk = sweep["nodes"], places(sweep), accepted(sweep)
    rows = int(max(row for _, row in at.values())) + 1
    last = sweep["picks"][str(walk[-1]) if walk else "root"]
    words = " ".join(nodes[i]["token"].strip() for i in walk)
    drawing = Drawing(
        960, 84 + ROW * rows + 44, "The token tree of one sweep",
        f"Below the pending token {sweep['pending'].strip()} hang {len(nodes)} guesses. The walk accepts {words}; "
        f"then the target picks {last.strip()}.",
    )  # fmt: skip
    drawing.words((28, 36), f"One sweep's tree: {len(nodes)} guesses below the pending token", "title")
    drawing.words((28, 58), "Under each guess: its acceptance probability, and the target's pick after it. "
                  "Green: the walk.")  # fmt: skip

    def corner(node: int | None) -> tuple[float, float]:
        level, row = at[node]
        return 28 + COLUMN * level, 84 + ROW * row

    def side(node: int | None, right: bool) -> tuple[float, float]:
        x, y = corner(node)
        return x + BOX[0] * right, y + BOX[1] / 2

    for number, node in enumerate(nodes):
        kind = "walk" if number in walk else "line"
        drawing.curve(side(node["parent"], right=True), side(number, right=False), kind)
    drawing.box(corner(None), BOX, "ask", [shown(sweep["pending"]), "pending"])
    for number, node in enumerate(nodes):
        lines = [shown(node["token"]), f"{node['chance']:.2f} → {brief(sweep['picks'][str(number)])}"]
        drawing.box(corner(number), BOX, "yes" if number in walk else "plain", lines)
    tail = walk[-1] if walk else None
    end = corner(tail)[0] + COLUMN, corner(tail)[1]
    drawing.curve(side(tail, right=True), (end[0], end[1] + BOX[1] / 2), "walk")
    drawing.box(end, BOX, "next", [shown(last), "new pending"])
    drawing.words((28, 84 + ROW * rows + 20), f"{len(walk)} guesses were right, and the target's own next token comes "
                  f"with them: {sweep['emitted']} tokens for one sweep.", "")  # fmt: skip
    return drawing


def chain(record: dict[str, Any]) -> Drawing:
    """One sweep through the chain, with its times."""
    sweep = record["sweeps"][SHOWN]
    hops, total, count = sweep["hops"], sweep["total_ms"], len(sweep["nodes"]) + 1
    drawing = Drawing(
        960, 330, "One sweep through the chain",
        f"From the client through three nodes and straight back, {total:.0f} milliseconds in all.",
    )  # fmt: skip
    drawing.words((28, 36), f"The same sweep on its way: {total:.0f} ms there and back", "title")
    drawing.words((28, 58), f"Three nodes on one machine, every link {record['delay_ms']:g} ms one way. "
                  f"A row is {ROW_BYTES} bytes: {count * ROW_BYTES / 1e3:.0f} kB from node to node.")  # fmt: skip
    names = ("client", "hop 0", "hop 1", "tail")
    holds = (("holds the draft",), (f"embedding, {SPANS[0]}",), (SPANS[1],), (f"{SPANS[2]}, head, picks",))
    size, y = (0, 64), 88
    lefts, widths = (28, 242, 522, 742), (130, 184, 124, 190)
    for left, width, name, holding in zip(lefts, widths, names, holds, strict=True):
        drawing.box((left, y), (width, size[1]), "ask" if name == "client" else "plain", [name, *holding])
    ends = [(left + width, right) for left, width, right in zip(lefts, widths, lefts[1:], strict=False)]
    labels = (f"{count} ids", f"{count} rows", f"{count} rows")
    for (start, end), label in zip(ends, labels, strict=True):
        drawing.arrow((start, y + 32), (end, y + 32), label=label)
    drawing.path([(837, y + 64), (837, y + 92), (93, y + 92), (93, y + 66)])
    drawing.words((480, y + 86), f"{count} picks, straight to the client", "soft", "middle")
    parts = [("link", sweep["first_link_ms"], "plain")]
    for number, hop in enumerate(hops):
        parts += [(("hop 0", "hop 1", "tail")[number], hop["compute_ms"], "yes"), ("link", hop["link_ms"], "plain")]
    scale = 904 / max(total, sum(ms for _, ms, _ in parts))
    x, top = 28.0, 224
    for name, ms, kind in parts:
        drawing.box((x, top), (ms * scale, 44), kind, [f"{ms:.0f}"])
        drawing.words((x + ms * scale / 2, top + 62), name, "soft", "middle")
        x += ms * scale
    computed = sum(hop["compute_ms"] for hop in hops)
    drawing.words((28, top + 90), f"{computed:.0f} ms of computing; nearly all the rest is distance, and would be the "
                  "same for a single token.", "")  # fmt: skip
    return drawing


def commit(record: dict[str, Any]) -> Drawing:
    """What a commit does to the KV cache of every hop."""
    sweep = record["sweeps"][SHOWN]
    nodes, walk = sweep["nodes"], accepted(sweep)
    drawing = Drawing(
        960, 300, "Commit",
        "The next sweep names the last certain node; every hop keeps its ancestors' KV and frees the others.",
    )  # fmt: skip
    drawing.words((28, 36), "Commit: what every hop does with its KV", "title")
    drawing.words((28, 58), "The next sweep says which node is the last certain one. "
                  "No message is spent on what was rejected.")  # fmt: skip
    width, gap, left = 56, 6, 172
    rows = ((96, "after the sweep", True), (186, "after the commit", False))
    for top, name, before in rows:
        drawing.words((28, top + 22), name, "")
        drawing.box((left, top), (70, 36), "ask", ["…"])
        kept = [shown(sweep["pending"]), *(shown(nodes[i]["token"]) for i in walk)]
        if before:
            labels = [kept[0], *(shown(node["token"]) for node in nodes)]
            kinds = ["warm", *("yes" if i in walk else "plain" for i in range(len(nodes)))]
        else:
            labels, kinds = [*kept, *[""] * (len(nodes) - len(walk))], [*["ask"] * len(kept), *["next"] * 0]
        for slot, label in enumerate(labels):
            x = left + 76 + slot * (width - 4)
            kind = kinds[slot] if slot < len(kinds) else "card"
            drawing.box((x, top), (width - 4 - gap, 36), kind, [label] if label else [])
    drawing.words((left + 2, 152), "committed", "soft")
    drawing.words((left + 82, 152), "pending")
    drawing.words((left + 150, 152), f"{len(nodes)} live tree nodes")
    drawing.words((left, 242), "committed, in order: no gaps are left")
    drawing.words((left + 76 + (len(walk) + 1) * (width - 4) + 8, 242), "free for the next tree")
    drawing.words((28, 278), "A position never changes (committed length + depth), so nothing is computed again: "
                  "entries only move.", "")  # fmt: skip
    return drawing


def pipe() -> Drawing:
    drawing = Drawing(
        960, 346, "Sweeps in flight", "A second part of the tree leaves before the first part's answer has come."
    )
    drawing.words((28, 36), "The pipeline: the tree grows on while its first part is in flight", "title")
    drawing.words((28, 58), "Schematic. Time runs to the right; a lane is a machine, slanted lines are the network.")
    lanes = {"client": 96, "hop 0": 146, "hop 1": 196, "tail": 246}
    for name, y in lanes.items():
        drawing.words((28, y + 15), name, "bold")
        drawing.path([(100, y + 11), (932, y + 11)], "dashed", arrow=False)
    for start, name, kind in ((110, "A", "ask"), (250, "B", "warm"), (390, "C", "yes")):
        drawing.box((start, 96), (66, 22), "plain", [f"draft {name}"])
        x = start + 66.0
        previous = (x, 107.0)
        for lane in ("hop 0", "hop 1", "tail"):
            x += 58
            drawing.path([previous, (x, lanes[lane] + 11.0)], "line")
            drawing.box((x, lanes[lane]), (70, 22), kind, [name])
            x += 70
            previous = (x, lanes[lane] + 11.0)
        drawing.path([previous, (previous[0] + 58, 120)], "walk")
    drawing.words((28, 304), "The parents of B are nodes of A whose picks are not known yet. If the walk goes on in "
                  "B, that part is verified already;", "")  # fmt: skip
    drawing.words((28, 324), "the hops drop what the walk leaves behind, without a message.", "")
    return drawing


def repair() -> Drawing:
    """The repair of a chain whose second hop is lost."""
    drawing = Drawing(
        960, 356, "Repair", "Hop 1 dies. The client routes around it, hop 0 replays its rows to the newcomer."
    )
    drawing.words((28, 36), "When a machine dies in the middle of a text", "title")
    steps = (
        ("before", "generation 1", ("plain", ["hop 1", "layers 4…7"]), "line",
         ("every hop keeps a journal of", "the rows that it sent")),
        ("hop 1 is gone", "", ("no", ["hop 1", "✕ silent"]), "dashed",
         ("seen at once, or by its silence;", "the client chooses a new route")),
        ("repaired", "generation 2", ("yes", ["newcomer", "layers 4…7"]), "walk",
         ("only the newest generation", "is heard: no late harm")),
    )  # fmt: skip
    for row, (name, generation, (kind, lines), arrow, remarks) in enumerate(steps):
        y = 64 + 78 * row
        drawing.words((28, y + 20), name, "bold")
        drawing.words((28, y + 38), generation)
        drawing.box((160, y), (130, 46), "plain", ["hop 0", "journal of rows"])
        drawing.box((388, y), (130, 46), kind, lines)
        drawing.box((588, y), (130, 46), "plain", ["tail", "keeps its KV"])
        drawing.arrow((290, y + 23), (388, y + 23), arrow, "replays" if row == 2 else "")
        drawing.arrow((518, y + 23), (588, y + 23), arrow, "")
        for line, remark in enumerate(remarks):
            drawing.words((738, y + 20 + 18 * line), remark)
    drawing.words((28, 316), "Hop 0 sends the newcomer what it had sent to the dead one; the tail gets only what it "
                  "has not received.", "")  # fmt: skip
    drawing.words((28, 336), "The text goes on, in fp32 token for token the same.", "")
    return drawing


def main() -> None:
    record = json.loads((FOLDER / "sweep.json").read_text(encoding="utf-8"))
    drawings = {"tree": tree(record), "chain": chain(record), "commit": commit(record), "pipe": pipe(),
                "repair": repair()}  # fmt: skip
    for name, drawing in drawings.items():
        (FOLDER / f"{name}.svg").write_text(drawing.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
