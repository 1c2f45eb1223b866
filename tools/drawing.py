"""An SVG picture of boxes, arrows and text; its colours follow the reader's light or dark scheme. Reads no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

STYLE = """
svg{--card:#ffffff;--edge:#d0d7de;--ink:#1f2328;--soft:#59636e;--line:#818b98;
--plain:#eef1f4;--yes:#dafbe1;--yes-edge:#1a7f37;--ask:#ddf4ff;--ask-edge:#0969da;--no:#ffebe9;--no-edge:#cf222e;
--warm:#fff8c5;--warm-edge:#9a6700}
@media(prefers-color-scheme:dark){svg{--card:#0d1117;--edge:#3d444d;--ink:#f0f6fc;--soft:#9198a1;--line:#656c76;
--plain:#1c2128;--yes:#12361f;--yes-edge:#3fb950;--ask:#0f2a4d;--ask-edge:#58a6ff;--no:#40171a;--no-edge:#f85149;
--warm:#3a2d0c;--warm-edge:#d29922}}
text{font:14px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:var(--ink)}
.soft{fill:var(--soft);font-size:12.5px}.title{font-size:16px;font-weight:600}.bold{font-weight:600}
.token{font-family:ui-monospace,'DejaVu Sans Mono',monospace}
.card{fill:var(--card);stroke:var(--edge)}
.plain{fill:var(--plain);stroke:var(--line)}.yes{fill:var(--yes);stroke:var(--yes-edge);stroke-width:2}
.ask{fill:var(--ask);stroke:var(--ask-edge);stroke-width:1.5}.no{fill:var(--no);stroke:var(--no-edge);stroke-width:1.5}
.warm{fill:var(--warm);stroke:var(--warm-edge);stroke-width:1.5}
.next{fill:var(--card);stroke:var(--yes-edge);stroke-width:2;stroke-dasharray:5 4}
.line{fill:none;stroke:var(--line);stroke-width:1.5}.walk{fill:none;stroke:var(--yes-edge);stroke-width:2.5}
.dashed{fill:none;stroke:var(--line);stroke-width:1.5;stroke-dasharray:5 4}
.tip{fill:var(--line)}.walk-tip{fill:var(--yes-edge)}
"""


@dataclass(slots=True)
class Drawing:
    """Shapes on a card; coordinates are pixels from its upper left corner.

    Attributes:
        width: of the card, in pixels.
        height: of the card, in pixels.
        title: the picture's name, for screen readers.
        description: what the picture shows, for screen readers.
    """

    width: int
    height: int
    title: str
    description: str
    _shapes: list[str] = field(default_factory=list)

    def box(self, at: tuple[float, float], size: tuple[float, float], kind: str, lines: Sequence[str] = ()) -> None:
        """A box with centred lines of text.

        Args:
            kind: class of the style sheet.
            lines: the first is bold, the others soft; one that begins with ` is a token.
        """
        (x, y), (width, height) = at, size
        self._shapes.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7"/>')
        top = y + height / 2 + 5 - 8.5 * (len(lines) - 1)
        for number, line in enumerate(lines):
            kinds = "token bold" if line.startswith("`") else "soft" if number else "bold"
            self.words((x + width / 2, top + 17 * number), line.removeprefix("`"), kinds, "middle")

    def words(self, at: tuple[float, float], text: str, kind: str = "soft", anchor: str = "start") -> None:
        self._shapes.append(
            f'<text class="{kind}" x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}" '
            f'xml:space="preserve">{escape(text)}</text>'
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float], kind: str = "line", label: str = "") -> None:
        """A straight arrow with a label above its middle."""
        tip = "walk" if kind == "walk" else "tip"
        self._shapes.append(
            f'<path class="{kind}" d="M{start[0]:g} {start[1]:g}L{end[0]:g} {end[1]:g}" marker-end="url(#{tip})"/>'
        )
        if label:
            self.words(((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 7), label, "soft", "middle")

    def curve(self, start: tuple[float, float], end: tuple[float, float], kind: str = "line") -> None:
        """A line that leaves and arrives horizontally."""
        middle = (start[0] + end[0]) / 2
        self._shapes.append(
            f'<path class="{kind}" d="M{start[0]:g} {start[1]:g}C{middle:g} {start[1]:g} {middle:g} {end[1]:g} '
            f'{end[0]:g} {end[1]:g}"/>'
        )

    def path(self, points: Sequence[tuple[float, float]], kind: str = "line", *, arrow: bool = True) -> None:
        """A line through several points, with or without an arrow at its end."""
        drawn = "L".join(f"{x:g} {y:g}" for x, y in points)
        end = f' marker-end="url(#{"walk" if kind == "walk" else "tip"})"' if arrow else ""
        self._shapes.append(f'<path class="{kind}" d="M{drawn}"{end}/>')

    def svg(self) -> str:
        tips = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path class="{kind}" d="M0 0L10 5L0 10z"/></marker>'
            for name, kind in (("tip", "tip"), ("walk", "walk-tip"))
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-labelledby="t d">\n<title id="t">{escape(self.title)}</title>\n'
            f'<desc id="d">{escape(self.description)}</desc>\n<style>{STYLE}</style>\n<defs>{tips}</defs>\n'
            f'<rect class="card" x=".5" y=".5" width="{self.width - 1}" height="{self.height - 1}" rx="12"/>\n'
        )
        return head + "\n".join(self._shapes) + "\n</svg>\n"
