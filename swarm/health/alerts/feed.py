"""Alerts as RSS 2.0: an item for whatever began, became worse or ended, the newest first. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Final
from xml.etree import ElementTree as Xml

from swarm.health.alerts.rules import AlertTransition, Change

MAX_ITEMS: Final = 100
READ_AGAIN_MIN: Final = 5
_ATOM: Final = "http://www.w3.org/2005/Atom"
_NO_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_WORDS: Final = {
    AlertTransition.BEGAN: "",
    AlertTransition.WORSE: "worse: ",
    AlertTransition.ENDED: "over: ",
    AlertTransition.FORGOTTEN: "not known any more: ",
}

Xml.register_namespace("atom", _ATOM)


def title_of(change: Change) -> str:
    """One line, such as `over: demo-target: nobody serves layers 4…7`."""
    return _WORDS[change.step] + change.alert.finding.text


def rss(changes: Sequence[Change], site: str, own: str, swarm: str, about: str | None = None) -> bytes:
    """The feed.

    Args:
        changes: the oldest first.
        site: URL of the health page.
        own: URL of this feed.
        swarm: the swarm's name.
        about: name or fingerprint of the one model that it is about; None for all.
    """
    feed = Xml.Element("rss", version="2.0")
    channel = Xml.SubElement(feed, "channel")
    title = f"{swarm}: alerts" if about is None else f"{swarm}: alerts about {about}"
    _add(channel, "title", title)
    _add(channel, "link", site)
    _add(channel, "description", "What began and ended in a Canopy swarm, as its health service sees it.")
    _add(channel, "language", "en")
    _add(channel, "ttl", str(READ_AGAIN_MIN))
    if changes:
        _add(channel, "lastBuildDate", http_date(changes[-1].at))
    Xml.SubElement(channel, f"{{{_ATOM}}}link", href=_clean(own), rel="self", type="application/rss+xml")
    for change in reversed(changes[-MAX_ITEMS:]):
        _item(channel, change, site)
    return bytes(Xml.tostring(feed, encoding="utf-8", xml_declaration=True))


def http_date(at: float) -> str:
    """Unix seconds as RSS and HTTP write them."""
    return format_datetime(datetime.fromtimestamp(int(at), UTC), usegmt=True)


def _item(channel: Xml.Element, change: Change, site: str) -> None:
    finding = change.alert.finding
    item = Xml.SubElement(channel, "item")
    _add(item, "title", title_of(change))
    _add(item, "link", site)
    _add(item, "guid", change.id).set("isPermaLink", "false")
    _add(item, "pubDate", http_date(change.at))
    _add(item, "category", change.worst.value)
    _add(item, "category", finding.kind.value)
    lines = [f"{change.worst}, first found {http_date(change.alert.since)}."]
    if change.is_over:
        lines.append(f"It lasted {max(change.at - change.alert.since, 0.0):.0f} s.")
    elif finding.fix is not None:
        lines.append(f"What helps: {finding.fix}")
    _add(item, "description", " ".join(lines))


def _add(parent: Xml.Element, name: str, text: str) -> Xml.Element:
    child = Xml.SubElement(parent, name)
    child.text = _clean(text)
    return child


def _clean(text: str) -> str:
    """The text with each character that XML forbids, escaped or not, replaced."""
    return _NO_XML.sub("\ufffd", text)
