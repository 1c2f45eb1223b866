"""A model's verdict as a small SVG for other people's pages. Pure: a state in, text out."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import Environment

MAX_LABEL: Final = 60
PADDING: Final = 6
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that XML forbids, or that would reverse the text beside them."""
_COLOURS: Final = {"serving": "#14613f", "degraded": "#7d5200", "broken": "#a8231b"}
_GREY: Final = "#55615a"
_NARROW, _WIDE = frozenset(" !'(),.:;I[]fijlrt|·"), frozenset("%@MWmw…—")

_TEMPLATE: Final = Environment(autoescape=True).from_string(
    """\
<svg xmlns="http://www.w3.org/2000/svg" width="{{ left + right }}" height="20" role="img" aria-labelledby="t">
<title id="t">{{ label }}: {{ text }}</title>
<clipPath id="r"><rect width="{{ left + right }}" height="20" rx="4"/></clipPath>
<g clip-path="url(#r)"><rect width="{{ left }}" height="20" fill="#2b322e"/>
<rect x="{{ left }}" width="{{ right }}" height="20" fill="{{ colour }}"/></g>
<g fill="#fff" font-family="Verdana,DejaVu Sans,Geneva,sans-serif" font-size="11" text-anchor="middle"
 aria-hidden="true">
{% for x, length, words in ((left / 2, left, label), (left + right / 2, right, text)) -%}
<text x="{{ x }}" y="14" textLength="{{ length - padding }}" lengthAdjust="spacingAndGlyphs">{{ words }}</text>
{% endfor -%}
</g></svg>
"""
)


@dataclass(frozen=True, slots=True)
class Badge:
    """A badge."""

    svg: str
    is_known: bool


def badge(state: Mapping[str, Any], model_key: str, label: str | None = None) -> Badge:
    models = state.get("models", ())
    model = next((one for one in models if model_key in (one["name"], one["fingerprint"])), None)
    if model is None:
        return Badge(draw(label or model_key, "unknown", _GREY), is_known=False)
    layers = "1 layer" if model["num_layers"] == 1 else f"{model['num_layers']} layers"
    text = f"{model['verdict']} · {layers}, margin {model['margin']}"
    return Badge(draw(label or model["name"], text, _COLOURS.get(model["verdict"], _GREY)), is_known=True)


def draw(label: str, text: str, colour: str) -> str:
    """An SVG with two texts on two coloured fields."""
    shown = _shown(label)
    left, right = _width(shown), _width(text)
    return _TEMPLATE.render(label=shown, text=text, colour=colour, left=left, right=right, padding=2 * PADDING)


def _shown(label: str) -> str:
    plain = "".join("�" if unicodedata.category(one) in _HIDDEN else one for one in label)
    return plain if len(plain) <= MAX_LABEL else f"{plain[: MAX_LABEL - 1]}…"


def _width(text: str) -> int:
    """Approximate width in 11 px Verdana; `textLength` takes up the difference."""
    return round(sum(map(_advance, text))) + 2 * PADDING


def _advance(one: str) -> float:
    if one in _NARROW:
        return 4.4
    if one in _WIDE:
        return 10.0
    if unicodedata.east_asian_width(one) in "WF":
        return 12.0
    return 7.8 if one.isupper() else 6.8
